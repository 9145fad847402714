"""Agents that were written for something else: agent functions, and programs that talk to an OpenAI endpoint."""

from pipelinerl.agents.openai_agent import black_box

__all__ = ["black_box"]
