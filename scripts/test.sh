#!/usr/bin/env bash
# Runs the linters and the test suite. Usage: bash scripts/test.sh [--all] [pytest arguments]
# --all adds the tests marked `slow`. Tests marked `gpu` run where there is an NVIDIA GPU and are skipped elsewhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh test

options=(--durations=15 -m "not slow")
if [[ ${1:-} == --all ]]; then options=(--durations=15); shift; fi
# Three files at a time, those with whole runs first: many tests wait. Tests on a GPU share it, so there they come one by one.
if ! nvidia-smi -L >/dev/null 2>&1; then options+=(-n 3 --dist loadfile --no-loadscope-reorder); fi
say() { printf '\033[1m[test]\033[0m %s\n' "$*"; }

say "ruff"
.venv/bin/python -m ruff check pipelinerl tests scripts
say "mypy"
.venv/bin/python -m mypy
say "import-linter"
PYTHONPATH=. .venv/bin/lint-imports --no-cache
say "pytest"
# One thread for each process: the suite starts many on few cores.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
  .venv/bin/python -m pytest "${options[@]}" "$@"
