"""The tiny model's folder: complete, reused, never written over something else; and the command around it."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pipelinerl.tiny import warmup as warmup_module
from pipelinerl.tiny.build import build_model, build_tiny_model, model_key
from pipelinerl.tiny.main import main
from pipelinerl.tiny.tokenizer import build_tokenizer
from pipelinerl.tiny.warmup import WarmupSettings, warm_up

SHORT = WarmupSettings(high=16, careful_steps=3, mixed_steps=2, batch_turns=8, evaluation_games=16, adjustments=0)


def test_the_folder_loads_and_is_reused(tmp_path: Path) -> None:
    tied = True
    lines: list[str] = []
    folder = tmp_path / "deep" / "model"
    args = {"seed": 1, "tie_word_embeddings": tied, "warmup": None, "progress": lines.append}
    assert build_tiny_model(folder, **args) == folder
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert 400_000 < model.num_parameters() < 2_000_000
    assert model.config.model_type == "qwen2" and model.config.tie_word_embeddings is tied
    assert model.config.vocab_size == len(tokenizer)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    written = (folder / "model.safetensors").stat().st_mtime_ns
    build_tiny_model(folder, **args)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    build_tiny_model(folder, **{**args, "seed": 2})
    assert (folder / "model.safetensors").stat().st_mtime_ns != written


def test_the_key_follows_every_setting() -> None:
    keys = {
        model_key(seed=seed, tie_word_embeddings=tied, warmup=warmup)
        for seed in (1, 2)
        for tied in (False, True)
        for warmup in (None, SHORT, dataclasses.replace(SHORT, careless=0.9))
    }
    assert len(keys) == 12


def test_the_warm_up_lowers_the_loss_and_repeats_itself() -> None:
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(16)
    states = []
    for _ in range(2):
        model = build_model(tokenizer, seed=1)
        result = warm_up(model, tokenizer, SHORT, seed=1, progress=lambda line: None)
        assert result.steps == 5 and not result.cut_short
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_slow_first_step_does_not_change_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(16)
    states = []
    for slow_s in (0.0, SHORT.deadline_s / 4):
        times = itertools.chain([0.0], itertools.repeat(slow_s))
        monkeypatch.setattr(warmup_module.time, "monotonic", lambda times=times: next(times))
        model = build_model(tokenizer, seed=1)
        warm_up(model, tokenizer, SHORT, seed=1, progress=lambda line: None)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_warm_up_that_is_too_slow_stops_at_its_deadline() -> None:
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(16)
    settings = dataclasses.replace(SHORT, careful_steps=10**6, deadline_s=0.2)
    result = warm_up(build_model(tokenizer, seed=1), tokenizer, settings, seed=1, progress=lambda line: None)
    assert result.cut_short and 0 < result.steps < 10**6


def test_a_shortened_warm_up_is_done_again(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    lines: list[str] = []
    settings = dataclasses.replace(SHORT, careful_steps=10**6, deadline_s=0.2)
    for _ in range(2):
        build_tiny_model(tmp_path / "model", seed=1, warmup=settings, progress=lines.append)
    assert sum("WARNING" in line for line in lines) == 2
    assert torch.get_num_threads() == 1


def test_success_is_adjusted_towards_the_range() -> None:
    tokenizer = build_tokenizer(16)
    lines: list[str] = []
    settings = dataclasses.replace(SHORT, adjustments=1, success_range=(0.9, 1.0))
    result = warm_up(build_model(tokenizer, seed=1), tokenizer, settings, seed=1, progress=lines.append)
    assert result.steps == 5 + settings.adjustment_steps
    assert sum("adjusted" in line for line in lines) == 1


def test_the_command_prints_the_folder_or_the_one_that_it_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    folder = tmp_path / "model"
    assert main(["--output", str(folder), "--seed", "3", "--tied", "--no-warmup"]) == 0
    assert f"model_path={folder}" in capsys.readouterr().out.splitlines()[-1]
    record = json.loads((folder / "tiny_model.json").read_text())
    assert record["seed"] == 3 and record["tie_word_embeddings"] is True and record["warmup"] is None
    # Where the configurations look for it.
    monkeypatch.chdir(tmp_path)
    assert main(["--no-warmup"]) == 0 and (tmp_path / "results" / "tiny-model" / "tiny_model.json").is_file()
    capsys.readouterr()
    assert main(["--output", str(tmp_path), "--no-warmup"]) == 2
    assert str(tmp_path) in capsys.readouterr().err
