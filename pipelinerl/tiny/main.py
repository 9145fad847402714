"""`python -m pipelinerl tiny-model`: build the small model that the quickstart trains on a CPU."""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from pipelinerl.commands import typed
from pipelinerl.errors import EXIT_USER_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed("tiny-model"),
        description="Build a tokenizer and a model of half a million parameters that knows the guessing game's format, "
        "but plays it badly: a start for reinforcement learning on a CPU. Takes about a minute; the result is reused.",
    )
    parser.add_argument("--output", type=Path, help="folder of the model (default: results/tiny-model)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and warm-up (default: 1)")
    tied = parser.add_mutually_exclusive_group()
    tied.add_argument("--tied", dest="tied", action="store_true", help="share input and output embeddings")
    tied.add_argument("--untied", dest="tied", action="store_false", help="separate embeddings (default)")
    parser.set_defaults(tied=False)
    parser.add_argument("--no-warmup", action="store_true", help="leave the weights random (takes seconds)")
    parser.add_argument("--high", type=int, help="numbers of the game are 1..HIGH")
    parser.add_argument("--max-turns", type=int, help="guesses in a game")
    parser.add_argument("--opening-guesses", type=int, help="wrong guesses that a game starts with")
    return parser


def main(argv: list[str]) -> int:
    """Build the model described by `argv`; return the exit code (0, or 2 for a request that cannot be met)."""
    args = _parser().parse_args(argv)
    # transformers imports DeepSpeed, which warns where it finds no GPU; none is used here.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from pipelinerl.tiny.build import DEFAULT_ROOT, build_tiny_model
    from pipelinerl.tiny.warmup import WarmupSettings

    try:
        warmup = None
        if not args.no_warmup:
            given = {"high": args.high, "max_turns": args.max_turns, "opening_guesses": args.opening_guesses}
            given = {name: value for name, value in given.items() if value is not None}
            warmup = dataclasses.replace(WarmupSettings(), **given)
        output_dir = build_tiny_model(
            args.output or DEFAULT_ROOT,
            seed=args.seed,
            tie_word_embeddings=args.tied,
            warmup=warmup,
            progress=lambda line: print(line, flush=True),
        )
    except ValueError as error:
        print(f"tiny-model: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    print(f"use it with model_path={output_dir}")
    return 0
