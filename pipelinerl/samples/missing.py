"""Says why there is nothing to show. Pure but for one look whether the run goes on; called by the command `samples`."""

from __future__ import annotations

import argparse
from difflib import get_close_matches

from pipelinerl.errors import ConfigError
from pipelinerl.run.open_run import StartedRun
from pipelinerl.samples.choose import Seen, Wanted

_NAMED = 10


def nothing_found(run: StartedRun, wanted: Wanted, args: argparse.Namespace, seen: Seen) -> ConfigError:
    """The error for a run in which nothing that `wanted` asks for was found among `seen`."""
    if not seen.groups:
        return _no_evaluations(run) if args.evaluation else _no_rollouts(run)
    what = (
        "one of the {} recorded rollouts of evaluations"
        if args.evaluation
        else "a rollout in one of the {} recorded groups"
    )
    if wanted.dataset is not None and wanted.dataset not in seen.datasets:
        names = sorted(seen.datasets)
        near = get_close_matches(wanted.dataset, names, n=1)
        more = ", ..." if len(names) > _NAMED else ""
        return ConfigError(
            "--dataset",
            wanted.dataset,
            f"a data set with recorded rollouts: {', '.join(map(repr, names[:_NAMED]))}{more}",
            _about_dataset(run, wanted.dataset, near, args.evaluation),
        )
    low, high = seen.versions or (0, 0)
    options = {"--dataset": wanted.dataset, "--version": wanted.version, "--step": args.step, "--group": wanted.name}
    given = {name: value for name, value in options.items() if value is not None}
    flags = [f"--{name.replace('_', '-')}" for name in ("failed", "no_success") if getattr(args, name)]
    if list(given) == ["--group"] and not flags:
        one = f"the {seen.groups} recorded groups"
        next_step = "`audit` and this command without --group show ids. Groups that failed as a whole are not recorded."
        if args.evaluation:
            one = "the evaluations with recorded rollouts"
            next_step = "This command without --group shows ids."
        return ConfigError(
            "--group", wanted.name, f"the id of one of {one}, or of a rollout or sample in one", next_step
        )
    return ConfigError(
        " ".join([*given, *flags]) or "--evaluation",
        ", ".join(str(value) for value in given.values()) or True,
        f"what holds for {what.format(seen.groups)} (versions {low} to {high})",
        "Leave an option out." if given or flags else "See what they hold without --best and --worst.",
    )


def _about_dataset(run: StartedRun, name: str, near: list[str], is_evaluation: bool) -> str:
    if not is_evaluation and name in run.config.test_dataset_names:
        return "It is evaluated on: give --evaluation."
    return f"Did you mean {near[0]!r}?" if near else "Leave it out to see all."


def _no_evaluations(run: StartedRun) -> ConfigError:
    config = run.config
    if config.actor.recorded_test_samples == 0:
        next_step = "actor.recorded_test_samples=0 asked for none; a later start of the run may have another value."
    elif not config.test_dataset_names:
        next_step = "The run has no test_dataset_names, so nothing is evaluated."
    elif run.is_running:
        next_step = "A rollout is recorded when it has ended: try again later."
    else:
        next_step = "It ended before, or it was made by a version that recorded none."
    return ConfigError("--evaluation", str(run.run_dir.root), "a run with recorded rollouts of evaluations", next_step)


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
