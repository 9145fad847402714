"""Public names for rollouts: `llm_async_generate` asks a server, `make_training_text` makes the answer trainable."""

from pipelinerl.llm.client import llm_async_generate, make_training_text

__all__ = ["llm_async_generate", "make_training_text"]
