"""Section `agent`: data sets, shares and epochs of an agent function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.advice import epoch_notes, steps_of_epochs
from pipelinerl.config.agent import AGENT_ROLLOUT, PROMPT_LOADER
from pipelinerl.config.compose import compose
from pipelinerl.errors import ConfigError


def test_the_function_alone_is_enough_of_a_configuration(tmp_path: Path) -> None:
    file, prompts = tmp_path / "f.py", tmp_path / "p.jsonl"
    file.touch()
    prompts.touch()
    words = [f"actor.agent_func_path={file}", f"agent.prompt_data={prompts}", "agent.input_key=q", "model_path=m"]
    config = compose(["--config-name", "agent", "output_dir=x", *words]).config
    assert config is not None
    assert (config.actor.rollout_policy, config.dataset_loader) == (AGENT_ROLLOUT, PROMPT_LOADER)
    assert config.train_dataset_names == [str(prompts)] and config.test_dataset_names == []
    assert config.dataset_loader_params["input_key"] == "q" and config.dataset_loader_params["model_path"] == "m"
    assert {"chat_template_kwargs", "system_prompt"}.isdisjoint(config.dataset_loader_params)


def composed(folder: Path, *words: str) -> Any:
    file = folder / "f.py"
    file.touch()
    (folder / "a.jsonl").touch()
    (folder / "with,comma.jsonl").touch()
    arguments = ["--config-name", "agent", "output_dir=x", "model_path=m", f"actor.agent_func_path={file}", *words]
    return compose([argument.replace("HERE", str(folder)) for argument in arguments])


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("HERE/a.jsonl,org/name:test", ["HERE/a.jsonl", "org/name:test"]),
        ("'HERE/a.jsonl, org/name'", ["HERE/a.jsonl", "org/name"]),
        ("[org/name,HERE/a.jsonl,org/name]", ["org/name", "HERE/a.jsonl", "org/name"]),
        ("'HERE/with,comma.jsonl'", ["HERE/with,comma.jsonl"]),
        ("org/name", ["org/name"]),
    ],
)
def test_data_sets_with_commas(value: str, names: list[str], tmp_path: Path) -> None:
    config = composed(tmp_path, f"agent.prompt_data={value}", f"agent.eval_data={value}").config
    expected = [name.replace("HERE", str(tmp_path)) for name in names]
    assert config.train_dataset_names == config.test_dataset_names == expected


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("agent.prompt_data", ["agent.prompt_data='a,0.3,b,0.7'"]),
        ("agent.prompt_data", ["agent.prompt_data=a,0.5"]),
        ("agent.eval_data", ["agent.prompt_data=a", "agent.eval_data='a,,b'"]),
        ("agent.prompt_data", ["agent.prompt_data=[]"]),
        ("agent.prompt_data_probs", ["agent.prompt_data=a", "agent.prompt_data_probs='0.5,0.5'"]),
        ("agent.prompt_data_probs", ["agent.prompt_data='a,b'", "agent.prompt_data_probs='0.5,x'"]),
        ("agent.prompt_data_probs", ["agent.prompt_data='a,b'", "agent.prompt_data_probs=[0.5,0]"]),
        ("agent.prompt_data_probs", ["agent.prompt_data='a,b'", "agent.prompt_data_probs=0.5"]),
        ("agent.prompt_data", ["agent.prompt_data='a,a'", "agent.prompt_data_probs='1,2'"]),
    ],
)
def test_data_sets_that_are_refused(key: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        composed(tmp_path, *words)
    assert refused.value.key == key


def test_keys_that_nothing_reads_are_named(tmp_path: Path) -> None:
    def notes(*words: str) -> list[str]:
        return [note for note in compose([*words, "output_dir=x", "model_path=m"]).notes if note.startswith("agent.")]

    (tmp_path / "f.py").touch()
    (note,) = notes("--config-name=guessing", "agent.prompt_data=a", "agent.max_samples=3")
    assert note.startswith("agent.prompt_data, agent.max_samples ") and "actor.agent_func_path" in note
    function = ["--config-name=base", f"actor.agent_func_path={tmp_path}/f.py"]
    own = [*function, "dataset_loader=my.load", "train_dataset_names=[a]", "agent.eval_data=a", "agent.max_steps=3"]
    (note,) = notes(*own, "agent.prompt_max_len=5")
    assert note.startswith("agent.eval_data, agent.prompt_max_len ") and "dataset_loader=my.load" in note
    assert notes(*function, "agent.prompt_data=a", "agent.prompt_max_len=5", "agent.max_steps=3") == []
    assert notes("--config-name=guessing") == []


def epoch_notes_of(folder: Path, num_prompts: int, *words: str) -> list[str]:
    return epoch_notes(composed(folder, "agent.prompt_data=a", *words).config, num_prompts)


def test_a_run_that_ends_before_its_epochs_says_so(tmp_path: Path) -> None:
    """100,000 prompts with 8 samples are 6250 steps of 128; the limit is 1000."""
    batch = "finetune.gradient_accumulation_passes=128"
    (note,) = epoch_notes_of(tmp_path, 100_000, batch)
    assert "finetune.max_train_steps=1000" in note and " 6250 " in note
    assert epoch_notes_of(tmp_path, 16_000, batch) == []


def test_warm_up_and_evaluations_are_judged_by_the_steps_of_the_passes(tmp_path: Path) -> None:
    """160 prompts with 8 samples are 10 steps of 128."""
    batch = "finetune.gradient_accumulation_passes=128"
    (note,) = epoch_notes_of(tmp_path, 160, batch)
    assert "finetune.num_warmup_steps=50" in note and " 10 " in note
    for words in (["finetune.num_warmup_steps=9"], ["finetune.lr_scheduler_type=constant"], ["finetune.max_epochs=6"]):
        assert epoch_notes_of(tmp_path, 160, batch, *words) == []
    # The composition has said it already.
    config = composed(tmp_path, "agent.prompt_data=a", batch, "finetune.num_warmup_steps=2000")
    assert epoch_notes(config.config, 160) == [] and any("num_warmup_steps=2000" in note for note in config.notes)
    (note,) = epoch_notes_of(tmp_path, 160, batch, "finetune.num_warmup_steps=5", "eval_every_n_versions=20")
    assert "eval_every_n_versions=20" in note


def test_passes_with_a_ring_that_drops_samples_get_a_note(tmp_path: Path) -> None:
    words = ["finetune.num_warmup_steps=0", "finetune.gradient_accumulation_passes=128"]
    (note,) = epoch_notes_of(tmp_path, 160, *words, "max_lag=null")
    assert "max_lag=null" in note
    assert epoch_notes_of(tmp_path, 160, *words) == []
    assert epoch_notes_of(tmp_path, 160, *words, "max_lag=null", "pop_old_data=false") == []


def test_steps_of_epochs() -> None:
    """12,500 prompts, 8 samples each, 192 a step: 520 whole steps and a part of one."""
    assert steps_of_epochs(12_500, 8, 1, 192) == 521
