import pytest
import torch
from fakes.finetune_kit import Kit


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def kit() -> Kit:
    return Kit()
