"""`python -m pipelinerl plan`: answers at once, for machines that are not here; refuses what cannot fit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelinerl.config import RunConfig
from pipelinerl.config.load import save_config
from pipelinerl.errors import ConfigError
from pipelinerl.run.plan_command import main, recorded_steps
from pipelinerl.rundir.layout import RunDir, RunIdentity, write_identity
from pipelinerl.world import Job, WorldMap

SIZES = {"7": (3584, 18944, 28, 28, 4), "32": (5120, 27648, 64, 40, 8)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder_of(tmp_path, "7")


def folder_of(tmp_path: Path, billions: str) -> Path:
    folder = tmp_path / f"model-{billions}"
    folder.mkdir()
    hidden, inner, layers, heads, kv_heads = SIZES[billions]
    config = dict(model_type="qwen2", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers)
    config |= dict(num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=152064)
    (folder / "config.json").write_text(json.dumps(config | dict(tie_word_embeddings=False, torch_dtype="bfloat16")))
    return folder


PLAIN = ("backend=plain", "finetune.seq_length=12000")


@pytest.mark.parametrize(
    ("billions", "words", "code"),
    [
        ("7", ("--gpus=2", "--card=h100", *PLAIN), 2),
        ("7", ("--gpus=8", "--card=h100"), 0),
        ("7", ("--gpus=2", "--gpu-memory-gib=80", *PLAIN, "finetune.lora.enabled=true"), 0),
        ("32", ("--gpus=2", "--card=h200", *PLAIN), 2),
        ("32", ("--gpus=2", "--card=h100", *PLAIN), 2),
        ("7", ("--gpus=0", "--ram-gib=23", "backend=plain"), 2),
        ("7", ("--gpus=0", "--ram-gib=400", "backend=plain"), 0),
    ],
)
def test_what_fits_which_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], billions: str, words: tuple[str, ...], code: int
) -> None:
    folder = folder_of(tmp_path, billions)
    assert main([*words, f"model_path={folder}", f"output_dir={tmp_path}/out"]) == code
    printed = capsys.readouterr()
    assert "optimizer state" in printed.out and "samples/s" in printed.out
    assert ("refused" in printed.err) == (code == 2)
    if code == 2 and "--gpus=0" not in words:
        assert "finetune.lora.enabled=true" in printed.err or "num_finetune_ranks=" in printed.err


def test_the_nearest_that_fits_does_fit(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a refusal proposes is accepted."""
    own = [f"model_path={model}", f"output_dir={tmp_path}/out", "--gpus=8", "--card=h100"]
    assert main([*own, "backend=plain"]) == 2
    proposed = capsys.readouterr().err.partition("It fits with ")[2].partition(" (")[0].split()
    assert proposed and main([*own, *[word for word in proposed if "=" in word]]) == 0


