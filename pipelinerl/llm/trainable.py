"""`TrainableLLM`: the handle of one server that a rollout gets. Holds settings and counters; sends nothing itself.

Made by the rollout worker, once per server and per use (training, evaluation), and copied for every rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from pipelinerl.llm.chat import ChatRenderer
from pipelinerl.llm.connections import Connections

if TYPE_CHECKING:
    from pipelinerl.llm.conversation import Chat

_SEED_MASK = (1 << 63) - 1
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that the seeds of a rollout's requests all differ


@dataclass(slots=True)
class CallCounters:
    """What one rollout has asked of its server so far, and the policy versions that answered."""

    requests: int = 0
    retries: int = 0
    fatal: str | None = None
    versions: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class TrainableLLM:
    """One server and how to sample from it.

    Args:
        base_url: address of the server, for instance `http://127.0.0.1:8080`.
        model_name: the name that the server knows its model by.
        tokenizer: Hugging Face tokenizer with a chat template.
        parameters: sampling parameters (`max_tokens`, `temperature`, `top_p`, `top_k`, `min_tokens`, `stop`,
            `ignore_eos`).
        token: secret of the server; never shown by `repr`.
        collect_logprobs: ask for the log-probs that training needs.
        max_model_len: longest prompt and output together, in tokens; None leaves the check to the server.
        request_timeout_s: deadline of one request.
        max_retries: attempts after the first one, for transient failures.
        seed: seed of this rollout's requests; None lets the server draw.
        connections: used for plain HTTP instead of the session; the rollout worker's.
        unlabelled_version: the version of tokens whose server was never given one; None refuses them.
    """

    base_url: str
    model_name: str
    tokenizer: Any = None
    parameters: dict[str, Any] = field(default_factory=dict)
    token: str = field(default="", repr=False)
    collect_logprobs: bool = True
    max_model_len: int | None = None
    request_timeout_s: float = 300.0
    max_retries: int = 3
    seed: int | None = None
    counters: CallCounters = field(default_factory=CallCounters, repr=False)
    connections: Connections | None = field(default=None, repr=False)
    _renderer: ChatRenderer | None = field(default=None, repr=False)
    unlabelled_version: int | None = None

    @property
    def renderer(self) -> ChatRenderer:
        """Chat template and tokenizer, made at the first use and shared by all copies made later."""
        if self._renderer is None:
            self._renderer = ChatRenderer(self.tokenizer)
        return self._renderer

    def share_renderer(self, other: TrainableLLM) -> None:
        """Use `other`'s chat template cache."""
        self._renderer = other.renderer

    def for_rollout(self, seed: int | None) -> TrainableLLM:
        """Return a copy with its own seed and counters."""
        # By hand, since this is done for every rollout and copy.copy takes several times as long.
        return TrainableLLM(
            self.base_url,
            self.model_name,
            self.tokenizer,
            dict(self.parameters),
            self.token,
            self.collect_logprobs,
            self.max_model_len,
            self.request_timeout_s,
            self.max_retries,
            seed,
            CallCounters(),
            self.connections,
            self.renderer,
            self.unlabelled_version,
        )

    def chat(
        self,
        session: aiohttp.ClientSession,
        tools: Sequence[dict[str, Any]] | None = None,
        messages: Sequence[dict[str, Any]] = (),
    ) -> Chat:
        """Return a new conversation of several turns, whose token sequence only grows (see `Chat`)."""
        from pipelinerl.llm.conversation import Chat

        return Chat(self, session, tools, messages)

    def next_request_seed(self) -> int | None:
        """Return the seed of the next request: a function of the rollout's seed and the number of requests so far."""
        number = self.counters.requests
        self.counters.requests += 1
        return None if self.seed is None else (self.seed + number * _SEED_STEP) & _SEED_MASK

    def get_base_url(self) -> str:
        """Return the address without a slash at its end."""
        return self.base_url.rstrip("/")

    def load_tokenizer(self) -> None:
        """Do nothing: the tokenizer is there from the start. Kept for domain files that call it."""
