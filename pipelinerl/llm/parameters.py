"""From the configuration's sampling parameters to those of a request. Pure; called when a worker makes its handles."""

from __future__ import annotations

from typing import Any

from pipelinerl.config.sections import LLMParameters


def sampling_parameters(parameters: LLMParameters) -> dict[str, Any]:
    """Return what the server has to be told; its own defaults are left out, since every key costs it time.

    Without stop strings the server need not write text at all: the worker does that, once, at the end.
    """
    values: dict[str, Any] = {"max_tokens": parameters.max_tokens, "temperature": parameters.temperature}
    if parameters.top_p < 1:
        values["top_p"] = parameters.top_p
    if parameters.top_k > 0:
        values["top_k"] = parameters.top_k
    if parameters.min_tokens > 0:
        values["min_tokens"] = parameters.min_tokens
    if parameters.ignore_eos:
        values["ignore_eos"] = True
    if parameters.stop:
        values["stop"] = list(parameters.stop)
    else:
        values["detokenize"] = False
    return values
