#!/usr/bin/env bash
# Trains a tiny model to guess numbers by asynchronous RL, with real vLLM servers, on any machine (2 cores are enough).
# Usage: bash scripts/quickstart.sh [seed=N] [output_dir=DIR] [any other override of conf/quickstart.yaml]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

started=$SECONDS
# With fewer than two GPUs this small run is quicker on the CPU.
if [[ -z ${PIPELINERL_DEVICE:-} && $(nvidia-smi -L 2>/dev/null | grep -c '^GPU') -lt 2 ]]; then
  export PIPELINERL_DEVICE=cpu
  if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    printf '\033[1m[quickstart]\033[0m one GPU: this small run is quicker on the CPU\n'
  fi
fi
bash scripts/setup.sh

output_dir=results/quickstart
overrides=()
for argument in "$@"; do
  if [[ $argument == output_dir=* ]]; then output_dir=${argument#output_dir=}; else overrides+=("$argument"); fi
done

printf '\033[1m[quickstart]\033[0m building the tiny model (done once, at most 90 s)\n'
.venv/bin/python -m pipelinerl tiny-model --output results/tiny-model

printf '\033[1m[quickstart]\033[0m training; results and logs go to %s\n' "$output_dir"
.venv/bin/python -m pipelinerl.launch --config-name quickstart output_dir="$output_dir" force_restart=true \
  ${overrides[@]+"${overrides[@]}"}

printf '\033[1m[quickstart]\033[0m done in %s s: see %s/summary.json and %s/learning_curve.png\n' \
  $((SECONDS - started)) "$output_dir" "$output_dir"
