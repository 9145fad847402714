"""Two processes that read the same weights have the same print."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from pipelinerl.weights.base_print import PLACE_BYTES, PLACES, base_print


def save(folder: Path, seed: int = 0, elements: int = 5000, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    values = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
    save_file({"model.weight": values}, folder / name)
    return folder


def test_copies_are_alike_and_other_weights_are_not(tmp_path: Path) -> None:
    first = base_print(save(tmp_path / "a"))
    assert first is not None and first == base_print(save(tmp_path / "b"))
    assert first != base_print(save(tmp_path / "c", seed=1))
    # A file beside the weights does not count.
    (tmp_path / "b" / "notes.txt").write_text("x")
    assert first == base_print(tmp_path / "b")


def test_a_large_file_is_sampled_to_its_last_byte(tmp_path: Path) -> None:
    folder = save(tmp_path, elements=PLACES * PLACE_BYTES)
    file = folder / "model.safetensors"
    before, content = base_print(folder), bytearray(file.read_bytes())
    for place in (0, len(content) - 1):
        changed = content.copy()
        changed[place] ^= 1
        file.write_bytes(changed)
        assert base_print(folder) != before
    file.write_bytes(content)
    assert base_print(folder) == before


def test_without_safetensors_there_is_none(tmp_path: Path) -> None:
    assert base_print(None) is None
    assert base_print(tmp_path) is None
