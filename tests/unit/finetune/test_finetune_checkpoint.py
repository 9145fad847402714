"""Training states are complete or absent, old ones go, and a full disk while deleting is only a warning."""

import logging

import pytest
import torch

from pipelinerl.finetune import checkpoint
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.checkpoint import CheckpointStore, TrainerState, newest_complete
from pipelinerl.finetune.ranks import Ranks
from pipelinerl.rundir import durable


@pytest.fixture
def backend(kit):
    return PlainBackend(kit.policy(), kit.config(), Ranks())


def store(tmp_path, **options):
    return CheckpointStore(tmp_path / "training_state", Ranks(), **options)


def steps(tmp_path):
    return sorted(path.name for path in (tmp_path / "training_state").iterdir())


def test_state_comes_back(tmp_path, backend):
    state = TrainerState(step=3, samples_processed=99, data_offset=4, actor_offset=17, incarnation=2)
    torch.manual_seed(5)
    store(tmp_path).save(state, backend)
    expected = torch.rand(3)
    assert store(tmp_path).restore(backend) == state
    assert torch.equal(torch.rand(3), expected)


class TinyState:
    """A backend whose state is one small file in a folder, as that of a real one."""

    def __init__(self):
        self.loaded = None

    def save(self, folder):
        (folder / "state").mkdir()
        (folder / "state" / "model.safetensors").write_bytes(b"weights of the model")

    def load(self, folder):
        self.loaded = folder.name


def test_d2_every_cut_of_every_file_sends_us_to_the_state_before(tmp_path):
    backend = TinyState()
    for step in (1, 2):
        store(tmp_path).save(TrainerState(step=step), backend)
    files = sorted(path for path in (tmp_path / "training_state" / "2").rglob("*") if path.is_file())
    assert [file.name for file in files] == ["rng_0.safetensors", "model.safetensors", "state.json"]
    for file in files:
        content = file.read_bytes()
        for length in range(0, len(content), 1 if len(content) < 1000 else 97):
            file.write_bytes(content[:length])
            found = newest_complete(tmp_path / "training_state").state.step
            # The last byte of the manifest is white space.
            assert found == 1 or content[:length].strip() == content.strip(), (file.name, length)
        file.write_bytes(content)
    assert store(tmp_path).restore(backend).step == 2 and backend.loaded == "2"


@pytest.mark.parametrize("operation", ["start_folder", "partial_folder", "checksums", "finish_folder"])
@pytest.mark.parametrize("when", ["before", "behind"])
def test_d2_a_kill_between_any_two_operations_of_a_save(tmp_path, monkeypatch, operation, when):
    store(tmp_path).save(TrainerState(step=1), TinyState())
    original = getattr(checkpoint, operation)

    def killed(*args):
        if when == "behind":
            original(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, operation, killed)
    with pytest.raises(KeyboardInterrupt):
        store(tmp_path).save(TrainerState(step=2), TinyState())
    monkeypatch.setattr(checkpoint, operation, original)
    is_done = (operation, when) == ("finish_folder", "behind")
    assert store(tmp_path).restore(TinyState()).step == (2 if is_done else 1)
    store(tmp_path).save(TrainerState(step=2), TinyState())
    assert steps(tmp_path) == ["1", "2"]


def test_a_crash_while_saving_leaves_the_old_state(tmp_path, backend):
    store(tmp_path).save(TrainerState(step=1), backend)

    class Dies:
        def save(self, folder):
            (folder / "half").write_bytes(b"x")
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        store(tmp_path).save(TrainerState(step=2), Dies())
    assert newest_complete(tmp_path / "training_state").state.step == 1
    store(tmp_path).save(TrainerState(step=2), backend)
    assert steps(tmp_path) == ["1", "2"]


def test_old_states_go_and_chosen_ones_stay(tmp_path, backend):
    keeper = store(tmp_path, keep_last=2, keep_steps=frozenset({2}))
    for step in range(1, 6):
        keeper.save(TrainerState(step=step), backend)
    assert steps(tmp_path) == ["2", "4", "5"]


def test_o1_a_failed_deletion_is_a_warning(tmp_path, backend, monkeypatch, caplog):
    keeper = store(tmp_path, keep_last=1)
    keeper.save(TrainerState(step=1), backend)

    def refuse(folder):
        raise OSError("Read-only file system")

    monkeypatch.setattr(durable.shutil, "rmtree", refuse)
    with caplog.at_level(logging.WARNING):
        keeper.save(TrainerState(step=2), backend)
    assert "could not be removed: Read-only file system" in caplog.text
    assert steps(tmp_path) == ["1", "2"]


def test_a_whole_model_fits_another_number_of_ranks(tmp_path, backend):
    saved = CheckpointStore(tmp_path / "training_state", Ranks())
    state = TrainerState(step=1)
    saved.save(state, backend)
    folder = tmp_path / "training_state" / "1"
    text = (folder / "state.json").read_text().replace('"world_size": 1', '"world_size": 2')
    (folder / "state.json").write_text(text)
    assert store(tmp_path).restore(backend) == state
