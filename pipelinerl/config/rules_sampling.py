"""Rules of sampling and of the servers' options. Called through `rules.validate`."""

from __future__ import annotations

from typing import Any

from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError

_CPU_BLOCK = 32


def vllm_option(config: RunConfig, name: str) -> tuple[str, Any]:
    """Return key and value of a server option, however it is spelled; the value is None if it is not set."""
    for key, value in config.vllm_config.vllm_kwargs.items():
        if key.lstrip("-").replace("_", "-") == name:
            return f"vllm_config.vllm_kwargs.{key}", value
    return f"vllm_config.vllm_kwargs.{name}", None


def vllm_number(config: RunConfig, name: str) -> int | None:
    """Return a server option as a whole number, or None if it is not set or not one."""
    _, value = vllm_option(config, name)
    if isinstance(value, bool):
        return None
    return value if isinstance(value, int) else int(value) if str(value).isdecimal() else None


def context_number(config: RunConfig) -> ConfigError | None:
    """The length of the context is a number of tokens."""
    key, value = vllm_option(config, "max-model-len")
    number = vllm_number(config, "max-model-len")
    if value is not None and (number is None or number < 2):
        return ConfigError(key, value, "a number of tokens", "Write for instance max_model_len: 4096.")
    return None


def context_fits(config: RunConfig) -> ConfigError | None:
    """A sample as long as the context must fit in a micro-batch of the trainer."""
    context = vllm_number(config, "max-model-len")
    if context is not None and config.finetune.seq_length < context:
        return ConfigError(
            "finetune.seq_length",
            config.finetune.seq_length,
            f"at least vllm_config.vllm_kwargs.max_model_len={context}; longer samples could not be trained",
            f"Set finetune.seq_length={context}, or lower max_model_len (and max_tokens).",
        )
    return None


def prompt_room(config: RunConfig) -> ConfigError | None:
    """The context holds the prompt and the output."""
    context = vllm_number(config, "max-model-len")
    for section, parameters in (("llm", config.llm.parameters), ("test_llm", config.test_llm.parameters)):
        if context is not None and parameters.max_tokens >= context:
            return ConfigError(
                f"{section}.parameters.max_tokens",
                parameters.max_tokens,
                f"less than vllm_config.vllm_kwargs.max_model_len={context}, so that a prompt fits too",
                "Lower it, or raise max_model_len and finetune.seq_length.",
            )
        if parameters.min_tokens > parameters.max_tokens:
            return ConfigError(
                f"{section}.parameters.min_tokens",
                parameters.min_tokens,
                f"at most {section}.parameters.max_tokens={parameters.max_tokens}",
                "Lower it.",
            )
    return None


def server_quantisation(config: RunConfig) -> ConfigError | None:
    """Precision of the head has a key of its own."""
    if config.vllm_config.quantization == "bf16_last_layer_fp32":
        return ConfigError(
            "vllm_config.quantization",
            config.vllm_config.quantization,
            "null with fp32_lm_head=true, which computes the head in fp32 in servers and trainer",
            "Set vllm_config.quantization=null fp32_lm_head=true.",
        )
    return None


def cpu_block_size(config: RunConfig) -> ConfigError | None:
    """vLLM on a CPU takes blocks of 32 tokens or a multiple."""
    key, value = vllm_option(config, "block-size")
    size = vllm_number(config, "block-size")
    if config.world.device == "cpu" and size is not None and (size == 0 or size % _CPU_BLOCK):
        return ConfigError(key, value, f"a multiple of {_CPU_BLOCK} on a CPU", f"Set it to {_CPU_BLOCK}.")
    return None


RULES = (
    context_number,
    context_fits,
    prompt_room,
    server_quantisation,
    cpu_block_size,
)
