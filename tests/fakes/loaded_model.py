"""A tiny model in vLLM's own layers, in this process, and an engine that loads updates into it. As a script: which
faults of every kind of tensor the engine finds, as one line of JSON.

Usage: `python loaded_model.py FAMILY FOLDER`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fakes.family_trial import Trial, last_of_each_kind
from fakes.ports import free_port
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from pipelinerl.inference import transfer
from pipelinerl.inference.transfer import PackedTransferEngine, checkpoint_tensors, is_tied
from pipelinerl.weights.buffers import WeightSource, packed_buffers, update_info_of, update_problems
from pipelinerl.weights.manifest import ServerModel

PASS = 5
FAULTS = ("left out", "ignored", "zeroed", "swapped", "of an earlier pass")


class LoadedModel:
    """`folder` as a server on a CPU loads it. One in a process: vLLM's groups are those of the process."""

    def __init__(self, folder: Path) -> None:
        options = dict(dtype="float32", enforce_eager=True, max_model_len=128, block_size=32, max_num_seqs=4)
        self.config = EngineArgs(model=str(folder), **options).create_engine_config()  # type: ignore[arg-type]
        torch.accelerator.empty_cache = lambda: None  # as vLLM's worker for CPUs does
        with set_current_vllm_config(self.config):
            place = f"tcp://127.0.0.1:{free_port()}"
            init_distributed_environment(1, 0, place, 0, backend="gloo")
            initialize_model_parallel(1, 1)
            self.model: Any = get_model(vllm_config=self.config)
        self.engine: Any = object.__new__(PackedTransferEngine)
        self.engine.model = self.engine._default_model = self.model
        self.engine.model_config = self.engine._default_model_config = self.config.model_config
        self.engine.parallel_config = self.config.parallel_config
        self.engine.device = torch.device("cpu")

    @property
    def info(self) -> ServerModel:
        """What it says of itself to the trainer."""
        model_config = self.config.model_config
        return ServerModel(tensors=checkpoint_tensors(model_config), tied=is_tied(model_config), dtype="float32")

    def update(self, source: WeightSource, damage: Callable[[list[torch.Tensor]], None] = lambda buffers: None) -> None:
        """One update over a wire that does `damage` to its buffers; what raises is aborted, as the trainer does."""
        metas = source.metadata()
        buffers = list(packed_buffers(source, metas, 0, PASS))  # a tensor each
        damage(buffers)
        self.engine._receiver = SimpleNamespace(receive=lambda size: buffers.pop(0), close=lambda: None)
        try:
            with set_current_vllm_config(self.config):
                self.engine.start_weight_update()
                self.engine.update_weights(update_info_of(metas, 0, PASS))
                self.engine.finish_weight_update()
        except Exception:
            self.engine.abort()
            raise

    def ignoring(self, left_out: str) -> Any:
        """A context in which the loaders skip a tensor that arrived."""
        return _Skipping(self.model, left_out)


class _Skipping:
    def __init__(self, model: Any, left_out: str) -> None:
        self._model, self._real = model, type(model).load_weights
        self._left_out = left_out
        self._through = transfer._through_weight_loaders

    def __enter__(self) -> None:
        left_out, real, through = self._left_out, self._real, self._through

        def load_weights(model: Any, tensors: Any) -> Any:
            return real(model, [(name, tensor) for name, tensor in tensors if name != left_out])

        def through_weight_loaders(model: Any, tensors: Any) -> Any:
            return through(model, [(name, tensor) for name, tensor in tensors if name != left_out])

        type(self._model).load_weights = load_weights
        transfer._through_weight_loaders = through_weight_loaders

    def __exit__(self, *_: object) -> None:
        type(self._model).load_weights = self._real
        transfer._through_weight_loaders = self._through


def faults_found(family: str, folder: Path) -> dict[str, Any]:
    """`kinds`: a tensor of each; `found`: kind of fault -> tensor -> how it was found, where it was."""
    trial = Trial(family, folder)
    served = LoadedModel(trial.export())
    source = trial.backend.weight_source(torch.float32)
    shapes = {meta.name: meta.shape for meta in source.metadata()}
    names = list(shapes)
    served.update(source)
    transfer.NOTED_EVERY = 1  # every update is as the first one and those after a failure
    found: dict[str, dict[str, str]] = {fault: {} for fault in FAULTS}

    def note(fault: str, name: str, damage: Callable[[list[torch.Tensor]], None] = lambda buffers: None) -> None:
        try:
            served.update(source, damage)
        except RuntimeError as error:
            found[fault][name] = f"{type(error).__name__}: {error}"

    earlier = list(packed_buffers(source, source.metadata(), 0, PASS - 1))
    kinds = last_of_each_kind(names)
    for name in kinds:
        place = names.index(name)

        def swap(buffers: list[torch.Tensor], place: int = place) -> None:
            other = next((k for k, one in enumerate(buffers) if k != place and len(one) == len(buffers[place])), 0)
            buffers[place], buffers[other] = buffers[other], buffers[place]

        def put(buffers: list[torch.Tensor], place: int = place) -> None:
            buffers[place] = earlier[place]

        without = {other: shape for other, shape in shapes.items() if other != name}
        if problems := update_problems(served.info, without):
            found["left out"][name] = problems[0]
        with served.ignoring(name):
            note("ignored", name)
        note("zeroed", name, lambda buffers, place=place: buffers[place].zero_())  # type: ignore[misc]
        note("swapped", name, swap)
        note("of an earlier pass", name, put)
    served.update(source)
    return {"kinds": kinds, "found": found}


if __name__ == "__main__":
    print(json.dumps(faults_found(sys.argv[1], Path(sys.argv[2]))))
