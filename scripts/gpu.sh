#!/usr/bin/env bash
# The GPU measurements of docs/benchmarks.md and the GPU tests, as plain commands.
#   MODEL=FOLDER OUT=results/gpu bash scripts/gpu.sh                     # print the list
#   MODEL=FOLDER OUT=results/gpu bash scripts/gpu.sh server tests-1      # run these, one after the other
# `-1`, `-2`, `-4` at the end of a name: GPUs needed (none: one). MODEL is a small chat model, such as SmolLM2-135M.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
model=${MODEL:-} out=${OUT:-results/gpu} python=${PYTHON:-python}
runs="$python scripts/benchmark_runs.py" cuda="--device cuda --samples-per-step 256 --mean-tokens 128 --concurrency 256"
guess="$python -m pipelinerl.launch --config-name guessing_2gpu model_path=$model finetune.max_train_steps=600"
card="world.actor_gpus=[[0]] world.finetune_gpus=[0] vllm_config.vllm_kwargs.gpu-memory-utilization=0.1 vllm_config.vllm_kwargs.kv-cache-memory-bytes=4294967296"
commands=(
  "tests-1|$python -m pytest -v -rA tests/gpu"
  "tests-2|$python -m pytest -v -rA tests/gpu"
  "league|$python scripts/league.py --model $model --repeats 1 --out $out/league"
  "server|$python scripts/benchmark_server.py --device cuda --model $model --graphs decode --concurrency 256 --output $out/server.json"
  "trainer|$python scripts/benchmark_trainer.py --device cuda --size 0.5 --pack-tokens 4096 16384 --output $out/trainer.json"
  "update-1|$runs splits $cuda --only one-card --size 1.5 --checkpointing --output $out/update-1.json"
  "update-2|$runs splits $cuda --only 1server-1rank --size 1.5 --checkpointing --output $out/update-2.json"
  "schedules-2|$runs schedules $cuda --model $model --learning-rate 2e-5 --steps 32 --max-lag 1024 --output $out/schedules.json"
  "splits-2|$runs splits $cuda --only 1server-1rank 1server-2ranks-zero3 1server-2ranks-fsdp tp2-2ranks-colocated-zero3 --size 0.5 --output $out/splits-2.json"
  "splits-4|$runs splits $cuda --only 3servers-1rank 2servers-2ranks-zero3 tp2-2ranks-zero3 2xtp2-4ranks-colocated-zero3 --size 0.5 --output $out/splits-4.json"
  "guessing-1|$guess output_dir=$out/guessing-1 finetune.seq_length=16384 $card"
  "guessing-2|$guess output_dir=$out/guessing-2"
)
(( $# )) || { printf '%s\n' "${commands[@]/|/: }"; exit 0; }
mkdir -p "$out"
failed=0
for name in "$@"; do
  for entry in "${commands[@]}"; do
    [[ ${entry%%|*} == "$name" ]] || continue
    echo "== $name: ${entry#*|}"
    ${entry#*|} 2>&1 | tee "$out/$name.log" || { echo "== $name failed"; failed=1; }
    continue 2
  done
  echo "unknown measurement: $name" >&2; failed=1
done
exit $failed
