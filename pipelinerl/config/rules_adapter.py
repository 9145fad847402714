"""Rules of updates that send the adapter alone (`finetune.lora.sync=adapter`). Called through `rules.validate`.

The servers then hold the frozen model themselves, so it has to be the trainer's in every digit, and all that is trained
has to be A and B. What depends on the model or the devices is in `run.model_folder`.
"""

from __future__ import annotations

from pipelinerl.config.rules_sampling import vllm_number, vllm_option
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError

#: The largest rank that vLLM makes room for (`vllm/config/lora.py`, version 0.32).
LARGEST_RANK = 512
_MERGED = "set finetune.lora.sync=merged"
_WITH = "with finetune.lora.sync=adapter"


def needs_an_adapter(config: RunConfig) -> ConfigError | None:
    """Without adapters all weights are trained."""
    if not config.finetune.lora.enabled and config.finetune.lora.sync == "adapter":
        return ConfigError(
            "finetune.lora.sync",
            "adapter",
            "merged with finetune.lora.enabled=false: there is no adapter, all weights are trained",
            "Add finetune.lora.enabled=true, or remove the key.",
        )
    return None


def nothing_beside_a_and_b(config: RunConfig) -> ConfigError | None:
    """An adapter in a vLLM server is A and B of linear layers."""
    lora = config.finetune.lora
    if not sends_adapter(config):
        return None
    if lora.bias != "none":
        return ConfigError(
            "finetune.lora.bias",
            lora.bias,
            f"none {_WITH}: servers take no biases with an adapter",
            f"Leave biases untrained, or {_MERGED}.",
        )
    if lora.r > LARGEST_RANK:
        return ConfigError(
            "finetune.lora.r",
            lora.r,
            f"at most {LARGEST_RANK} {_WITH}: vLLM has no room for more",
            f"Lower it, or {_MERGED}.",
        )
    return None


def servers_with_the_same_base(config: RunConfig) -> ConfigError | None:
    """What the servers hold is the model of `model_path` as it is, for as long as they live."""
    if not sends_adapter(config):
        return None
    key, quantization = vllm_option(config, "quantization")
    if config.vllm_config.quantization is not None:
        key, quantization = "vllm_config.quantization", config.vllm_config.quantization
    if quantization is not None:
        expected = f"no quantization {_WITH}: the trainer computes with the model as it is"
        return ConfigError(key, quantization, expected, f"Remove it, or {_MERGED}.")
    key, load_format = vllm_option(config, "load-format")
    if load_format == "dummy":
        expected = f"servers that load their weights {_WITH}: updates do not bring the model"
        return ConfigError(key, load_format, expected, f"Remove it, or {_MERGED}.")
    if config.world.placement == "colocated":
        return ConfigError(
            "world.placement",
            "colocated",
            f"disaggregated {_WITH}: servers that sleep may give up their weights, and updates do not bring them back",
            f"Place servers and trainer apart, or {_MERGED}.",
        )
    return None


def whole_layers(config: RunConfig) -> ConfigError | None:
    """Every worker of a server has all layers, sliced or not."""
    if not sends_adapter(config):
        return None
    if (vllm_number(config, "pipeline-parallel-size") or 1) > 1:
        key, size = vllm_option(config, "pipeline-parallel-size")
        expected = f"1 {_WITH}: each worker checks that the whole adapter has its place"
        return ConfigError(key, size, expected, f"Use tensor-parallel-size, or {_MERGED}.")
    return None


def sends_adapter(config: RunConfig) -> bool:
    """Whether updates send the adapter alone."""
    return config.finetune.lora.enabled and config.finetune.lora.sync == "adapter"


RULES = (needs_an_adapter, nothing_beside_a_and_b, servers_with_the_same_base, whole_layers)
