#!/usr/bin/env bash
# Kills random processes of a run at random moments, resumes after each kill, and audits what is left at the end.
# Usage: bash scripts/soak.sh [KILLS [SEED [files|redis|both [OUTPUT_DIR [override ...]]]]]   (30 kills, seed 1, both)
# SOAK_LIMIT_S bounds the time for kills of one backend (default 6 h); the end of training comes on top, at most 1 h.
# Exit code 0: training finished, the audit is clean, it has learned, and nothing took longer than its deadline.
# 3: the same, but the limit came before all kills were made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
if [[ -z ${PIPELINERL_DEVICE:-} && $(nvidia-smi -L 2>/dev/null | grep -c '^GPU') -lt 2 ]]; then
  export PIPELINERL_DEVICE=cpu
fi
kills=${1:-30} seed=${2:-1} backends=${3:-both} output_dir=${4:-results/soak}
if [[ $backends == both ]]; then backends="files redis"; fi
.venv/bin/python -m pipelinerl tiny-model --output results/tiny-model
result=0
for backend in $backends; do
  printf '\033[1m[soak]\033[0m streams=%s: %s kills, results in %s\n' "$backend" "$kills" "$output_dir-$backend"
  .venv/bin/python scripts/soak.py --kills "$kills" --seed "$seed" --output-dir "$output_dir-$backend" \
    --limit-s "${SOAK_LIMIT_S:-21600}" "streams=$backend" "${@:5}" || result=$?
  if [[ $result == 1 || $result == 2 ]]; then exit "$result"; fi
done
exit "$result"
