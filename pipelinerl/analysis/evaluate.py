"""The command `eval`: evaluate a model, or the model of a run, with the servers, workers and records of a run.

It starts a run without training (`debug.mode=evaluation`), with the configuration of the given run, or for a model the
one that `--config-name` names. Overrides of the command line win over both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelinerl.commands import positive, typed
from pipelinerl.config.agent import PROMPT_LOADER, found_file, settle_agent
from pipelinerl.config.compose import DEFAULT_CONFIG, ComposedConfig, compose, compose_plain
from pipelinerl.config.load import load_config, save_composable
from pipelinerl.config.run import LIKE_TRAINING
from pipelinerl.errors import ConfigError
from pipelinerl.launch import start
from pipelinerl.rundir.durable import ScratchFolder
from pipelinerl.rundir.layout import RunDir

_COMMAND = typed("eval")
# Replaces what a run's configuration says of training, trackers and records.
_NOT_OF_THE_RUN: dict[str, Any] = {
    "streams": {"backend": "files"},
    "wandb": {"mode": "disabled"},
    "tensorboard": {"enabled": False},
    "tracking": {"sinks": []},
    "force_restart": False,
}
_COLOCATED_KEYS = ("placement", "sleep_level", "offload_optimizer")


def main(argv: list[str]) -> int:
    """Evaluate what `argv` names; return the exit code of the run that does it."""
    overrides = [word for word in argv if word.startswith("~") or ("=" in word and not word.startswith("-"))]
    args = _parser().parse_args([word for word in argv if word not in overrides])
    with ScratchFolder("evaluation") as folder:
        return start(lambda: evaluation_config(args, overrides, folder))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_COMMAND,
        usage=f"{_COMMAND} MODEL_OR_RUN [--tasks NAME,...] [-k K] [--output DIR] [key=value ...]",
        description="Evaluate a model on held-out problems and print avg@k and pass@k with 95 %% confidence intervals, "
        "the length of rollouts and the share that was cut off. Writes a run directory with evaluation.json and with "
        f"rollouts that `{typed('samples')} DIR` shows.",
        epilog="Ctrl-C keeps the finished rollouts; the same command continues with them. Exit code 0: evaluated, "
        "1: failed, 2: something has to be changed, 130: interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL_OR_RUN",
        help="output_dir of a run (its best model, else its last one, on its held-out sets with its sampling), a model "
        "in one, or any model folder or hub name",
    )
    parser.add_argument(
        "--tasks", metavar="NAME[,NAME]", help="held-out sets of the task to evaluate instead of the configured ones"
    )
    parser.add_argument(
        "-k",
        "--samples",
        type=positive,
        metavar="K",
        help="samples of each problem; actor.test_samples limits the problems only if there is one set",
    )
    parser.add_argument("--output", metavar="DIR", help="where to write (default: results/NAME-evaluation)")
    parser.add_argument("--config-name", metavar="NAME", help="task and sampling for a model, or instead of the run's")
    parser.add_argument("--config-dir", metavar="DIR", help="folder with your configurations and your task's code")
    return parser


def evaluation_config(args: argparse.Namespace, overrides: Sequence[str], folder: Path) -> ComposedConfig:
    """Return the configuration of the run that evaluates. Its files go to `folder`.

    Raises:
        ConfigError: there is no such model or run, or something in the configuration has to be changed.
    """
    given = {word.partition("=")[0] for word in overrides}
    run, model = find_model(args.model, needs_model="model_path" not in given)
    user_dirs = [] if args.config_dir is None else [Path(args.config_dir).expanduser().absolute()]
    if run is not None and args.config_name is None:
        file = save_composable(_data_of_run(run), folder / "run.yaml")
        data = compose_plain(file.stem, [folder, *user_dirs], overrides).data
    else:
        name = Path(args.config_name or DEFAULT_CONFIG).expanduser()
        if name.is_absolute():
            user_dirs = list(dict.fromkeys([name.parent, *user_dirs]))
        trackers = ["wandb.mode=disabled"]
        data = compose_plain(name.name.removesuffix(".yaml"), user_dirs, [*trackers, *overrides]).data
    if "model_path" not in given:
        data["model_path"] = model
    if args.output is not None or "output_dir" not in given:
        data["output_dir"] = args.output or str(default_output(args.model))
    data["debug"] = {**(data.get("debug") or {}), "mode": "evaluation", "streams_from": None}
    settle_agent(data, user_dirs)  # its prompts are the sets to choose from
    tasks = None if args.tasks is None else args.tasks.split(",")
    if data.get("dataset_loader") == PROMPT_LOADER:
        if "dataset_loader_params.model_path" not in given:
            data["dataset_loader_params"]["model_path"] = data["model_path"]
        tasks = tasks and [found_file(name, user_dirs) for name in tasks]
    _choose_sets(data, tasks, args.samples)
    file = save_composable(data, folder / "evaluation.yaml")
    words = ["--config-name", str(file)] + (["--config-dir", str(user_dirs[0])] if user_dirs else [])
    # The notes are about training.
    return replace(compose(words), notes=[])


def find_model(name: str, needs_model: bool = True) -> tuple[RunDir | None, str]:
    """Return the run that `name` is or is inside of (None: no run), and the model to evaluate ("": none is needed).

    Raises:
        ConfigError: the run has not exported a model yet.
    """
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        return None, name
    run = next((RunDir(each) for each in (folder, *folder.parents) if RunDir(each).config_file.is_file()), None)
    if run is None:
        return None, name
    if folder != run.root:
        return run, str(folder)
    for model in (run.best_model, run.current_model):
        if (model / "config.json").is_file():
            return run, str(model.resolve())
    if not needs_model:
        return run, ""
    raise ConfigError(
        "MODEL_OR_RUN",
        name,
        f"a run with a model in {run.current_model}; a run exports one with its first checkpoint and at its end",
        f"Evaluate the model that it started from: {_COMMAND} {name} model_path=MODEL.",
    )


def default_output(model: str) -> Path:
    """The default folder for the evaluation of MODEL_OR_RUN."""
    name = Path(model).expanduser().absolute().name if Path(model).is_dir() else model.replace("/", "-")
    return Path("results") / f"{name}-evaluation"


def _data_of_run(run: RunDir) -> dict[str, Any]:
    """The configuration of a run as plain data, without what only concerns training."""
    data = load_config(run.config_file).model_dump()
    data |= _NOT_OF_THE_RUN
    data["world"] = {key: value for key, value in data["world"].items() if key not in _COLOCATED_KEYS}
    data["finetune"] |= {"keep_best": None, "lora": {"enabled": False}}
    data["actor"] |= {"evaluation_concurrency": None}
    # Parameters that were equal to those of training keep following them.
    training, evaluation = data["llm"]["parameters"], data["test_llm"]["parameters"]
    for key in LIKE_TRAINING:
        if evaluation.get(key) == training.get(key):
            evaluation.pop(key, None)
    return data


def _choose_sets(data: dict[str, Any], tasks: list[str] | None, samples: int | None) -> None:
    """Set in `data` which held-out sets are evaluated, and with how many samples per problem."""
    own = {repr(each.get("name")): each for each in data.get("eval") or [] if isinstance(each, dict)}
    plain = [name for name in data.get("test_dataset_names") or [] if repr(name) not in own]
    names = [*plain, *(each["name"] for each in own.values() if "name" in each)] if tasks is None else tasks
    if tasks is not None:
        data["test_dataset_names"] = tasks
        data["eval"] = [own[repr(name)] for name in tasks if repr(name) in own]
    if samples is None:
        return
    # A limit on problems stays if there is one set.
    most = (data.get("actor") or {}).get("test_samples") if len(names) == 1 else None
    sets = [own.get(repr(name), {"name": name, "problems": most}) for name in names]
    data["test_dataset_names"], data["eval"] = [], [{**each, "k": samples} for each in sets]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
