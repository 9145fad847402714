"""What the benchmark scripts share."""

from __future__ import annotations

import pytest
from fakes.script_module import load_script


def test_gpus_are_counted_among_those_that_the_script_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server used to get card 0 of the host, whichever cards the script had been given."""
    common = load_script("benchmark_common", monkeypatch)
    assert common.visible_gpus("0", None) == "0"
    assert common.visible_gpus("0,1", None) == "0,1"
    assert common.visible_gpus("1", "2,3") == "3"
    assert common.visible_gpus("0,1", "GPU-b,GPU-a") == "GPU-b,GPU-a"
    with pytest.raises(IndexError):
        common.visible_gpus("1", "5")
