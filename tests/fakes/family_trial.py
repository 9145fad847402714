"""One try of a family: a tiny random model that is trained, exported, opened again and served."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch
from fakes.families import random_model
from fakes.random_model import perturb, save_tokenizer
from fakes.updated_server import connect
from fakes.vllm_process import VLLMProcess
from transformers import AutoModelForCausalLM

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.model import fix_frequencies, load_policy
from pipelinerl.finetune.model_check import token_batch
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.weight_sync import check_checkpoint
from pipelinerl.records import IGNORED_LABEL
from pipelinerl.weights.buffers import NamedTensors, TensorMeta, WeightSource, saved_buffers
from pipelinerl.weights.sync import ProbeSequence

CPU = torch.device("cpu")
#: Engine and worker are one process, which starts faster.
SERVED = {"max_model_len": 128, "distributed-executor-backend": "uni"}
#: Beyond windows, chunks and the original lengths of ropes.
IDS = [
    [(7 * k + 3) % 197 + 3 for k in range(80)],
    [3, 9],
    [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 41, 12],
    [(11 * k * k + 5 * k) % 197 + 3 for k in range(37)],
]


class Trial:
    """A family that is trained the way a run would train it.

    Args:
        family: one of `FAMILIES`.
        folder: for models.
        dtype: of the servers.

    Attributes:
        packed: samples share rows; else each has its own.

    Raises:
        ConfigError: it cannot be trained.
    """

    def __init__(self, family: str, folder: Path, dtype: str = "float32") -> None:
        self._folder, self._served = folder, {**SERVED, "dtype": dtype}
        source = folder / "model"
        random_model(family).save_pretrained(source)
        save_tokenizer(source)
        self.packed = True
        try:
            self._open(source)
        except ConfigError as error:
            if error.key != "finetune.seq_packing":
                raise
            self.packed = False
            self._open(source)

    def _open(self, source: Path) -> None:
        settings = dict(seq_packing=self.packed, train_batch_size=1, learning_rate=1e-2)
        config = RunConfig(
            output_dir=str(self._folder),
            model_path=str(source),
            finetune=settings,
            vllm_config={"vllm_kwargs": self._served},
        )
        self.policy: PolicyModel = load_policy(config, CPU)
        self.backend = PlainBackend(self.policy, config.finetune, Ranks())
        check_checkpoint(self.backend, str(source))

    def _rows(self) -> Iterator[Sequence[Sequence[int]]]:
        yield from [IDS] if self.packed else [[ids] for ids in IDS]

    def logprobs(self) -> list[list[float]]:
        """By the path of training, one fewer than ids."""
        found = []
        for row in self._rows():
            batch = token_batch(row, CPU)
            with torch.no_grad():
                values = self.policy(*self.policy.placed(batch, CPU)).logprobs[batch.targets != IGNORED_LABEL]
            found += [part.tolist() for part in values.split([len(ids) - 1 for ids in row])]
        return found

    def step(self) -> float:
        """One step of the optimizer; the norm of its gradient."""
        for row in self._rows():
            outputs = self.backend.forward(*self.policy.placed(token_batch(row, CPU), CPU))
            self.backend.backward(-outputs.logprobs.mean(), is_last=True)
        return self.backend.step()

    def export(self) -> Path:
        exporter = ModelExporter(self._folder, str(self._folder / "model"), Ranks())
        return exporter.export(1, self.policy, self.backend.export_source())

    def change_all(self) -> None:
        """Another value for every parameter and saved buffer."""
        perturb(self.policy.language_model, seed=2)
        for number, (_, buffer) in enumerate(saved_buffers(self.policy.language_model)):
            buffer.add_(0.05 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(number)))

    def served(
        self, model: Path, changes: Sequence[Callable[[], object]] | None = None
    ) -> Iterator[tuple[float, float | None]]:
        """Largest |log-prob difference| to a server of `model`: with its own weights, and after an update for each of
        `changes` (default: a step and `change_all`), each with the difference right before it."""
        with (
            VLLMProcess(model, self._folder / "server.log", self._served) as server,
            connect(server) as publisher,
        ):

            def difference() -> float:
                expected = [ProbeSequence(ids, own) for ids, own in zip(IDS, self.logprobs(), strict=True)]
                return publisher.probe(expected, "tiny").max_abs_diff

            yield difference(), None
            for version, change in enumerate(changes or (self.step, self.change_all), start=1):
                change()
                before = difference()
                report = publisher.publish(version, self.backend.weight_source(self.policy.served_dtype))
                assert report.failed == {}
                yield difference(), before


def reopened_difference(model: Path, expected: list[list[float]]) -> float:
    """Largest |log-prob difference| of what transformers makes of the folder `model`.

    By itself it would choose some frequencies by the length of a sample, which no server does.
    """
    loaded = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    fix_frequencies(loaded, SERVED["max_model_len"])
    largest = 0.0
    for ids, ours in zip(IDS, expected, strict=True):
        with torch.no_grad():
            logprobs = loaded(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        theirs = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        largest = max(largest, float((theirs - torch.tensor(ours)).abs().max()))
    return largest


class WithoutSome:
    """What a sender that leaves tensors out would send."""

    def __init__(self, source: WeightSource, left_out: Collection[str]) -> None:
        self._source, self._left_out = source, left_out

    def metadata(self) -> list[TensorMeta]:
        return [meta for meta in self._source.metadata() if meta.name not in self._left_out]

    def buckets(self) -> Iterator[NamedTensors]:
        for bucket in self._source.buckets():
            yield [(name, tensor) for name, tensor in bucket if name not in self._left_out]


def last_of_each_kind(names: Collection[str]) -> list[str]:
    """Of names that differ in numbers alone, the last."""
    return list({re.sub(r"\d+", "#", name): name for name in names}.values())
