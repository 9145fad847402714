"""A run that is continued with reference servers: refused while batches wait without their log-probs, else not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.short_sample import short_sample

from pipelinerl.config import RunConfig
from pipelinerl.config.load import save_config
from pipelinerl.errors import ConfigError
from pipelinerl.records import ScoredSample, StepDone, TrainerMessage, TrainingBatch
from pipelinerl.run.workspace import enter, inspect
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.base import TRAINER_TOPIC, TRAINING_DATA_TOPIC
from pipelinerl.streams.hub import StreamHub

LOCAL: dict[str, Any] = {"finetune": {"rl": {"kl_coef": 0.1, "reference": "local"}}}
POOL: dict[str, Any] = {"world": {"preprocessor_fraction": 1}}
SERVERS: dict[str, Any] = {"finetune": {"rl": {"kl_coef": 0.1, "reference": "servers"}}, **POOL}
AUTO: dict[str, Any] = {"finetune": {"rl": {"kl_coef": 0.1}}}
REWARD: dict[str, Any] = {"finetune": {"rl": {"reward_minus_kl_coef": 0.1}}, **POOL}


def config(root: Path, settings: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"output_dir": str(root), **settings})


def batch(step: int, ref_logprobs: list[float]) -> TrainingBatch:
    sample = short_sample("0-0/r0/s0", ref_logprobs=ref_logprobs)
    scored = [ScoredSample(sample=sample, advantages=[1.0])]
    return TrainingBatch(id=f"0-{step}", step=step, samples=scored, group_ids=["0-0"], plan=[[[0]]], actor_offset=0)


def run_with(root: Path, settings: dict[str, Any], batches: int, saved: int | None, scored: bool = False) -> None:
    """A run with so many batches, and a training state behind step `saved`."""
    started = config(root, settings)
    enter(inspect(started, "run-a")).close()
    save_config(started, RunDir(root).config_file)
    hub = StreamHub(started.streams, RunDir(root), "run-a")
    data = hub.writer(TRAINING_DATA_TOPIC, "preprocessor_0", TrainingBatch)
    for step in range(1, batches + 1):
        data.write(batch(step, [-0.7] if scored else []))
    data.close()
    messages = hub.writer(TRAINER_TOPIC, "finetune_0", TrainerMessage)
    messages.write(StepDone(step=1, time=1.0, group_ids=["0-0"], num_samples=1, samples_processed=1))
    messages.close()
    if saved is not None:
        folder = RunDir(root).training_state(saved)
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"state": {"step": saved, "data_offset": saved}}))


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        (LOCAL, SERVERS, "finetune.rl.reference"),
        (AUTO, {**AUTO, **POOL}, "world.preprocessor_fraction"),
        (AUTO, {**AUTO, "world": {"num_preprocessor_llms": 1}}, "world.num_preprocessor_llms"),
        ({}, {**AUTO, **POOL}, "finetune.rl.kl_coef"),
        (POOL, REWARD, "finetune.rl.reward_minus_kl_coef"),
    ],
)
def test_waiting_batches_refuse_reference_servers(
    tmp_path: Path, old: dict[str, Any], new: dict[str, Any], key: str
) -> None:
    run_with(tmp_path, old, batches=4, saved=2)
    with pytest.raises(ConfigError, match="step 3 waits in the stream, and has no log-probs of reference") as caught:
        inspect(config(tmp_path, new), "run-b")
    assert str(caught.value).startswith(f"{key}: got") and "Set it back" in str(caught.value)


@pytest.mark.parametrize("setting", ["kl_coef", "learning_rate"])
def test_a_key_that_has_no_part_in_it_is_not_blamed(tmp_path: Path, setting: str) -> None:
    run_with(tmp_path, LOCAL, batches=4, saved=2)
    new = {"finetune": {"rl": {"kl_coef": 0.2, "reference": "servers"}, "learning_rate": 1e-5}, **POOL}
    with pytest.raises(ConfigError) as caught:
        inspect(config(tmp_path, new), "run-b")
    assert setting not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "batches", "saved", "scored"),
    [
        pytest.param(LOCAL, SERVERS, 2, 2, False, id="nothing waits"),
        pytest.param(SERVERS, LOCAL, 4, 2, True, id="the other way round"),
        pytest.param(LOCAL, SERVERS, 4, 2, True, id="what waits was scored"),
        pytest.param(SERVERS, SERVERS, 4, None, True, id="nothing changed"),
        pytest.param(POOL, POOL, 4, 2, False, id="no KL"),
    ],
)
def test_other_changes_continue_the_run(
    tmp_path: Path, old: dict[str, Any], new: dict[str, Any], batches: int, saved: int | None, scored: bool
) -> None:
    run_with(tmp_path, old, batches, saved, scored)
    assert inspect(config(tmp_path, new), "run-b").kind == "continue"


def test_without_a_training_state_all_batches_wait(tmp_path: Path) -> None:
    run_with(tmp_path, LOCAL, batches=1, saved=None)
    with pytest.raises(ConfigError, match="step 1 waits"):
        inspect(config(tmp_path, SERVERS), "run-b")


def test_what_is_in_redis_is_taken_to_wait(tmp_path: Path) -> None:
    redis = {"streams": {"backend": "redis"}}
    started = config(tmp_path, {**LOCAL, **redis})
    enter(inspect(started, "run-a")).close()
    save_config(started, RunDir(tmp_path).config_file)
    (tmp_path / "finetune" / "current").mkdir(parents=True)
    with pytest.raises(ConfigError, match="batches may wait in the stream that have no log-probs of reference servers"):
        inspect(config(tmp_path, {**SERVERS, **redis}), "run-b")
