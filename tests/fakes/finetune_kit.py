"""Tiny models, recorded-looking samples and fakes for tests of the trainer, also for those that run as ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.finetune.attention import SEGMENTED_ATTENTION, register_own_attention
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.records import IGNORED_LABEL, Sample, TrainingBatch, VersionSpan
from pipelinerl.rl.packing import make_plan
from pipelinerl.streams.base import Entry
from pipelinerl.weights.link import ServerUpdate
from pipelinerl.weights.sync import ProbeResult, ProbeSequence, UpdateReport

VOCABULARY = 50


def tiny_model(family: str = "qwen2", attention: str = SEGMENTED_ATTENTION, tied: bool = False) -> PreTrainedModel:
    """A random model of some thousand parameters, always the same."""
    register_own_attention()
    sizes: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        attn_implementation=attention,
        dtype="float32",
    )
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return model_class(config_class(**sizes)).train()


def make_samples(count: int, seed: int = 0, masked_every: int = 0) -> list[Sample]:
    """Samples of 3..40 tokens in groups of 4; every `masked_every`-th one trains nothing."""
    rng = random.Random(seed)
    samples = []
    for number in range(count):
        prompt, output = rng.randint(2, 20), rng.randint(1, 20)
        ids = [rng.randrange(VOCABULARY) for _ in range(prompt + output)]
        masked = masked_every and number % masked_every == 0
        trained = 0 if masked else output
        labels = [IGNORED_LABEL] * len(ids) if masked else [IGNORED_LABEL] * prompt + ids[prompt:]
        cut = rng.randint(0, trained)
        spans = (
            [VersionSpan(0, 0, cut), VersionSpan(1, cut, trained)]
            if 0 < cut < trained
            else [VersionSpan(1, 0, trained)]
        )
        samples.append(
            Sample(
                id=f"0-{number // 4}/r{number % 4}/s0",
                group_id=f"0-{number // 4}",
                rollout_id=f"0-{number // 4}/r{number % 4}",
                input_ids=ids,
                labels=labels,
                logprobs=[-rng.uniform(0.5, 6.0) for _ in range(trained)],
                reward=rng.choice([0.0, 1.0]),
                advantage=rng.uniform(-1, 1),
                finished=True,
                finish_reason="stop",
                prompt_tokens=prompt,
                output_tokens=output,
                version_spans=spans,
            )
        )
    return samples


def make_batch(
    samples: Sequence[Sample], step: int = 1, plan: list[list[list[int]]] | None = None, **changes: Any
) -> TrainingBatch:
    lengths = [len(sample.input_ids) for sample in samples]
    return TrainingBatch(
        id=f"batch-{step}",
        step=step,
        samples=list(samples),
        group_ids=sorted({sample.group_id for sample in samples}),
        plan=plan if plan is not None else make_plan(lengths, 1, 128, True),
        actor_offset=step * 10,
        **changes,
    )


def finetune_config(**changes: Any) -> FinetuneConfig:
    settings: dict[str, Any] = dict(
        seq_length=128, learning_rate=1e-2, num_warmup_steps=0, lr_scheduler_type="linear", max_train_steps=4
    )
    return FinetuneConfig(**{**settings, **changes})


def save_tokenizer(folder: Path) -> Path:
    """A tokenizer of the tiny models' vocabulary."""
    tokenizer = Tokenizer(models.WordLevel({f"t{k}": k for k in range(VOCABULARY)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", pad_token="t1").save_pretrained(folder)
    return folder


class FakeReader:
    """A stream that holds `records` and then nothing."""

    def __init__(self, records: Sequence[Any], offset: int = 0) -> None:
        self._records, self.offset = list(records), offset

    def read(self, timeout_s: float, max_records: int = 256) -> list[Entry[Any]]:
        found = [Entry(self.offset + k, r) for k, r in enumerate(self._records[self.offset :][:max_records])]
        self.offset += len(found)
        return found

    def close(self) -> None: ...

    def wake(self) -> None: ...


@dataclass
class FakeWriter:
    """Keeps what was written, in one list that several writers may share."""

    written: list[Any] = field(default_factory=list)

    def write(self, record: Any) -> int:
        self.written.append(record)
        return len(self.written) - 1

    def flush(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class FakeHeartbeat:
    steps: int = 0
    waits: list[str] = field(default_factory=list)

    def waiting(self, what: str, deadline_s: float | None = None) -> nullcontext[None]:
        self.waits.append(what)
        return nullcontext()

    def progress(self, n: int = 1) -> None:
        self.steps += n


@dataclass
class FakePublisher:
    """A server that runs the weights it was sent in a model of its own; `stale_head` keeps the first output head."""

    stale_head: bool = False
    fail: str | None = None
    model: PreTrainedModel = field(default_factory=tiny_model)
    versions: list[int] = field(default_factory=list)
    probes: int = 0

    def publish(self, version: int, source: Any, names: Any = None) -> UpdateReport:
        if self.fail:
            return UpdateReport(version, [], {"actor_llm_0": self.fail})
        received = {name: tensor.clone() for bucket in source.buckets() for name, tensor in bucket}
        assert [meta.name for meta in source.metadata()] == list(received)
        if self.stale_head and self.versions:
            received.pop("lm_head.weight")
        self.model.load_state_dict(received, strict=False)
        self.versions.append(version)
        return UpdateReport(version, [ServerUpdate("actor_llm_0", {"pause": 0.01, "transfer": 0.02})], {}, 0.05)

    @torch.no_grad()
    def probe(self, sequences: Sequence[ProbeSequence], name: str) -> ProbeResult:
        self.probes += 1
        diffs = []
        for sequence in sequences:
            ids = torch.tensor([sequence.token_ids])
            log_p = self.model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            ours = log_p.gather(-1, ids[0, 1:, None])[:, 0].tolist()
            diffs += [abs(a - b) for a, b in zip(ours, sequence.logprobs, strict=True)]
        mean = sum(diffs) / len(diffs)
        return ProbeResult(mean, max(diffs), len(diffs))


@dataclass(frozen=True)
class Kit:
    """The helpers above as one fixture."""

    model: Callable[..., PreTrainedModel] = tiny_model
    samples: Callable[..., list[Sample]] = make_samples
    batch: Callable[..., TrainingBatch] = make_batch
    config: Callable[..., FinetuneConfig] = finetune_config
    tokenizer: Callable[[Path], Path] = save_tokenizer
    reader: type[FakeReader] = FakeReader
    writer: type[FakeWriter] = FakeWriter
    heartbeat: type[FakeHeartbeat] = FakeHeartbeat
    publisher: type[FakePublisher] = FakePublisher
    vocabulary: int = VOCABULARY

    def policy(self, family: str = "qwen2", **options: Any) -> PolicyModel:
        model_options = {key: options.pop(key) for key in ("attention", "tied") if key in options}
        return PolicyModel(tiny_model(family, **model_options), **options)
