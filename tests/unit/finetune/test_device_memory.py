"""The memory metric: nothing on a CPU, the peak since the last step on a GPU."""

from __future__ import annotations

import pytest
import torch

from pipelinerl.finetune.device_memory import peak_memory


def test_a_cpu_has_no_such_metric() -> None:
    assert peak_memory(torch.device("cpu")) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_peak_is_that_of_one_step() -> None:
    device = torch.device("cuda", 0)
    peak_memory(device)
    large = torch.empty(2**30, dtype=torch.uint8, device=device)
    del large
    assert peak_memory(device)["finetune/gpu_memory_peak_gib"] >= 1
    assert peak_memory(device)["finetune/gpu_memory_peak_gib"] < 1
