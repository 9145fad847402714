"""Every mistake gives one message: key, value, expectation, next step."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from pipelinerl.config.compose import compose
from pipelinerl.config.faults import ConfigFaults, nearest_key
from pipelinerl.config.former_keys import SYNONYMS, fate_of
from pipelinerl.config.keys import is_known, known_keys
from pipelinerl.errors import ConfigError


def fault(*argv: str) -> ConfigError:
    """What is refused, checked to have all of its parts."""
    with pytest.raises(ConfigError) as caught:
        compose(["output_dir=x", *argv])
    assert caught.value.expected and caught.value.next_step
    return caught.value


def faults(*argv: str) -> list[tuple[str, object]]:
    """Key and value of every fault."""
    found = fault(*argv)
    return [(each.key, each.got) for each in getattr(found, "faults", [found])]


def with_file(folder: Path, text: str | bytes) -> ConfigError:
    (folder / "mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return fault("--config-dir", str(folder), "--config-name=mine")


def test_a_missing_output_dir_says_what_to_write() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["--config-name=guessing"])
    assert caught.value.key == "output_dir"
    assert "python -m pipelinerl.launch --config-name guessing output_dir=results/my_run" in caught.value.next_step


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
        # What other libraries call it.
        ("finetune.lr=1", "finetune.learning_rate"),
        ("num_generations=1", "attempts"),
        ("rl.beta=1", "finetune.rl.kl_coef"),
        ("batch_size=1", "finetune.gradient_accumulation_passes"),
        ("max_new_tokens=1", "llm.parameters.max_tokens"),
        ("actor_rollout_ref.rollout.n=1", "attempts"),
        ("algorithm.kl_ctrl.kl_coef=1", "finetune.rl.reward_minus_kl_coef"),
    ],
)
def test_an_unknown_key_names_the_nearest(word: str, nearest: str) -> None:
    found = fault(word)
    assert found.key == word.lstrip("+").split("=")[0]
    assert f" {nearest})" in found.expected and "command line" in found.next_step


def test_an_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    found = with_file(tmp_path, "defaults: [base, _self_]\nfinetune:\n  seq_lenght: 3\nzzz: 1\n")
    assert isinstance(found, ConfigFaults)
    first, second = sorted(found.faults, key=lambda each: each.key)
    assert (first.key, first.got, second.key, second.got) == ("finetune.seq_lenght", 3, "zzz", 1)
    assert "finetune.seq_length" in first.expected and str(tmp_path / "mine.yaml") in first.next_step


@pytest.mark.parametrize("name", ["base", "quickstart", "mine"])
def test_a_file_that_hides_a_shipped_one_and_includes_it(tmp_path: Path, name: str) -> None:
    """It would include itself: for Hydra, the user's file is the one of that name."""
    hidden = "base" if name == "mine" else name
    (tmp_path / f"{hidden}.yaml").write_text(f"defaults: [{hidden}, _self_]\nseed: 1\n")
    (tmp_path / "mine.yaml").write_text("defaults: [quickstart, _self_]\n")
    found = fault("--config-dir", str(tmp_path), f"--config-name={name}")
    loop = str(tmp_path / f"{hidden}.yaml")
    assert (found.key, found.got) == ("defaults", f"{loop} includes {loop}")


@pytest.mark.parametrize("section", ["llm", "test_llm"])
def test_an_unknown_key_beside_the_parameters_is_not_dropped(tmp_path: Path, section: str) -> None:
    found = with_file(tmp_path, f"defaults: [base, _self_]\n{section}:\n  temperature: 0.5\n")
    assert found.key == f"{section}.temperature"


def test_nothing_near_is_not_guessed() -> None:
    assert nearest_key("qqqqqq", ["model_path", "seed"]) is None


def test_wrong_types_are_one_line_each() -> None:
    assert faults(
        "finetune.seq_length=abc",
        "attempts=0",
        "world.device=tpu",
        "llm.parameters.stop=abc",
        "test_llm.parameters.stop=['']",
        "finetune.seq_packing=perhaps",
        "model_path=[a]",
        "finetune.lora=3",
        "finetune.learning_rate=inf",
        "wandb.tags=[1,[2]]",
    ) == [
        ("model_path", ["a"]),
        ("attempts", 0),
        ("finetune.lora", 3),
        ("finetune.learning_rate", float("inf")),
        ("finetune.seq_length", "abc"),
        ("finetune.seq_packing", "perhaps"),
        ("llm.parameters.stop", "abc"),
        ("test_llm.parameters.stop.0", ""),
        ("world.device", "tpu"),
        ("wandb.tags.1", [2]),
    ]
    assert "'cuda'" in fault("world.device=tpu").expected and "1" in fault("attempts=0").expected
    for key in ("test_llm.parameters.stop=['']", "tracking.trackio_project=''"):
        assert "String should" not in fault(key).expected  # pydantic's own words


@pytest.mark.parametrize("key", ["max_lag", "world.servers_per_gpu"])
def test_a_word_beside_numbers_is_named(key: str) -> None:
    error = fault(f"{key}=zero")
    assert error.got == "zero" and "integer" in error.expected and "'auto'" in error.expected


