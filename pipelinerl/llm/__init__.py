"""Client of the inference servers: chat template, token-in-token-out generation, building of samples."""

from pipelinerl.llm.tokens import LLMCall, LLMOutput, Prompt
from pipelinerl.llm.tool_calls import ParsedToolCalls, parse_tool_calls
from pipelinerl.llm.trainable import TrainableLLM

__all__ = ["LLMCall", "LLMOutput", "ParsedToolCalls", "Prompt", "TrainableLLM", "parse_tool_calls"]
