"""Groups and a role context made by hand for the tests of the preprocessor."""

from __future__ import annotations

from types import SimpleNamespace

from fakes.short_sample import short_sample

from pipelinerl.config import RunConfig
from pipelinerl.records import IGNORED_LABEL, Group, RolloutSummary, Sample, VersionSpan
from pipelinerl.rundir.heartbeat import Heartbeat
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub


def sample(sample_id, reward=1.0, version=0, prompt=2, output=3, **changes):
    tokens = list(range(1, prompt + output + 1))
    values = {
        "input_ids": tokens,
        "labels": [*[IGNORED_LABEL] * prompt, *tokens[prompt:]],
        "logprobs": [-0.5] * output,
        "reward": reward,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "version_spans": [VersionSpan(version, 0, output)] if output else [],
    }
    return short_sample(sample_id, **{**values, **changes})


def group(group_id, rewards=(1.0, 0.0), version=0, samples=None):
    """One group with one sample per rollout, unless `samples` are given."""
    if samples is None:
        samples = [sample(f"{group_id}/r{i}/s0", reward, version) for i, reward in enumerate(rewards)]
    rollouts: dict[str, list[Sample]] = {}
    for item in samples:
        rollouts.setdefault(item.rollout_id, []).append(item)
    summaries = [
        RolloutSummary(
            rollout_id=rollout_id,
            reward=items[0].reward,
            success=items[0].reward > 0,
            num_samples=len(items),
            output_tokens=sum(s.output_tokens for s in items),
            latency_s=0.1,
        )
        for rollout_id, items in rollouts.items()
    ]
    return Group(id=group_id, problem_id="p", dataset_name="d", samples=samples, rollouts=summaries)


def context(tmp_path, incarnation=0, ranks=1, **config):
    """A role context over real file streams in `tmp_path`, without a launcher."""
    config = RunConfig(output_dir=str(tmp_path), **config)
    run_dir = RunDir(tmp_path)
    jobs = {"finetune": [SimpleNamespace(name=f"finetune_{r}") for r in range(ranks)]}
    return SimpleNamespace(
        config=config,
        world=SimpleNamespace(num_finetune_ranks=ranks, jobs_of=lambda kind: jobs.get(kind, [])),
        job=SimpleNamespace(name="preprocessor_0"),
        run_dir=run_dir,
        run_id="run",
        incarnation=incarnation,
        token="",
        heartbeat=Heartbeat(tmp_path / "heartbeat.json", 60),
        streams=StreamHub(config.streams, run_dir, "run"),
    )
