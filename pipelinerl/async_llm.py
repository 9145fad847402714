"""Public names for rollouts: `llm_async_generate` asks a server, `make_training_text` makes the answer trainable.

Called by user code inside a rollout; `llm_async_generate` waits for the server.
"""

from __future__ import annotations

import aiohttp

from pipelinerl.llm.generate import answer_of
from pipelinerl.llm.sample_builder import make_training_text
from pipelinerl.llm.trainable import TrainableLLM
from pipelinerl.llm.types import LLMCall, Prompt

__all__ = ["llm_async_generate", "make_training_text"]


async def llm_async_generate(llm: TrainableLLM, prompt: Prompt, session: aiohttp.ClientSession) -> LLMCall:
    """Return the model's answer to `prompt`.

    The chat template is applied here and token ids are sent and received, so that the ids of the training sample are
    the ones that the server saw and sampled. With `prompt.tools`, tool calls in the answer are read into
    `output.tool_calls`, and `output.content` is the text outside of them. For several turns see `llm.chat(session)`.

    Raises:
        RolloutError: the rollout cannot go on (context full, request refused, answer not usable). Let it pass: the
            actor counts it and goes on with other rollouts.
    """
    if prompt.token_ids is not None:
        prompt_text, prompt_ids = None, list(prompt.token_ids)
    else:
        prompt_text, prompt_ids = llm.renderer.render(prompt.messages, prompt.tools)
    return await answer_of(llm, prompt, prompt_text, prompt_ids, session)
