"""The table of families in the docs: trainer, export and real vLLM servers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fakes.families import FAMILIES, random_model
from fakes.family_trial import Trial, reopened_difference
from fakes.whole_run import environment, make_whole_run
from safetensors.torch import load_file

from pipelinerl.errors import ConfigError
from pipelinerl.weights.buffers import saved_buffers

TOLERANCE = 1e-4
PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
#: Columns of the rows: families, samples, server.
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines() if line[:3] == "| `"
]
#: Family -> samples, server.
ROWS = {family: others for families, *others in TABLE for family in re.findall(r"`(.*?)`", families)}
#: One of each kind; the others are slow.
QUICK = ("qwen3", "gemma2", "phi", "qwen3_moe", "glm4_moe", "gpt_oss", "mamba2", "qwen3_next", "gpt_neox", "phimoe")
SERVED = [family for family, (_, server) in ROWS.items() if server == "agrees"]


def test_the_table_has_every_family() -> None:
    listed = [family for families, *_ in TABLE for family in re.findall(r"`(.*?)`", families)]
    assert sorted(listed) == sorted(FAMILIES)
    assert set(QUICK) <= set(FAMILIES)


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f in QUICK else pytest.mark.slow) for f in FAMILIES])
def test_x1_the_trainer_has_the_family_as_the_table_says(family: str, tmp_path: Path) -> None:
    samples, _ = ROWS[family]
    if samples == "refused":
        with pytest.raises(ConfigError) as found:
            Trial(family, tmp_path)
        assert found.value.key == "model_path"
        return
    trial = Trial(family, tmp_path)
    assert samples == ("packed" if trial.packed else "alone")
    before = trial.logprobs()
    assert trial.step() > 0
    after = trial.logprobs()
    assert before != after
    assert reopened_difference(trial.export(), after) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", SERVED)
def test_w1_a_server_agrees_at_the_start_and_after_every_update(family: str, tmp_path: Path) -> None:
    """It starts with an export, so that is also opened by vLLM."""
    trial = Trial(family, tmp_path)
    trial.step()
    for difference, before in trial.served(trial.export()):
        assert difference < TOLERANCE
        # The old weights must be told apart, or the test proves nothing.
        assert before is None or before > 100 * TOLERANCE


@pytest.mark.slow
def test_a_server_in_bf16_has_the_bias_of_a_router_in_fp32(tmp_path: Path) -> None:
    """Next to 100 all of these are one value of bf16, and other experts would be chosen."""
    trial = Trial("glm4_moe", tmp_path, "bfloat16")
    [(_, bias)] = saved_buffers(trial.policy.language_model)

    def prefer(*experts: int) -> None:
        bias.copy_(100.0 + 0.05 * torch.tensor(experts))

    prefer(0, 3, 6, 9)
    for difference, before in trial.served(trial.export(), [lambda: prefer(9, 6, 3, 0)]):
        assert difference < 0.02
        assert before is None or before > 0.1


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoehybrid", "mamba2"])
def test_a_whole_run(family: str, tmp_path: Path) -> None:
    """Three steps with updates in flight: experts, sinks and recurrent states."""
    run = make_whole_run(tmp_path)
    vocabulary = json.loads((run.model_path / "config.json").read_text())["vocab_size"]
    random_model(family, vocab_size=vocabulary, max_position_embeddings=1024, eos_token_id=2).save_pretrained(
        run.model_path
    )
    words = [f"finetune.seq_packing={str(ROWS[family][0] == 'packed').lower()}", "finetune.max_train_steps=3"]
    ended = run.run(*words)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}\n{run.logs()}"
    assert run.summary["status"] == "completed" and run.summary["weight_updates"] == 4
    assert run.summary["logprob_abs_diff_mean"] < TOLERANCE
    before, after = (load_file(f / "model.safetensors") for f in (run.model_path, run.output_dir / "finetune/current"))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if ".experts." in name)
    audit = [sys.executable, "-m", "pipelinerl", "audit", str(run.output_dir), "--json"]
    assert json.loads(subprocess.run(audit, capture_output=True, check=True, env=environment()).stdout)["clean"]
