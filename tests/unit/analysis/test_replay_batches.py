"""Recorded groups give the recorded batches again, and a change of either is said."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from fakes.recorded_run import RecordedRun
from fakes.short_sample import rollout_summary, short_sample

from pipelinerl.__main__ import main
from pipelinerl.analysis.replay import BatchReplay, replay_run
from pipelinerl.config import RunConfig
from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.config.load import save_config
from pipelinerl.preprocess.batcher import GroupScorer, ResumePoint
from pipelinerl.records import (
    Group,
    MetricRecord,
    Sample,
    StepDone,
    TrainerMessage,
    TrainerStarted,
    TrainingBatch,
    VersionSpan,
)
from pipelinerl.rl.packing import make_plan
from pipelinerl.streams.base import Entry
from pipelinerl.streams.open_run import find_run
from pipelinerl.tiny.build import build_model
from pipelinerl.world import Job, WorldMap

CONFIG = FinetuneConfig(
    train_batch_size=1,
    gradient_accumulation_passes=4,
    seq_length=16,
    rl={"filter_zero_advantage_groups": True, "normalize_reward": True},
)


def group(number: int, rewards: tuple[float, ...]) -> Group:
    group_id = f"0-{number}"
    samples = [
        short_sample(
            f"{group_id}/r{k}/s0",
            input_ids=[1, 2, 3, 4 + k],
            labels=[-100, 2, 3, 4 + k],
            logprobs=[-0.5] * 3,
            reward=reward,
            output_tokens=3,
            version_spans=[VersionSpan(0, 0, 3)],
        )
        for k, reward in enumerate(rewards)
    ]
    rollouts = [rollout_summary(sample.rollout_id, sample.reward) for sample in samples]
    return Group(id=group_id, problem_id="p", dataset_name="d", samples=samples, rollouts=rollouts)


GROUPS = [group(0, (1, 0)), group(1, (1, 1)), group(2, (0, 3)), group(3, (2, 0))]


def recorded(step: int, chosen: list[Group], config: FinetuneConfig = CONFIG) -> TrainingBatch:
    """The batch as the preprocessor makes it."""
    scorer = GroupScorer(config, ResumePoint(), lambda samples: [_with_kl(s) for s in samples])
    groups = [found.record for found, _ in scorer.score([Entry(n, item) for n, item in enumerate(chosen)])]
    samples = [sample for group in groups for sample in group.samples]
    plan = make_plan([len(s.input_ids) for s in samples], 1, 16, True, 1)
    names = [group.id for group in groups]
    return TrainingBatch(id=f"0-{step}", step=step, samples=samples, group_ids=names, plan=plan, actor_offset=0)


def _with_kl(sample: Sample) -> Sample:
    return msgspec.structs.replace(sample, ref_logprobs=[-0.5 - 0.1 * sample.reward * k for k in range(3)])


@pytest.mark.parametrize("estimator", ["reinforce_baseline", "gae"])
def test_kl_in_the_reward_is_rebuilt_from_the_recorded_reference(estimator: str) -> None:
    rl = {"advantage_estimator": estimator, "reward_minus_kl_coef": 0.1}
    config = FinetuneConfig(gradient_accumulation_passes=4, seq_length=16, rl=rl)
    batch = recorded(1, [GROUPS[0], GROUPS[2]], config)
    assert all(s.ref_logprobs and s.advantage is not None for s in batch.samples)
    assert BatchReplay(iter(GROUPS)).difference(batch, config) is None


def test_batches_are_rebuilt_equal_in_any_order_of_groups() -> None:
    replay = BatchReplay(iter(GROUPS))
    assert replay.difference(recorded(1, [GROUPS[2], GROUPS[0]]), CONFIG) is None
    assert replay.difference(recorded(2, [GROUPS[3]]), CONFIG) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda b: {"samples": [msgspec.structs.replace(b.samples[0], advantage=9.0), *b.samples[1:]]},
            "advantage",
        ),
        (lambda b: {"samples": b.samples[::-1]}, "other samples"),
        (lambda b: {"plan": [[[0], [1], [2], [3]]]}, "plan"),
        (lambda b: {"group_ids": ["0-9"]}, "group 0-9 is not in the stream actor"),
    ],
)
def test_a_difference_is_named(change, message: str) -> None:
    batch = recorded(1, [GROUPS[0], GROUPS[2]])
    found = BatchReplay(iter(GROUPS)).difference(msgspec.structs.replace(batch, **change(batch)), CONFIG)
    assert found is not None and message in found


def trained_run(folder: Path, *starts: dict[str, float]) -> RecordedRun:
    """A run of two steps; with two starts, the second took step 2. `starts` are keys of `finetune`."""
    finetune = {"train_batch_size": 1, "gradient_accumulation_passes": 4, "seq_length": 16, "dtype": "fp32"}
    run = RecordedRun(folder, backend={"type": "plain"}, finetune={**finetune, **starts[-1]})
    for number, changed in enumerate(starts):
        data = run.config.model_dump()
        config = RunConfig.model_validate({**data, "finetune": {**data["finetune"], **changed}})
        save_config(config, run.files.config_of_start(number))
    build_model(run.tokenizer, seed=1).save_pretrained(run.model)
    job = Job("finetune", "finetune_0", 0, 0, 0, "127.0.0.1", [], None, None, None, 1)
    run.files.world_file.write_text(WorldMap([job], "cpu", 1, "127.0.0.1", 1).to_json())
    batches = [recorded(1, GROUPS[::2], run.config.finetune), recorded(2, [GROUPS[1], GROUPS[3]], run.config.finetune)]
    last = len(starts) - 1
    messages = [
        *(StepDone(step=n, time=0, group_ids=[], num_samples=4, samples_processed=4 * n) for n in (1, 2)),
        *(TrainerStarted(step=1, data_offset=1, time=0, incarnation=n) for n in range(1, last + 1)),
        *(StepDone(step=2, time=0, group_ids=[], num_samples=4, samples_processed=8, incarnation=last),) * bool(last),
    ]
    run.write(*GROUPS)
    run.write(*batches, topic="training_data", instance="preprocessor_0", kind=TrainingBatch)
    run.write(*messages, topic="trainer", instance="finetune_0", kind=TrainerMessage)
    return run


def replayed(run: RecordedRun) -> dict[int, dict[str, float]]:
    numbers: dict[int, dict[str, float]] = {}
    assert replay_run(find_run(run.root), on_step=numbers.__setitem__).first_difference is None
    return numbers


def test_each_step_is_trained_with_the_configuration_of_its_start(tmp_path: Path) -> None:
    first, second = {"learning_rate": 1e-2, "num_warmup_steps": 0}, {"learning_rate": 1e-3, "num_warmup_steps": 0}
    alone = replayed(trained_run(tmp_path / "a", first))
    changed = replayed(trained_run(tmp_path / "b", first, second))
    rates = [numbers[2]["finetune/learning_rate"] for numbers in (alone, changed)]
    assert rates[0] == pytest.approx(10 * rates[1])
    # The rate of a step acts after its loss: that of step 2 is what step 1 of the first start led to.
    for name in ("finetune/loss", "finetune/grad_norm"):
        assert changed[1][name] == alone[1][name] and changed[2][name] == alone[2][name]
    wrong = replayed(trained_run(tmp_path / "c", second))
    assert wrong[2]["finetune/loss"] != alone[2]["finetune/loss"]


def test_a_recorded_run_is_trained_again_and_its_first_difference_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained_run(tmp_path, {})
    numbers = replayed(run)
    assert sorted(numbers) == [1, 2] and numbers[1]["finetune/grad_norm"] > 0

    def write_numbers(step: int, **changed: float) -> None:
        values = {**numbers[step], **{f"finetune/{name}": value for name, value in changed.items()}}
        record = MetricRecord(source="finetune_0", step=step, time=0, values=values)
        run.write(record, topic="metrics", instance="finetune_0", kind=MetricRecord)

    write_numbers(1)
    write_numbers(2)
    assert main(["replay", str(run.root), "--verify"]) == 0
    write_numbers(2, loss=7.0)
    assert main(["replay", str(run.root), "--verify", "--steps", "1"]) == 0
    assert main(["replay", str(run.root)]) == 0
    capsys.readouterr()
    assert main(["replay", str(run.root), "--verify"]) == 1
    assert "step 2: finetune/loss" in capsys.readouterr().out
