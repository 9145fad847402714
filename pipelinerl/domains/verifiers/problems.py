"""Problems of an environment of the package verifiers: the rows of its data sets. Called through `dataset_loader`.

Waits for the environment to be made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

from pipelinerl.domains.splits import check_names
from pipelinerl.errors import DomainError

_ROW_KEYS = ("prompt", "answer", "info", "task", "example_id")
# Where the environment has no evaluation data, at most one row of so many is kept out of training.
_LEAST_TRAINED = 5


def load_problems(
    dataset_names: Sequence[str],
    *,
    env_id: str,
    env_args: Mapping[str, Any] | None = None,
    num_train: int | None = None,
    num_test: int = 100,
    success_reward: float = 1.0,
    score_in: Literal["process", "worker"] = "process",
    score_timeout_s: float = 60.0,
) -> list[dict[str, Any]]:
    """Return the rows for `train` and `test`.

    Args:
        env_id: as for `verifiers.load_environment`, or the dotted path of a class or function that returns one.
        env_args: its arguments.
        num_train: rows of its data set; None: all.
        num_test: rows of its evaluation data set; if it has none, as many (a fifth at most) are kept out of the
            other one.
        success_reward: from which reward on a rollout is a success.
        score_in: `process`: the rubric runs in a grader process, on the plain parts of a rollout's state. `worker`:
            where the rollout runs, with its whole state; for rubrics that ask another model, or need live objects.
        score_timeout_s: deadline of the rubric in a grader process.

    Raises:
        DomainError: the package or the environment is missing, or it cannot be used here.
    """
    if find_spec("verifiers") is None:
        raise DomainError("verifiers: the package verifiers is needed. Install pipelinerl[verifiers].")
    from pipelinerl.domains.verifiers.environment import environment_of

    check_names("verifiers", dataset_names)
    if score_in not in ("process", "worker"):
        raise DomainError(f"verifiers: score_in: got {score_in!r}, expected process or worker.")
    arguments = dict(env_args or {})
    environment = environment_of(env_id, arguments)
    if environment.message_type != "chat":
        raise DomainError(f"verifiers: {env_id!r} completes text, expected an environment of chats.")
    train, test = _rows(environment, num_test)
    common = {
        "env_id": env_id,
        "env_args": arguments,
        "success_reward": success_reward,
        "score_in": score_in,
        "score_timeout_s": score_timeout_s,
    }
    rows = {"train": train[:num_train], "test": test}
    return [
        {
            "id": f"verifiers-{name}-{index}",
            "dataset": name,
            "row": {key: row[key] for key in _ROW_KEYS if key in row},
            **common,
        }
        for name in dataset_names
        for index, row in enumerate(rows[name])
    ]


def _rows(environment: Any, num_test: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and held-out rows."""
    if environment.dataset is None:
        held_out = [dict(row) for row in environment.eval_dataset]
        return held_out[num_test:], held_out[:num_test]
    rows = [dict(row) for row in environment.dataset]
    if environment.eval_dataset is not None:
        return rows, [dict(row) for row in environment.eval_dataset][:num_test]
    kept_out = min(num_test, len(rows) // _LEAST_TRAINED)
    return rows[: len(rows) - kept_out], rows[len(rows) - kept_out :]
