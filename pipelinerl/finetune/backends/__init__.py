"""The trainer's backends: plain (DDP), DeepSpeed ZeRO and FSDP2."""

from __future__ import annotations

from pipelinerl.config import RunConfig
from pipelinerl.finetune.backends.base import Backend, PlainBackend
from pipelinerl.finetune.backends.deepspeed import DeepSpeedBackend
from pipelinerl.finetune.backends.fsdp import FSDPBackend
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.ranks import Ranks


def create_backend(policy: PolicyModel, config: RunConfig, ranks: Ranks) -> Backend:
    """The backend that the configuration asks for (`backend.type`)."""
    if config.backend.type == "deepspeed":
        return DeepSpeedBackend(policy, config, ranks)
    if config.backend.type == "fsdp":
        return FSDPBackend(policy, config, ranks)
    return PlainBackend(policy, config.finetune, ranks)
