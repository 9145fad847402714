"""Client of the inference servers: chat template, token-in-token-out generation, building of samples."""

from pipelinerl.llm.client import TrainableLLM
from pipelinerl.llm.tokens import LLMCall, LLMOutput, Prompt
from pipelinerl.llm.tool_calls import ParsedToolCalls, parse_tool_calls

__all__ = ["LLMCall", "LLMOutput", "ParsedToolCalls", "Prompt", "TrainableLLM", "parse_tool_calls"]
