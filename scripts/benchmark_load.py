"""Seconds to put one update into a model in place: tensor by tensor through vLLM's loaders, and by a copy plan.

    python scripts/benchmark_load.py --sizes 0.0011 0.13

In one process on a CPU, with vLLM's own layers and no server. Servers on CPUs do not load in place; with next to
nothing in the tensors (0.0011) this is what the host does for each update of a server on a GPU, without its kernels.
The two ways take turns, so that they meet the same noise.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmark_common import random_model, write_result
from transformers import AutoModelForCausalLM

from pipelinerl.inference.planned_load import COPY_PLAN_VARIABLE, PlannedLoader
from pipelinerl.weights.buffers import packed_buffers
from pipelinerl.weights.layout import LayoutCache
from pipelinerl.weights.packing import DEFAULT_CHUNK_BYTES
from pipelinerl.weights.source import ModuleSource


def server_model(folder: Path) -> tuple[torch.nn.Module, Any]:
    """vLLM's model of a checkpoint, in bf16, before anything is packed; and vLLM's config."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(model=str(folder), dtype="bfloat16", enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
            initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        model = initialize_model(vllm_config=config)
        torch.set_default_dtype(torch.float32)
    return model, config


def measure(folder: Path, repeats: int) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config

    model, config = server_model(folder)
    source = ModuleSource(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    metas = source.metadata()
    lists = ([meta.name for meta in metas], [meta.dtype_name for meta in metas], [list(meta.shape) for meta in metas])
    layouts = LayoutCache()
    buffers = list(packed_buffers(source, metas, DEFAULT_CHUNK_BYTES, 1))

    def update(loader: PlannedLoader) -> float:
        start = time.perf_counter()
        layout = layouts.of(*lists, DEFAULT_CHUNK_BYTES)
        loader.begin(model, layout)
        for part, buffer in zip(layout.buffers, buffers, strict=True):
            loader.load(model, part, buffer)
        loader.finish()
        return time.perf_counter() - start

    usual, planned = PlannedLoader({COPY_PLAN_VARIABLE: "0"}), PlannedLoader({})
    with set_current_vllm_config(config):
        update(usual)
        # As vLLM does when a server is up: nobody walks through all its objects in the middle of an update.
        gc.freeze()
        first_s, second_s = update(planned), update(planned)
        pairs = [(update(usual), update(planned)) for _ in range(repeats)]
    return {
        "tensors": len(metas),
        "bytes": sum(meta.num_bytes for meta in metas),
        "first_update_s": first_s,
        "second_update_s": second_s,
        "tensor_by_tensor_s": summary([pair[0] for pair in pairs]),
        "copied_s": summary([pair[1] for pair in pairs]),
        "ratio": summary([slow / fast for slow, fast in pairs]),
    }


def summary(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "range": [min(values), max(values)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["0.0011"], help="billions of random parameters")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for size in args.sizes:
            results[size] = measure(random_model(size, Path(scratch) / size, torch.bfloat16), args.repeats)
            write_result(args.output, {"results": results})


if __name__ == "__main__":
    main()
