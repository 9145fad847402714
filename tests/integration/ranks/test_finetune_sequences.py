"""Two ranks of a sharded model may train, score, send, export, save and restore in any order."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from fakes.rank_group import run_ranks

from pipelinerl.finetune.ranks import Ranks
from pipelinerl.finetune.tensor_files import read_tensors

FOLDER = Path(__file__).parent
SCRIPT = FOLDER / "sequence_process.py"


@pytest.fixture
def on_one_rank(kit, monkeypatch, tmp_path):
    """What every act comes to on one rank of the plain backend."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    spec = importlib.util.spec_from_file_location("sequence_process", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(suffix):
        folder = tmp_path / "one_rank"
        folder.mkdir()
        trainer = module.Trainer(f"plain{suffix}", kit, folder, Ranks())
        trainer.run()
        return trainer.notes

    return run


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zero3", "zero3_lora", "fsdp", "fsdp_lora"])
def test_what_one_act_leaves_behind_never_disturbs_the_next(tmp_path, on_one_rank, backend):
    """A pass without a backward leaves parameters on their way that a sharded backend fetched for that backward."""
    run_ranks(SCRIPT, [backend, str(tmp_path)], tmp_path)
    found = read_tensors(tmp_path / "notes_0.safetensors")
    expected = on_one_rank("_lora" if backend.endswith("_lora") else "")
    assert [*found] == [*expected] and len(found) >= 50
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}")
