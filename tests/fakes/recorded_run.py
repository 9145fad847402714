"""A run directory with recorded groups, made by the project's own writers: for commands that read a run's rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from pipelinerl.config import RunConfig
from pipelinerl.config.load import save_config
from pipelinerl.records import IGNORED_LABEL, Group, RolloutSummary, Sample, VersionSpan
from pipelinerl.rundir.layout import RunDir, RunIdentity, write_identity
from pipelinerl.streams.base import ACTOR_TOPIC
from pipelinerl.streams.hub import StreamHub
from pipelinerl.tiny.tokenizer import build_tokenizer
from pipelinerl.world import WorldMap

RUN_ID = "run-a"


class RecordedRun:
    """The folder of a run in `root` whose model is in `root/model`; `keys` change its configuration."""

    def __init__(self, root: Path, environ: Mapping[str, str] | None = None, **keys: Any) -> None:
        self.root = root / "run"
        self.model = root / "model"
        self.tokenizer: PreTrainedTokenizerFast = build_tokenizer(16)
        self.tokenizer.save_pretrained(self.model)
        self.files = RunDir(self.root)
        self.config = RunConfig.model_validate({"output_dir": str(self.root), "model_path": str(self.model), **keys})
        write_identity(self.files.identity_file, RunIdentity(run_id=RUN_ID, incarnation=0))
        save_config(self.config, self.files.config_file)
        self.files.world_file.write_text(WorldMap([], "cpu", 1, "127.0.0.1", 1).to_json())
        self.environ = dict(environ or {})

    def streams(self) -> StreamHub:
        return StreamHub(self.config.streams, self.files, RUN_ID, self.environ)

    def write(self, *records: Any, topic: str = ACTOR_TOPIC, instance: str = "actor_0", kind: Any = Group) -> None:
        writer = self.streams().writer(topic, instance, kind, is_consumed=False)
        for record in records:
            writer.write(record)
        writer.close()

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def sample(
        self, name: str, parts: Sequence[tuple[str, bool]], versions: Sequence[int] = (0,), **fields: Any
    ) -> Sample:
        """Sample `name` (`GROUP/ROLLOUT/SAMPLE`) of texts that are trained or not; one version span a trained part."""
        ids: list[int] = []
        labels: list[int] = []
        spans: list[VersionSpan] = []
        trained = 0
        for text, is_trained in parts:
            own = self.ids(text)
            ids += own
            labels += own if is_trained else [IGNORED_LABEL] * len(own)
            if is_trained:
                spans.append(VersionSpan(versions[min(len(spans), len(versions) - 1)], trained, trained + len(own)))
                trained += len(own)
        values: dict[str, Any] = {
            "id": name,
            "group_id": name.split("/")[0],
            "rollout_id": name.rpartition("/")[0],
            "input_ids": ids,
            "labels": labels,
            "logprobs": [-0.5] * trained,
            "reward": 0.0,
            "finished": True,
            "finish_reason": "stop",
            "prompt_tokens": len(self.ids(parts[0][0])),
            "output_tokens": trained,
            "version_spans": spans,
        }
        return Sample(**{**values, **fields})

    def group(self, name: str, samples: Sequence[Sample], dataset: str = "train", **fields: Any) -> Group:
        """A group of these samples; the reward of a rollout is the sum of those of its samples."""
        rewards: dict[str, float] = {}
        for sample in samples:
            rewards[sample.rollout_id] = rewards.get(sample.rollout_id, 0.0) + sample.reward
        rollouts = [
            RolloutSummary(
                rollout_id=rollout_id,
                reward=reward,
                success=reward > 0,
                num_samples=1,
                output_tokens=1,
                latency_s=1.5,
                metrics={"no_answer": 0.0},
            )
            for rollout_id, reward in rewards.items()
        ]
        values: dict[str, Any] = {"problem_id": f"p-{name}", "dataset_name": dataset, "rollouts": rollouts}
        return Group(id=name, samples=list(samples), **{**values, **fields})

    def plain_groups(self, count: int, first: int = 0, **fields: Any) -> list[Group]:
        """Groups `0-N` of two rollouts: question N, answers `N.0` and `N.1`, reward N and -N, version N."""
        return [
            self.group(
                f"0-{n}",
                [
                    self.sample(
                        f"0-{n}/r{k}/s0",
                        [(f"<|user|>q{n}<|end|><|assistant|>", False), (f"{n}.{k}<|end|>", True)],
                        [n],
                        reward=float(-n if k else n),
                    )
                    for k in range(2)
                ],
                **fields,
            )
            for n in range(first, first + count)
        ]
