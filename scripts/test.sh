#!/usr/bin/env bash
# Runs the linters and the test suite. Usage: bash scripts/test.sh [--all] [pytest arguments]
# --all adds the tests marked `slow`. Tests marked `gpu` run where there is an NVIDIA GPU and are skipped elsewhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh test

all=false
if [[ ${1:-} == --all ]]; then all=true; shift; fi
# Two files at a time, those with whole runs first. Slow tests measure times, and tests on a GPU share it: one at a time.
parallel=(-n 2 --dist loadfile --no-loadscope-reorder)
if nvidia-smi -L >/dev/null 2>&1; then parallel=(); fi
say() { printf '\033[1m[test]\033[0m %s\n' "$*"; }
# One thread for each process: the suite starts many on few cores. Paths without such tests are no failure (code 5).
run_tests() {
  OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
    .venv/bin/python -m pytest --durations=15 "$@" || [[ $? == 5 && $all == true ]]
}

say "ruff"
.venv/bin/python -m ruff check pipelinerl tests scripts
say "mypy"
.venv/bin/python -m mypy
say "import-linter"
PYTHONPATH=. .venv/bin/lint-imports --no-cache
say "pytest"
run_tests ${parallel[@]+"${parallel[@]}"} -m "not slow" "$@"
if [[ $all == true ]]; then say "pytest, slow tests"; run_tests -m slow "$@"; fi
