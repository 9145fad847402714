"""Public names for rollouts: `llm_async_generate` asks a server, `make_training_text` makes the answer trainable."""

from __future__ import annotations

import aiohttp

from pipelinerl.llm.trainable import TrainableLLM, generate, make_training_text
from pipelinerl.llm.transcript import LLMCall, Prompt

__all__ = ["llm_async_generate", "make_training_text"]


async def llm_async_generate(llm: TrainableLLM, prompt: Prompt, session: aiohttp.ClientSession) -> LLMCall:
    """Return the model's answer to `prompt`.

    The chat template is applied here and token ids are sent and received, so the ids of the training sample are exactly
    the ones that the server saw and sampled. With `prompt.tools`, tool calls in the answer are parsed into
    `output.tool_calls`, and `output.content` is the text around them. For several turns see `llm.chat(session)`.

    Raises:
        RolloutError: the rollout cannot continue (context full, request refused, answer unusable). Do not catch it:
            the actor counts it and continues with other rollouts.
    """
    if prompt.token_ids is not None:
        prompt_text, prompt_ids = None, list(prompt.token_ids)
    else:
        prompt_text, prompt_ids = llm.renderer.render(prompt.messages, prompt.tools)
    return await generate(llm, prompt, prompt_text, prompt_ids, session)