def test_an_answer_loads_no_torch(tmp_path: Path, model: Path) -> None:
    code = (
        "import sys; from pipelinerl.run.plan_command import main\n"
        f"assert main(['--gpus=8', '--card=h100', 'model_path={model}']) == 0\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300, stdout=subprocess.DEVNULL)
    # Measured: 0.6 s alone on the machine.
    assert time.monotonic() - started < 20


TURNS = (
    *("--gpus=1", "--card=h200", "world.placement=colocated", "world.servers_per_gpu=1", "schedule=conventional"),
    *("backend=plain", "model_path=x-3B"),
)


@pytest.mark.parametrize("name", ["gsm8k", "guessing_2gpu", "arithmetic_2gpu"])
def test_servers_and_trainer_share_a_single_gpu(tmp_path: Path, name: str) -> None:
    words = [f"--config-name={name}", "world=single_gpu", "model_path=x-0.5B", f"output_dir={tmp_path}/out"]
    assert main(["--gpus=1", "--card=h200", *words]) == 0


SHORT = (
    *("--config-name=arithmetic_2gpu", "--gpus=8", "--card=h200", "--output-tokens=9", "--prompt-tokens=140"),
    *("model_path=x-0.5B", "finetune.seq_length=16384", "world.num_actor_llms=2", "world.num_finetune_ranks=6"),
)


def test_short_answers_need_processes_for_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More servers bring more processes, unless their number is chosen: then that is what is missing."""
    words = [*SHORT, f"output_dir={tmp_path}/out"]
    assert main([*words, "--cores=128"]) == 0
    assert "world.num_actor_llms=" in capsys.readouterr().out
    assert main([*words, "--cores=128", "actor.rollout_workers=1"]) == 0
    printed = capsys.readouterr().out
    assert "actor.rollout_workers" in printed and "world.num_actor_llms=" not in printed
    assert "--cores" not in printed
    assert main(words) == 0
    assert "--cores" in capsys.readouterr().out


def test_a_smaller_cache_makes_room_on_a_card_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server with 0.85 of the card leaves no room for the state of the trainer; with what is proposed it does."""
    key, own = "vllm_config.vllm_kwargs.gpu-memory-utilization=", [*TURNS, f"output_dir={tmp_path}/out"]
    assert main([*own, f"{key}0.85"]) == 2
    share = capsys.readouterr().out.partition(f"Set {key}")[2].split()[0].rstrip(".")
    assert 0.6 < float(share) < 0.8
    assert main([*own, f"{key}{share}"]) == 0


def test_a_record_against_its_forecast(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trainer that waits half of the time gets more servers, and its memory is compared."""
    files = RunDir(tmp_path / "run")
    settings = {"output_dir": str(files.root), "model_path": str(model), "finetune": {"lora": {"enabled": True}}}
    config = RunConfig.model_validate(settings)
    files.root.mkdir()
    write_identity(files.identity_file, RunIdentity(run_id="run-a", incarnation=0))
    save_config(config, files.config_file)
    jobs = [
        Job(kind, f"{kind}_0", 0, 0, 0, "127.0.0.1", gpus, None, None, None, 1)
        for kind, gpus in (("actor_llm", ["0"]), ("actor", []), ("finetune", ["1"]))
    ]
    files.world_file.write_text(WorldMap(jobs, "cuda", 1, "127.0.0.1", 1).to_json())
    step = {"finetune/step_s": 20.0, "finetune/wait_data_s": 10.0, "finetune/train_s": 9.0, "finetune/samples": 64}
    step |= {"finetune/tokens": 64 * 500, "finetune/output_tokens": 64 * 300, "finetune/gpu_memory_peak_gib": 22.0}
    step |= {"finetune/gpu_memory_reserved_peak_gib": 23.0}
    files.metrics_file.write_text(f"{json.dumps(step)}\n" * 5)
    assert main(["--from", str(files.root), "--card=a100 40gb"]) == 0
    printed = capsys.readouterr().out
    assert "64 samples of 200 + 300 tokens" in printed
    assert "22.00" in printed
    assert "waited 50%" in printed
    assert "finetune.seq_length=24000" in printed  # 32,000 tokens are several packs
    assert "finetune.gradient_checkpointing=false" not in printed  # 12,000 tokens of 7 B need 74 GiB without
    step |= {"finetune/tokens": 64 * 5, "finetune/output_tokens": 64 * 3}
    files.metrics_file.write_text(f"{json.dumps(step)}\n" * 5)
    assert main(["--from", str(files.root), "--card=a100 40gb"]) == 0
    assert "finetune.seq_length" not in capsys.readouterr().out  # one pack holds them all
    with pytest.raises(ConfigError):
        main(["--from", str(tmp_path), "--card=h100"])


def test_the_means_of_a_run_leave_out_its_first_steps(tmp_path: Path) -> None:
    seconds = [50.0, 9.0, 2.0, 4.0, 3.0]
    rows = [{"finetune/step_s": value, "finetune/gpu_memory_peak_gib": 10 - value} for value in seconds]
    for row, tokens, computed in zip(rows, (7, 8, 9, 9, 9), (5, 6, 4, 3, 2), strict=True):
        row |= {"finetune/tokens": tokens, "finetune/computed_tokens": computed, "finetune/samples": 6}
    rows.append({"actor/output_tokens_per_s": 100.0})
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = recorded_steps(file)
    assert found["steps"] == 3
    assert found["finetune/step_s"] == 3.0
    assert found["samples_per_s"] == 2.0
    assert found["finetune/gpu_memory_peak_gib"] == 8.0
    assert (found["peak_step_tokens"], found["peak_step_computed_tokens"]) == (9, 4)
