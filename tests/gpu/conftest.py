"""Each GPU test starts without the device that an earlier one gave to accelerate."""

from __future__ import annotations

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def _own_accelerator() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
