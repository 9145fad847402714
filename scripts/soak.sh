#!/usr/bin/env bash
# Kills random processes of a run at random moments, resumes after each kill, and audits what is left at the end.
# Usage: bash scripts/soak.sh [KILLS [SEED [files|redis [OUTPUT_DIR [override ...]]]]]   (30 kills, seed 1, files)
# Exit code 0: training came to its end, the audit is clean, and nothing took longer than its deadline.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
if [[ -z ${PIPELINERL_DEVICE:-} && $(nvidia-smi -L 2>/dev/null | grep -c '^GPU') -lt 2 ]]; then
  export PIPELINERL_DEVICE=cpu
fi
kills=${1:-30} seed=${2:-1} backend=${3:-files}
output_dir=${4:-results/soak-$backend}
.venv/bin/python -m pipelinerl tiny-model --output results/tiny-model
exec .venv/bin/python scripts/soak.py --kills "$kills" --seed "$seed" --output-dir "$output_dir" \
  "streams=$backend" "${@:5}"
