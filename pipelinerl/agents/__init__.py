"""Agents that were written for something else: agent functions, and programs that talk to an OpenAI endpoint."""

from typing import Any

__all__ = ["black_box"]


def __getattr__(name: str) -> Any:
    # On first use, so that reading prompts does not load the proxy.
    if name == "black_box":
        from pipelinerl.agents.openai_agent import black_box

        return black_box
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
