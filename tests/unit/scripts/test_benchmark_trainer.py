"""The two paths of the trainer's benchmark do the same work: same samples, same update."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in ("benchmark_trainer", "benchmark_common"):
        sys.modules.pop(name, None)


def test_both_paths_make_the_same_update(scripts: None, tmp_path: Path) -> None:
    from benchmark_common import random_model
    from benchmark_trainer import make_samples, our_step, plain_step
    from transformers import AutoModelForCausalLM

    model = str(random_model("0.001", tmp_path / "model", torch.float32))
    samples = make_samples(600, 64, 512, seed=1)
    args = argparse.Namespace(checkpointing=False, chunk_tokens=128)
    before = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    updates = []
    for make in (our_step, plain_step):
        step, network = make(model, samples, 128, torch.device("cpu"), args)
        step()
        updates.append(torch.cat([(p - before[name]).detach().flatten() for name, p in network.named_parameters()]))
    ours, plain = updates
    # The first step of AdamW has the size of the learning rate wherever there is a gradient.
    moved = plain.abs() > 0.9e-6
    assert moved.float().mean() > 0.5
    assert ((ours - plain).abs()[moved] < 1e-7).float().mean() > 0.99


def test_padding_is_not_counted_and_every_sample_is_in_one_row(scripts: None) -> None:
    from benchmark_trainer import make_samples, padded_rows

    samples = make_samples(600, 64, 512, seed=1)
    tokens = sum(len(sample.input_ids) for sample in samples)
    rows = padded_rows(samples, 128)
    assert sum(int(mask.sum()) for _, _, mask, _ in rows) == tokens
    assert sum(len(ids) for ids, _, _, _ in rows) == len(samples)
    assert all(ids.numel() <= 128 for ids, _, _, _ in rows)