def test_evaluation_that_follows_training_is_not_blamed_as_well(tmp_path: Path) -> None:
    assert faults("llm.parameters.temperature=-1") == [("llm.parameters.temperature", -1)]
    found = with_file(tmp_path, "defaults: [base, _self_]\nllm: {parameters: {temperature: -1}}\n")
    assert found.key == "llm.parameters.temperature" and str(tmp_path / "mine.yaml") in found.next_step


@pytest.mark.parametrize(
    ("argv", "key", "parts"),
    [
        (["a=[1,"], "override", ["key=value"]),
        (["foo"], "override", ["key=value"]),
        (["seed=1,2"], "seed", ["--multirun seed=1,2"]),
        (["--config-name=gessing"], "--config-name", ["quickstart", "'guessing'", "--config-dir"]),
        (["--config-name"], "--config-name", []),
        (["--config-dir=/no/such/folder"], "--config-dir", ["/no/such/folder"]),
        (["--confg-name=a"], "--confg-name=a", ["'--config-name'"]),
        (["--multirun"], "--multirun", []),
        (["finetune=grp"], "finetune", ["'grpo'"]),
        (["finetune=null"], "finetune", ["finetune.KEY"]),
        (["deepspeed=deepspeed_stage2_bf16"], "deepspeed", ["backend.config=deepspeed_stage2_bf16"]),
        (["backend.config=stage9"], "backend.config", ["deepspeed_stage3_bf16"]),
        (["model_path=${nope.x}"], "model_path", ["nope.x"]),
        (["model_path=${oc.env:SURELY_NOT_SET}"], "model_path", ["SURELY_NOT_SET"]),
        (["model_path=${what:1}"], "model_path", ["what"]),
        (["model_path=${model_path}"], "model_path", []),
        (["~nothing.there"], "configuration", ["nothing.there"]),
        (["streams.port=11000"], "streams.port", ["streams.url=redis://HOST:PORT/0"]),
        (["finetune.rl.algo=grpo"], "finetune.rl.algo", ["finetune.rl.policy_loss"]),
        (["+fast_llm.training.num_workers=1"], "fast_llm.training.num_workers", ["finetune"]),
        (["wandb.use_wandb=false"], "wandb.use_wandb", ["Set wandb.mode=disabled."]),
        (["wandb.use_wandb=true"], "wandb.use_wandb", ["Leave it out"]),
        (["wandb.use_wandb=perhaps"], "wandb.use_wandb", ["true or false"]),
        (["finetune.send_weight_updates=true"], "finetune.send_weight_updates", ["Leave it out"]),
        (["finetune.rl.group_normalization=false"], "finetune.rl.group_normalization", ["Leave it out"]),
        (
            ["finetune.rl.group_normalization=true"],
            "finetune.rl.group_normalization",
            ["finetune.rl.aggregation=group"],
        ),
        (["finetune.rl.aggregate_loss=mean"], "finetune.rl.aggregate_loss", ["aggregation=sample_mean"]),
        (["finetune.model_class=causal-language-modeling"], "finetune.model_class", ["Leave it out"]),
        (["environments=[{_target_: a.b}]"], "environments", ["set environment"]),
        (["vllm_config.quantization=bf16_last_layer_fp32"], "vllm_config.quantization", ["fp32_lm_head=True"]),
        (["vllm_config.quantization=fp8"], "vllm_config.quantization", ["vllm_config.vllm_kwargs.quantization"]),
        (["actor.min_rollouts_for_failure_rate=1"], "actor.min_rollouts_for_failure_rate", ["32"]),
        (["verifier.queue_timeout_s=1"], "verifier.queue_timeout_s", ["300 s"]),
        (["verifier.max_queue=1"], "verifier.max_queue", ["8192"]),
        (["supervise.server_restart_window_s=1"], "supervise.server_restart_window_s", ["max_server_restarts"]),
        (["tensorboard.folder=x"], "tensorboard.folder", ["output_dir/tensorboard"]),
        (["finetune@other=base"], "configuration", ["finetune@other"]),
    ],
)
def test_mistakes_on_the_command_line(argv: list[str], key: str, parts: list[str]) -> None:
    found = fault(*argv)
    assert found.key == key
    assert all(part in str(found) for part in parts), str(found)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("defaults:\n  - base\n x: 3\n", "mine.yaml, line 3, column 2"),
        ("- 1\n- 2\n", "mine.yaml"),
        ("defaults: 5\n", "mine.yaml"),
        (b"seed: \xff\n", "mine.yaml"),
        ("defaults:\n  - base\n  - override finetune: grp\n  - _self_\n", "mine.yaml"),
    ],
)
def test_a_file_that_does_not_compose_is_named(text: str | bytes, place: str, tmp_path: Path) -> None:
    assert place in str(with_file(tmp_path, text))


def test_faults_travel_between_processes() -> None:
    faults = ConfigFaults([ConfigError("a", 1, "b", "c"), ConfigError("d", 2, "e", "f")])
    again = pickle.loads(pickle.dumps(faults))  # noqa: S301 - our own bytes
    assert str(again) == str(faults) and again.key == "a"


def test_names_of_other_libraries_lead_to_keys_and_hide_none() -> None:
    names = [key.name for key in known_keys()]
    assert [name for name, key in SYNONYMS.items() if not is_known(key) or name in names or fate_of(name, None)] == []
