"""One worker of a real vLLM model on a CPU that is updated in place: two copies of it, with and without copy plans.

    python -m fakes.planned_vllm MODEL_FOLDER RANK RANKS MEETING_FILE UPDATES CHUNK_BYTES

Prints one JSON object for each update: how it began, and the tensors that differ. Needs no server: the layers are
vLLM's, before it packs them as it does on CPUs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from fakes.random_model import perturb
from transformers import AutoModelForCausalLM
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform

from pipelinerl.inference.gloo_engine import GlooWeightTransferEngine
from pipelinerl.inference.in_place import can_load_in_place
from pipelinerl.inference.planned_load import COPY_PLAN_VARIABLE, PlannedLoader
from pipelinerl.inference.transfer_info import PackedUpdateInfo
from pipelinerl.weights.buffers import packed_buffers
from pipelinerl.weights.source import ModuleSource

PASS = 3


class Wire:
    """Stands for the group: hands out the buffers of an update."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def broadcast(self, buffer: torch.Tensor) -> None:
        buffer.copy_(self.buffers.pop(0))


class Engine(GlooWeightTransferEngine):
    """Loads in place on a CPU as well."""

    may_load_in_place = True

    def __init__(self, model: torch.nn.Module, config: Any, chunk_bytes: int, environ: dict[str, str]) -> None:
        self.model, self.model_config = model, config.model_config
        self._chunk_bytes = chunk_bytes
        self._group: Any = Wire()
        self._loader = PlannedLoader(environ)

    def update(self, info: PackedUpdateInfo, buffers: list[torch.Tensor]) -> str:
        self._group.buffers = list(buffers)
        self.start_weight_update()
        assert self._in_place and self._loader is not None
        loads = self._loader.load
        modes = []

        def load(*args: Any) -> None:
            modes.append(self._loader.mode.value)
            loads(*args)

        self._loader.load = load
        self.receive_weights(info)
        self._loader.load = loads
        self.finish_weight_update()
        assert len(set(modes)) == 1
        return str(modes[0])


def main(folder: Path, rank: int, ranks: int, meeting_file: str, updates: int, chunk_bytes: int) -> None:
    torch.set_num_threads(1)
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = EngineArgs(
        model=str(folder), dtype="bfloat16", enforce_eager=True, tensor_parallel_size=ranks
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, f"file://{meeting_file}", rank, "gloo")
        initialize_model_parallel(ranks, 1)
        engines = []
        for environ in ({}, {COPY_PLAN_VARIABLE: "0"}):
            config.compilation_config.static_forward_context.clear()
            torch.set_default_dtype(torch.bfloat16)
            model = initialize_model(vllm_config=config)
            torch.set_default_dtype(torch.float32)
            engines.append(Engine(model, config, chunk_bytes, environ))
        # What it imports looks at the device first.
        can_load_in_place(engines[0].model, {})
        type(current_platform).is_cuda = lambda self: True
        planned, usual = engines
        for version in range(updates):
            perturb(trained, seed=version)
            # Some updates travel in the model's dtype, and then all in another.
            source = ModuleSource(trained, dtype=torch.bfloat16 if version < updates // 2 else torch.float32)
            metas = source.metadata()
            names, dtypes = [meta.name for meta in metas], [meta.dtype_name for meta in metas]
            info = PackedUpdateInfo(names, dtypes, [list(meta.shape) for meta in metas], PASS)
            buffers = list(packed_buffers(source, metas, chunk_bytes, PASS))
            mode = planned.update(info, buffers)
            assert usual.update(info, buffers) == "usual"
            pairs = zip(planned.model.named_parameters(), usual.model.named_parameters(), strict=True)
            different = [
                name for (name, a), (_, b) in pairs if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            ]
            print(json.dumps({"mode": mode, "different": different, "tensors": len(metas)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
