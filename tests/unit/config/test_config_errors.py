"""Every mistake gives one message: key, value, expectation, next step."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from pipelinerl.config.compose import compose
from pipelinerl.config.faults import ConfigFaults, nearest_key
from pipelinerl.errors import ConfigError, UserError


def message(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        compose(list(argv))
    return str(caught.value)


def faults(*argv: str) -> list[tuple[str, object]]:
    """Key and value of every fault."""
    with pytest.raises(ConfigError) as caught:
        compose(list(argv))
    return [(fault.key, fault.got) for fault in getattr(caught.value, "faults", [caught.value])]


def test_a_missing_output_dir_says_what_to_write() -> None:
    text = message("--config-name=guessing")
    assert text.startswith("output_dir: got '???'")
    assert "python -m pipelinerl.launch --config-name guessing output_dir=results/my_run" in text


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("finetune.seq_lenght=1", "finetune.seq_length"),
        ("seq_length=1", "finetune.seq_length"),
        ("learning_rate=1", "finetune.learning_rate"),
        ("+actor.llm_max_rollout=1", "actor.llm_max_rollouts"),
        ("finetune.rl.kl_coeff=1", "finetune.rl.kl_coef"),
        ("modelpath=1", "model_path"),
        ("vllm_config.vllm_kwarg.a=1", "vllm_config.vllm_kwargs"),
    ],
)
def test_an_unknown_key_names_the_nearest(word: str, nearest: str) -> None:
    text = message("output_dir=x", word)
    assert text.startswith(word.lstrip("+").split("=")[0] + ": got ")
    assert f"the nearest is {nearest})" in text
    assert "on the command line" in text


def test_an_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\nfinetune:\n  seq_lenght: 3\nzzz: 1\n")
    text = message("--config-dir", str(tmp_path), "--config-name=mine", "output_dir=x")
    first, second = sorted(text.splitlines())
    assert first.startswith("finetune.seq_lenght: got 3") and "finetune.seq_length" in first
    assert str(tmp_path / "mine.yaml") in first
    assert second.startswith("zzz: got 1")


def test_nothing_near_is_not_guessed() -> None:
    assert nearest_key("qqqqqq", ["model_path", "seed"]) is None


def test_wrong_types_are_one_line_each() -> None:
    found = faults(
        "output_dir=x",
        "finetune.seq_length=abc",
        "attempts=0",
        "world.device=tpu",
        "llm.parameters.stop=abc",
        "finetune.seq_packing=perhaps",
        "model_path=[a]",
        "finetune.lora=3",
        "finetune.learning_rate=inf",
        "wandb.tags=[1,[2]]",
    )
    assert found == [
        ("model_path", ["a"]),
        ("attempts", 0),
        ("finetune.lora", 3),
        ("finetune.learning_rate", float("inf")),
        ("finetune.seq_length", "abc"),
        ("finetune.seq_packing", "perhaps"),
        ("llm.parameters.stop", "abc"),
        ("world.device", "tpu"),
        ("wandb.tags.1", [2]),
    ]


def test_evaluation_that_follows_training_is_not_blamed_as_well() -> None:
    assert faults("output_dir=x", "llm.parameters.temperature=-1") == [("llm.parameters.temperature", -1)]


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["a=[1,"], ["override: got 'a=[1,'", "key=value"]),
        (["foo"], ["override: got 'foo'", "key=value"]),
        (["seed=1,2"], ["seed: got 'seed=1,2', expected one value"]),
        (
            ["--config-name=gessing"],
            ["--config-name: got 'gessing'", "quickstart", "Did you mean 'guessing'?", "--config-dir"],
        ),
        (["--config-name"], ["--config-name: got None, expected a value"]),
        (["--config-dir=/no/such/folder"], ["--config-dir: got '/no/such/folder', expected an existing folder"]),
        (["--confg-name=a"], ["Did you mean '--config-name'?"]),
        (["--multirun"], ["--multirun: got"]),
        (["finetune=grp"], ["finetune: got 'grp'", "'grpo'"]),
        (["finetune=null"], ["finetune: got None"]),
        (["deepspeed=deepspeed_stage2_bf16"], ["backend.config=deepspeed_stage2_bf16"]),
        (["backend.config=stage9"], ["backend.config: got 'stage9'", "deepspeed_stage3_bf16"]),
        (["model_path=${nope.x}"], ["model_path: got '${nope.x}', expected the name of an existing key"]),
        (
            ["model_path=${oc.env:SURELY_NOT_SET}"],
            ["model_path: got '$SURELY_NOT_SET', expected a set environment variable"],
        ),
        (["model_path=${what:1}"], ["${what}"]),
        (["model_path=${model_path}"], ["model_path"]),
        (["~nothing.there"], ["nothing.there"]),
        (["streams.port=11000"], ["streams.port: got 11000", "streams.url=redis://HOST:PORT/0"]),
        (["finetune.rl.algo=grpo"], ["finetune.rl.policy_loss"]),
        (["+fast_llm.training.num_workers=1"], ["fast_llm.training.num_workers: got", "finetune"]),
        (["finetune@other=base"], ["finetune@other"]),
    ],
)
def test_mistakes_on_the_command_line(argv: list[str], parts: list[str]) -> None:
    text = message("output_dir=x", *argv)
    for part in parts:
        assert part in text, text
    assert "Traceback" not in text


def test_a_file_that_is_not_yaml_names_line_and_column(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("defaults:\n  - base\n x: 3\n")
    text = message("--config-dir", str(tmp_path), "--config-name=bad", "output_dir=x")
    assert "bad.yaml, line 3, column 2" in text


def test_a_file_that_is_a_list(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("- 1\n- 2\n")
    assert "bad.yaml" in message("--config-dir", str(tmp_path), "--config-name=bad", "output_dir=x")


def test_a_defaults_list_with_an_unknown_group_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults:\n  - base\n  - override finetune: grp\n  - _self_\n")
    text = message("--config-dir", str(tmp_path), "--config-name=mine", "output_dir=x")
    assert "finetune: got 'grp'" in text and "mine.yaml" in text


def test_faults_travel_between_processes() -> None:
    faults = ConfigFaults([ConfigError("a", 1, "b", "c"), ConfigError("d", 2, "e", "f")])
    again = pickle.loads(pickle.dumps(faults))  # noqa: S301 - our own bytes
    assert str(again) == str(faults) and again.key == "a"
