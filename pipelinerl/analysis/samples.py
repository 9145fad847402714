"""The command `samples`: show what the model said in a run. Works on running runs and changes nothing."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from pipelinerl.analysis.sample_view import (
    EVALUATION_LEGEND,
    LEGEND,
    Record,
    json_lines,
    record_of,
    record_of_evaluation,
    render,
)
from pipelinerl.analysis.select import (
    Candidate,
    Evaluations,
    Order,
    Seen,
    Wanted,
    choose,
    fates_of,
    find_evaluations,
    load,
    load_evaluations,
    samples_of_step,
)
from pipelinerl.commands import positive, typed, whole_number
from pipelinerl.errors import EXIT_RUN_FAILED, ConfigError, StreamError
from pipelinerl.streams.hub import StreamHub
from pipelinerl.streams.open_run import StartedRun, find_run, open_streams
from pipelinerl.tracking.token_text import TokenText, one_line, token_text

_NAMED = 10


def nothing_found(run: StartedRun, wanted: Wanted, args: argparse.Namespace, seen: Seen) -> ConfigError:
    """The error if nothing in `seen` is `wanted`."""
    if not seen.groups:
        return _no_rollouts(run, args.evaluation)
    options = {"--dataset": wanted.dataset, "--version": wanted.version, "--step": args.step, "--group": wanted.name}
    given = {name: value for name, value in options.items() if value is not None}
    flags = [f"--{name.replace('_', '-')}" for name in ("failed", "no_success") if getattr(args, name)]
    next_step = "Omit an option." if given or flags else "Omit --best and --worst."
    if wanted.dataset is not None and wanted.dataset not in seen.datasets:
        near = get_close_matches(wanted.dataset, sorted(seen.datasets), n=1)
        next_step = f"Did you mean {near[0]!r}?" if near else next_step
        if not args.evaluation and wanted.dataset in _held_out_names(run):
            next_step = "It is held out: use --evaluation."
    what = "recorded rollouts of evaluations" if args.evaluation else "recorded groups"
    low, high = seen.versions or (0, 0)
    names = ", ".join(map(repr, sorted(seen.datasets)[:_NAMED]))
    return ConfigError(
        " ".join([*given, *flags]) or "--evaluation",
        ", ".join(str(value) for value in given.values()) or True,
        f"a value that matches one of the {seen.groups} {what} (versions {low} to {high}, data sets {names})",
        next_step,
    )


def _held_out_names(run: StartedRun) -> list[Any]:
    return [*run.config.test_dataset_names, *(each.name for each in run.config.eval)]


def _no_rollouts(run: StartedRun, is_evaluation: bool) -> ConfigError:
    config = run.config
    if is_evaluation and config.actor.recorded_test_samples == 0:
        next_step = "actor.recorded_test_samples=0 records none."
    elif is_evaluation and not config.is_evaluated:
        next_step = "The run has no test_dataset_names and no eval, so nothing is evaluated."
    elif not is_evaluation and config.debug.streams_from is not None:
        next_step = f"This run reads the rollouts of {config.debug.streams_from} (debug.streams_from): use that run."
    elif run.is_running:
        next_step = f"Try again later; `{typed('status')} {run.run_dir.root}` shows what the run is doing."
    else:
        next_step = f"It ended before: see {run.run_dir.launch_log}."
    what = "recorded rollouts of evaluations" if is_evaluation else "at least one finished group"
    return ConfigError("run directory", str(run.run_dir.root), f"a run with {what}", next_step)


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
    run = find_run(args.run_dir)
    args.evaluation = args.evaluation or run.config.debug.mode == "evaluation"  # it has no others
    try:
        with open_streams(run) as streams:
            _show(run, streams, args)
        return 0
    except StreamError as error:
        sys.stdout.flush()
        print(error, file=sys.stderr)
        return EXIT_RUN_FAILED
    except BrokenPipeError:
        # `| head` has ended. Python would raise again when it flushes at exit.
        _end_output()
        return 0
    except OSError as error:
        # The disk of the output is full, or something in the run directory is not a file.
        _end_output()
        where = f"{one_line(os.fsdecode(error.filename))}: " if isinstance(error.filename, str | bytes) else ""
        print(f"samples cannot be read or shown: {where}{error.strerror or error}", file=sys.stderr)
        return EXIT_RUN_FAILED


def _end_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed("samples"),
        usage="%(prog)s RUN_DIR [options]",
        description="Show rollouts of a run as text, turn by turn, with reward, policy versions and fate; rollouts of "
        "training, or with --evaluation those on held-out problems. Special tokens are shown, control characters are "
        "escaped (\\x1b). Text is decoded with the run's own tokenizer; nothing is downloaded.",
        epilog="Recorded are the training rollouts of finished groups, without failed ones (`audit` counts these by "
        "reason), and actor.recorded_test_samples rollouts of each evaluation, with failed ones. Exit code 0: something"
        " was shown, 1: a stream is damaged, 2: not the directory of a run, or nothing in it matches.",
    )
    parser.add_argument("run_dir", help="output_dir of the run")
    order = parser.add_mutually_exclusive_group()
    for name, line in _ORDERS.items():
        order.add_argument(
            f"--{name}", nargs="?", type=positive, const=_COUNT, metavar="N", help=f"{line} (N: {_COUNT})"
        )
    parser.add_argument("--evaluation", action="store_true", help="rollouts of evaluations instead of training")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--failed", action="store_true", help="with --evaluation: only rollouts that failed, with the reason"
    )
    kind.add_argument(
        "--no-success",
        action="store_true",
        help="with --evaluation: only rollouts without success, including failed ones",
    )
    parser.add_argument("--dataset", metavar="NAME", help="only rollouts of this data set")
    parser.add_argument(
        "--version",
        type=whole_number,
        metavar="K",
        help="only rollouts with tokens of policy version K; with --evaluation: of the evaluation due at version K",
    )
    parser.add_argument("--step", type=positive, metavar="K", help="only rollouts in the batch of optimizer step K")
    parser.add_argument(
        "--group",
        metavar="ID",
        help="only this group or evaluation (all of it, unless a number is given), or this rollout or sample",
    )
    parser.add_argument(
        "--max-chars",
        type=whole_number,
        metavar="N",
        help=f"characters shown of each turn, half from each end; 0: all (default: {_MAX_CHARS}, with --json all)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per sample")
    return parser


def _contradiction(args: argparse.Namespace) -> str | None:
    if not args.evaluation:
        given = [name for name in ("failed", "no_success") if getattr(args, name)]
        return f"argument --{given[0].replace('_', '-')}: only with --evaluation" if given else None
    if args.step is not None:
        return "argument --step: not allowed with --evaluation: no step trains on evaluations"
    if args.failed and (args.best or args.worst):
        return "argument --failed: not allowed with --best or --worst: failed rollouts have no reward"
    return None


def _show(run: StartedRun, streams: StreamHub, args: argparse.Namespace) -> None:
    wanted = _wanted(args, run, streams)
    chosen, seen = choose(streams, wanted)
    if not chosen:
        raise nothing_found(run, wanted, args, seen)
    decoder, reason = token_text(run.config, run.run_dir)
    max_chars = args.max_chars if args.max_chars is not None else 0 if args.json else _MAX_CHARS
    has_colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal that cannot show a character gets its escape.
        sys.stdout.reconfigure(errors="backslashreplace")
    if decoder is None:
        print(f"No texts: {reason}. Only counts and ids are shown.", file=sys.stderr)
    elif not args.json:
        legend = EVALUATION_LEGEND if args.evaluation else LEGEND
        print(f"\x1b[2m{legend}\x1b[0m" if has_colors else legend)
    for record in read_records(streams, wanted, chosen, decoder, max_chars):
        for line in json_lines(record) if args.json else ("", render(record, has_colors)):
            print(line)
    sys.stdout.flush()


def read_records(
    streams: StreamHub, wanted: Wanted, chosen: Sequence[Candidate], decoder: TokenText | None, max_chars: int
) -> Iterator[Record]:
    """What to show of the chosen rollouts, of each text at most `max_chars` characters (0: all).

    Raises StreamError if one cannot be read.
    """
    if wanted.evaluations is None:
        fates = fates_of(streams, chosen)
        yield from (record_of(each, decoder, fates, max_chars) for each in load(streams, chosen))
    else:
        for each in load_evaluations(streams, chosen):
            yield record_of_evaluation(each, wanted.evaluations.has_result(each), decoder, max_chars)


def evaluations_of(run: StartedRun, streams: StreamHub, is_asked_for: bool) -> Evaluations | None:
    """For `Wanted.evaluations`; a run that only evaluates has no other rollouts."""
    is_alone = run.config.debug.mode == "evaluation"
    return find_evaluations(streams, is_continued=is_alone) if is_asked_for or is_alone else None


def _wanted(args: argparse.Namespace, run: StartedRun, streams: StreamHub) -> Wanted:
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
        evaluations=evaluations_of(run, streams, args.evaluation),
        only_failed=args.failed,
        no_success=args.no_success,
    )
