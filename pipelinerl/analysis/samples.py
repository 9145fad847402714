"""The command `samples`: show what the model said in a run. Works on running runs too, and only reads."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches

from pipelinerl.analysis.sample_view import (
    EVALUATION_LEGEND,
    LEGEND,
    Painter,
    RolloutView,
    json_lines,
    render,
    view_of,
    view_of_evaluation,
)
from pipelinerl.analysis.select import (
    Order,
    Seen,
    Wanted,
    choose,
    evaluation_source,
    fates_of,
    find_evaluations,
    load,
    load_evaluations,
    samples_of_step,
)
from pipelinerl.analysis.token_text import TokenText, one_line, token_text
from pipelinerl.errors import EXIT_RUN_FAILED, ConfigError, StreamError
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.open_run import StartedRun, find_run, open_streams

ViewsWith = Callable[[TokenText | None, int], Iterator[RolloutView]]
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


_COUNT, _MAX_CHARS = 3, 2000
_ORDERS: dict[Order, str] = {
    "last": "the N newest rollouts (the default)",
    "first": "the N oldest rollouts",
    "best": "the N rollouts with the highest reward, the best first",
    "worst": "the N rollouts with the lowest reward, the worst first",
}


def main(argv: list[str]) -> int:
    """Print the rollouts that `argv` asks for; return the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if fault := _contradiction(args):
        parser.error(fault)
    try:
        return _run(args)
    except BrokenPipeError:
        # `| head` has seen enough. Python would complain once more when it flushes at the end.
        _end_output()
        return 0
    except OSError as error:
        # The output's disk is full, or something in the run directory is no file.
        _end_output()
        where = f"{one_line(os.fsdecode(error.filename))}: " if isinstance(error.filename, str | bytes) else ""
        print(f"samples cannot be read or shown: {where}{error.strerror or error}", file=sys.stderr)
        return EXIT_RUN_FAILED


def _end_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(args: argparse.Namespace) -> int:

    run = find_run(args.run_dir)
    try:
        with open_streams(run) as streams:
            _show(run, streams, args)
    except StreamError as error:
        sys.stdout.flush()
        print(error, file=sys.stderr)
        return EXIT_RUN_FAILED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipelinerl samples",
        description="Show rollouts of a run as text, turn by turn: what the model was given, what it said, the reward, "
        "the policy versions that sampled it, and what became of it; rollouts of training, or with --evaluation those "
        "on held-out problems. Special tokens are shown; control characters are shown as escapes (\\x1b). Text is that "
        "of the run's own tokenizer; nothing is downloaded.",
        epilog="Recorded are the training rollouts of finished groups, without failed ones (`audit` counts them by "
        "reason), and actor.recorded_test_samples rollouts of each evaluation, failed ones included. Exit code 0: "
        "something was shown, 1: a stream is damaged, 2: not the directory of a run, or nothing in it matches.",
    )
    parser.add_argument("run_dir", help="output_dir of the run")
    order = parser.add_mutually_exclusive_group()
    for name, line in _ORDERS.items():
        order.add_argument(
            f"--{name}", nargs="?", type=_positive, const=_COUNT, metavar="N", help=f"{line}; N is {_COUNT} if left out"
        )
    parser.add_argument("--evaluation", action="store_true", help="rollouts of evaluations instead of training")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--failed", action="store_true", help="with --evaluation: only rollouts that failed, with the reason"
    )
    kind.add_argument(
        "--no-success", action="store_true", help="with --evaluation: only rollouts without success, failed ones too"
    )
    parser.add_argument("--dataset", metavar="NAME", help="only rollouts of this data set")
    parser.add_argument(
        "--version",
        type=_number,
        metavar="K",
        help="only rollouts with tokens of policy version K; with --evaluation: of the evaluation due at version K",
    )
    parser.add_argument("--step", type=_positive, metavar="K", help="only rollouts in the batch of optimizer step K")
    parser.add_argument(
        "--group",
        metavar="ID",
        help="only this group or evaluation (all of it, unless a number is given); or one rollout or sample",
    )
    parser.add_argument(
        "--max-chars",
        type=_number,
        metavar="N",
        help=f"characters of each turn, its beginning and its end; 0: all. {_MAX_CHARS} if left out, all with --json",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line for each sample")
    return parser


def _contradiction(args: argparse.Namespace) -> str | None:
    if not args.evaluation:
        given = [name for name in ("failed", "no_success") if getattr(args, name)]
        return f"argument --{given[0].replace('_', '-')}: only with --evaluation" if given else None
    if args.step is not None:
        return "argument --step: not with --evaluation: no step trains on evaluations"
    if args.failed and (args.best or args.worst):
        return "argument --failed: not with --best or --worst: failed rollouts have no reward"
    return None


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r} (RUN_DIR stands before the options)")
    return int(text)


def _positive(text: str) -> int:
    if (number := _number(text)) == 0:
        raise argparse.ArgumentTypeError("expected a whole number from 1 on, got 0")
    return number


def _show(run: StartedRun, streams: StreamHub, args: argparse.Namespace) -> None:

    wanted = _wanted(args, streams)
    find = _find_evaluations if args.evaluation else _find_training
    seen, views_with = find(streams, wanted, args)
    if views_with is None:
        raise nothing_found(run, wanted, args, seen)
    decoder, reason = token_text(run)
    max_chars = args.max_chars if args.max_chars is not None else 0 if args.json else _MAX_CHARS
    painter = Painter(not args.json and _has_colors())
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal that cannot show a character gets its escape.
        sys.stdout.reconfigure(errors="backslashreplace")
    if decoder is None:
        print(f"No texts: {reason}. Counts and ids are shown.", file=sys.stderr)
    elif not args.json:
        print(painter.dim(EVALUATION_LEGEND if args.evaluation else LEGEND))
    for view in views_with(decoder, max_chars):
        for line in json_lines(view) if args.json else ("", render(view, painter)):
            print(line)
    sys.stdout.flush()


def _find_training(streams: StreamHub, wanted: Wanted, args: argparse.Namespace) -> tuple[Seen, ViewsWith | None]:
    """What was looked at, and how to show what was chosen; None if nothing was."""

    chosen, seen = choose(streams, wanted)
    if not chosen:
        return seen, None
    fates = fates_of(streams, chosen)
    return seen, lambda decoder, limit: (view_of(each, decoder, fates, limit) for each in load(streams, chosen))


def _find_evaluations(streams: StreamHub, wanted: Wanted, args: argparse.Namespace) -> tuple[Seen, ViewsWith | None]:
    """The same for rollouts of evaluations."""

    made = find_evaluations(streams)
    chosen, seen = choose(streams, wanted, evaluation_source(made, wanted, args.failed, args.no_success))
    if not chosen:
        return seen, None
    return seen, lambda decoder, limit: (
        view_of_evaluation(each, made.has_result(each), decoder, limit) for each in load_evaluations(streams, chosen)
    )


def _wanted(args: argparse.Namespace, streams: StreamHub) -> Wanted:

    given = [name for name in _ORDERS if getattr(args, name) is not None]
    order = given[0] if given else "last"
    count = getattr(args, order) if given else None if args.group is not None else _COUNT
    return Wanted(
        order=order,
        count=count,
        dataset=args.dataset,
        version=args.version,
        name=args.group,
        sample_ids=None if args.step is None else samples_of_step(streams, args.step),
    )


def _has_colors() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
