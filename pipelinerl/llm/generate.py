"""One answered request from ids: sends them, decodes the answer, reads tool calls.

Called by `llm_async_generate` and the chat; waits for the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp

from pipelinerl.llm.chat import cut_at
from pipelinerl.llm.client import complete
from pipelinerl.llm.continuation import sampled_text
from pipelinerl.llm.tool_calls import parse_tool_calls
from pipelinerl.llm.types import LLMCall, LLMOutput, Prompt

if TYPE_CHECKING:
    from pipelinerl.llm.trainable import TrainableLLM


async def answer_of(
    llm: TrainableLLM,
    prompt: Prompt,
    prompt_text: str | None,
    prompt_ids: list[int],
    session: aiohttp.ClientSession,
) -> LLMCall:
    """Return the model's answer to `prompt_ids`.

    Raises:
        RolloutError: as for `llm_async_generate`.
    """
    completion = await complete(llm, prompt_ids, session)
    text = llm.renderer.decode(completion.token_ids)
    if completion.stop_string:
        text = cut_at(text, completion.stop_string)
    call = LLMCall(
        prompt=prompt,
        output=LLMOutput(content=text),
        prompt_token_ids=prompt_ids,
        output_token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        version_spans=completion.version_spans,
        prompt_text=prompt_text,
        output_text=text,
        ended_by_stop_string=completion.stop_string is not None,
    )
    if prompt.tools:
        # Some formats mark a call with a special token, which is not in the plain text.
        raw = sampled_text(llm.renderer, call)
        if completion.stop_string:
            raw = cut_at(raw, completion.stop_string)
        parsed = parse_tool_calls(raw, id_prefix=f"call_{llm.counters.requests}")
        if parsed.calls:
            call.output = LLMOutput(content=parsed.content, tool_calls=parsed.calls)
    return call
