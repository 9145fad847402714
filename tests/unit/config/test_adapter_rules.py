"""What servers that hold the frozen model cannot serve exactly is refused with a way out."""

from __future__ import annotations

import pytest

from pipelinerl.config.compose import compose
from pipelinerl.errors import ConfigError

SYNC = ["output_dir=x", "finetune.lora.enabled=true", "finetune.lora.sync=adapter"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["finetune.lora.bias=lora_only"], "finetune.lora.bias: got 'lora_only', expected none"),
        (["finetune.lora.r=513"], "finetune.lora.r: got 513, expected at most 512"),
        (
            ["+vllm_config.vllm_kwargs.quantization=fp8"],
            "vllm_config.vllm_kwargs.quantization: got 'fp8', expected no quantization",
        ),
        (
            ["+vllm_config.vllm_kwargs.load_format=dummy"],
            "vllm_config.vllm_kwargs.load_format: got 'dummy', expected servers that load their weights",
        ),
        (
            ["world=single_gpu", "schedule=conventional", "use_deepspeed=false"],
            "world.placement: got 'colocated', expected disaggregated",
        ),
    ],
)
def test_it_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*SYNC, *overrides])
    assert message in str(caught.value) and "finetune.lora.sync=merged" in str(caught.value)
