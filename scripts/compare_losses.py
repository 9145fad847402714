"""Compares the curves of two runs, step by step: loss and gradient norm.

    python scripts/compare_losses.py RUN_A RUN_B                                       # two run directories
    python scripts/compare_losses.py tests/golden/ppo.jsonl new.jsonl --tolerance 1e-4 # two files

A curve is a run directory (its `metrics.jsonl`) or a file of such lines. The difference of two numbers is
|a - b| / max(1, |a|, |b|): absolute for small numbers, relative for large ones. A step or a number that one side lacks
is an infinite difference. Exit code: 0 equal within the tolerance, 1 not, 2 a curve cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

METRICS = ("finetune/loss", "finetune/grad_norm")
FILE_OF_A_RUN = "metrics.jsonl"

Curve = dict[int, dict[str, float]]


class Difference(NamedTuple):
    """Where two curves differ by how much; the numbers are None where one side has none."""

    step: int
    metric: str
    left: float | None
    right: float | None
    size: float

    def __str__(self) -> str:
        return f"step {self.step}, {self.metric}: {self.left!r} and {self.right!r}, difference {self.size:.3g}"


def read_curve(path: Path, metrics: Sequence[str] = METRICS) -> Curve:
    """Numbers of `metrics` by step; of a step that was repeated (a resumed run), the newest.

    Raises:
        OSError, ValueError: the file is not there, not such a file, or has none of the metrics.
    """
    file = path / FILE_OF_A_RUN if path.is_dir() else path
    curve: Curve = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            found = {name: float(row[name]) for name in metrics if row.get(name) is not None}
            if found:
                curve[int(row["step"])] = found
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{file}, line {number}: expected an object with `step` and numbers ({error})") from error
    if not curve:
        raise ValueError(f"{file}: no step has {' or '.join(metrics)}; is this a run that trained?")
    return curve


def differences(left: Curve, right: Curve, metrics: Sequence[str] = METRICS) -> Iterable[Difference]:
    """Every pair of numbers, in order of the steps, equal ones with size 0."""
    for step in sorted(left.keys() | right.keys()):
        for metric in metrics:
            a, b = left.get(step, {}).get(metric), right.get(step, {}).get(metric)
            if a is not None or b is not None:
                yield Difference(step, metric, a, b, _size(a, b))


def _size(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return float("inf")
    if a == b or (a != a and b != b):
        return 0.0
    size = abs(a - b) / max(1.0, abs(a), abs(b))
    return size if size == size else float("inf")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, help="run directory or file")
    parser.add_argument("b", type=Path, help="run directory or file")
    parser.add_argument("--tolerance", type=float, default=0.0, help="largest difference that counts as equal")
    parser.add_argument("--metric", action="append", help=f"metric to compare, repeatable; default: {METRICS}")
    options = parser.parse_args(arguments)
    metrics = tuple(options.metric or METRICS)
    try:
        curves = [read_curve(path, metrics) for path in (options.a, options.b)]
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    found = list(differences(*curves, metrics))
    beyond = [difference for difference in found if difference.size > options.tolerance]
    largest = max(found, key=lambda difference: difference.size)
    steps = len({difference.step for difference in found})
    if beyond:
        print(f"differ at {len({d.step for d in beyond})} of {steps} steps (tolerance {options.tolerance:g})")
        print(f"first:   {beyond[0]}")
        print(f"largest: {largest}")
        return 1
    print(f"equal at all {steps} steps (tolerance {options.tolerance:g}); largest difference {largest.size:.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
