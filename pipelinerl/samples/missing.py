"""Says why there is nothing to show. Pure but for one look whether the run goes on; called by the command `samples`."""

from __future__ import annotations

from difflib import get_close_matches

from pipelinerl.errors import ConfigError
from pipelinerl.samples.choose import Seen, Wanted
from pipelinerl.supervise.open_run import StartedRun

_NAMED = 10


def nothing_found(run: StartedRun, wanted: Wanted, step: int | None, seen: Seen) -> ConfigError:
    """The error for a run in which nothing that `wanted` asks for was found among `seen`."""
    if not seen.groups:
        return _no_rollouts(run)
    if wanted.dataset is not None and wanted.dataset not in seen.datasets:
        names = sorted(seen.datasets)
        near = get_close_matches(wanted.dataset, names, n=1)
        more = ", ..." if len(names) > _NAMED else ""
        return ConfigError(
            "--dataset",
            wanted.dataset,
            f"a data set with recorded rollouts: {', '.join(map(repr, names[:_NAMED]))}{more}",
            _about_dataset(run, wanted.dataset, near),
        )
    low, high = seen.versions or (0, 0)
    options = {"--dataset": wanted.dataset, "--version": wanted.version, "--step": step, "--group": wanted.name}
    given = {name: value for name, value in options.items() if value is not None}
    if list(given) == ["--group"]:
        return ConfigError(
            "--group",
            wanted.name,
            f"the id of one of the {seen.groups} recorded groups, or of a rollout or sample in one",
            "`audit` and this command without --group show ids. Groups that failed as a whole are not recorded.",
        )
    return ConfigError(
        " ".join(given),
        ", ".join(str(value) for value in given.values()),
        f"what holds for a rollout in one of the {seen.groups} recorded groups (versions {low} to {high})",
        "Leave an option out.",
    )


def _about_dataset(run: StartedRun, name: str, near: list[str]) -> str:
    if name in run.config.test_dataset_names:
        return "It is evaluated on, and rollouts of evaluations are not recorded."
    return f"Did you mean {near[0]!r}?" if near else "Leave it out to see all."


def _no_rollouts(run: StartedRun) -> ConfigError:
    debug = run.config.debug
    if debug.streams_from is not None:
        next_step = f"This run reads those of another one (debug.streams_from): give {debug.streams_from}."
    elif run.is_running:
        next_step = (
            "A group is recorded when its last rollout has ended: try again later, and see what the run does now with "
            f"`python -m pipelinerl status {run.run_dir.root}`."
        )
    else:
        next_step = f"It ended before a group was finished: see {run.run_dir.launch_log}, or start it again."
    return ConfigError("run directory", str(run.run_dir.root), "a run with at least one finished group", next_step)
