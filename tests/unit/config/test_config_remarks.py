"""Settings that do nothing as they are combined are answered with one line each; values out of range are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.config.compose import compose
from pipelinerl.errors import ConfigError

HEAD = "finetune.model_class=causal-language-modeling-with-value-head"


def notes(*words: str) -> list[str]:
    return compose([*words, "output_dir=x"]).notes


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose([*words, "output_dir=x"])
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["eval_every_n_versions=78000"], "eval_every_n_versions=78000 is not below finetune.max_train_steps=1000"),
        (["eval_every_n_versions=99", "finetune.max_train_steps=99"], "eval_every_n_versions=99 is not below"),
        (["finetune.keep_best=success"], "keep_best=success keeps no model unless your rollouts report a metric"),
        (["finetune.keep_best=reward"], "is mean_reward meant?"),
        (["finetune.rl.epsilon_high=4"], "epsilon_high does nothing with finetune.rl.policy_loss=reinforce"),
        (["finetune.rl.dual_clip=3"], "it belongs to ppo, gspo, decoupled_ppo"),
        (["finetune.rl.policy_loss=cispo", "finetune.rl.dual_clip=3"], "finetune.rl.dual_clip does nothing"),
        (["finetune.rl.policy_loss=ppo", "finetune.rl.clamp=2"], "finetune.rl.clamp does nothing"),
        (["finetune.rl.soft_gate_negative=2"], "it belongs to sapo"),
        (["finetune.critic_learning_rate=1e-5"], f"critic_learning_rate does nothing without {HEAD}"),
        ([HEAD], "the value head is not trained or used with finetune.rl.advantage_estimator=rloo, only with gae"),
        (["finetune.rl.gae_lambda=0.9"], "finetune.rl.gae_lambda does nothing"),
        (["finetune.rl.importance_low=0.1"], "importance_low does nothing with finetune.rl.importance_correction=none"),
        (["finetune.rl.entropy_bonus_step=0.1"], "entropy_bonus_step does nothing without finetune.rl.target_entropy"),
        (["environment={_target_: my.Game}"], "no server of my.Game is started with world.env_replicas=0"),
        (["world.env_replicas=2"], "world.env_replicas=2 starts nothing: no environment is set"),
        (["finetune.dtype=fp32", "use_deepspeed=true"], "DeepSpeed computes with fp32 weights as they are"),
        (["finetune.dtype=tf32", "vllm_config.vllm_kwargs.dtype=float16"], "beside servers with dtype float16"),
        (["finetune.load_as_bf16=false", "vllm_config.vllm_kwargs.dtype=auto"], "finetune.dtype=fp32 beside servers"),
        (
            ["finetune.dtype=fp32", "use_deepspeed=false", "finetune.lora.enabled=true"],
            "only servers round merged weights). Watch rl/logprob_abs_diff_on_policy",
        ),
        (["hydra.run.dir=logs"], "hydra.run.dir does nothing here"),
    ],
)
def test_what_does_nothing_is_said_in_one_line(words: list[str], expected: str) -> None:
    found = notes(*words)
    assert len(found) == 1 and expected in found[0] and "\n" not in found[0]


@pytest.mark.parametrize(
    "words",
    [
        ["eval_every_n_versions=0"],
        ["eval_every_n_versions=999"],
        ["finetune.keep_best=success_rate"],
        ["finetune.keep_best=exact_matches"],
        # The default is no decision of the user's.
        ["finetune.max_train_steps=50", "finetune.num_warmup_steps=1"],
        ["finetune.rl.policy_loss=ppo", "finetune.rl.epsilon_high=0.3", "finetune.rl.dual_clip=3"],
        ["finetune.rl.policy_loss=decoupled_ppo", "finetune.rl.clamp=2"],
        ["finetune=ppo", "finetune.critic_learning_rate=1e-5", "finetune.rl.gae_lambda=0.9"],
        ["finetune.rl.importance_correction=mask", "finetune.rl.importance_low=0.1"],
        ["finetune.dtype=fp32", "use_deepspeed=false", "finetune.lora.enabled=true", "finetune.lora.sync=adapter"],
        ["finetune.rl.target_entropy=0.1", "finetune.rl.entropy_bonus_step=0.1"],
        ["environment={_target_: my.Game}", "world.env_replicas=1"],
        ["environment={url: somewhere}"],
        ["finetune.dtype=tf32", "use_deepspeed=false"],
        ["finetune.dtype=fp32", "use_deepspeed=false", "use_fsdp=true"],
        ["finetune.dtype=fp32", "use_deepspeed=true", "vllm_config.vllm_kwargs.dtype=float32"],
        ["finetune.dtype=bf16", "use_deepspeed=true", "finetune.lora.enabled=true"],
    ],
    ids=" ".join,
)
def test_what_does_something_is_not_remarked_on(words: list[str]) -> None:
    assert notes(*words) == []


def test_a_section_of_hydra_in_a_file_is_remarked_on(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [math, _self_]\nhydra:\n  run:\n    dir: ${output_dir}\n")
    (found,) = notes("--config-dir", str(tmp_path), "--config-name=mine")
    assert found.startswith(f"hydra (in {tmp_path.resolve() / 'mine.yaml'}) does nothing here")


def test_a_folder_without_a_name_says_which_experiment_starts(tmp_path: Path) -> None:
    (found,) = notes("--config-dir", str(tmp_path))
    assert "no --config-name is given, so the experiment is math" in found
    assert notes("--config-dir", str(tmp_path), "--config-name=math") == []


def test_an_agent_function_on_a_task_names_the_file_without_one() -> None:
    text = refusal("actor.agent_func_path=a.py", "agent.prompt_data=x.jsonl")
    assert "actor.rollout_policy: got" in text and "--config-name agent" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["seed=-1"], "seed: got -1, expected at least 0. It was set on the command line."),
        (["seed=4294967296"], "seed: got 4294967296, expected at most 2147483647."),
        (["llm.parameters.temperature=-1"], "llm.parameters.temperature: got -1, expected at least 0.0."),
        (["llm.parameters.temperature=0"], "For greedy evaluation set test_llm.parameters.temperature=0."),
    ],
)
def test_values_out_of_range_are_one_line_with_the_next_step(words: list[str], expected: str) -> None:
    text = refusal(*words)
    assert expected in text and "\n" not in text


def test_greedy_evaluation_leaves_training_as_it_is() -> None:
    config = compose(["output_dir=x", "test_llm.parameters.temperature=0"]).config
    assert config is not None
    assert config.test_llm.parameters.temperature == 0
    assert config.llm.parameters.temperature == config.sampling_temperature == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{bad", "expected a JSON file. Correct "),
        ("[1]", "expected a file with one JSON object"),
        ("{}", "expected a file with zero_optimization.stage 1, 2 or 3; its stage is None"),
        ('{"zero_optimization": {"stage": 0}}', "its stage is 0"),
        ('{"zero_optimization": true}', "its stage is None"),
    ],
)
def test_a_deepspeed_file_that_cannot_be_used_is_refused_before_anything_starts(
    tmp_path: Path, text: str, expected: str
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(text)
    found = refusal(f"deepspeed_config={file}")
    assert found.startswith(f"deepspeed_config: got '{file}', expected ") and expected in found and "\n" not in found
    # Nobody reads it then.
    assert notes(f"deepspeed_config={file}", "use_deepspeed=false") == []


@pytest.mark.parametrize("number", ["1", "2", "3"])
def test_each_zero_stage_is_taken(tmp_path: Path, number: str) -> None:
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": ' + number + "}}")
    assert notes(f"deepspeed_config={tmp_path / 'mine.json'}") == []
