"""Log-probs of the sampled tokens under the frozen reference model, from the `preprocessor_llm` servers.

The servers score a prompt without generating (`prompt_logprobs`), which ignores the sampling temperature, so the
configuration rejects reference servers at any temperature but 1.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from pipelinerl.errors import EndRunError, RolloutError
from pipelinerl.llm.client import Fault, Verdict, classify, open_session, post, reason_of, retry_delay_s
from pipelinerl.records import IGNORED_LABEL, Sample
from pipelinerl.records.completion import GENERATE_PATH, are_logprobs

logger = logging.getLogger(__name__)

_AWAY = (Fault.REFUSED, Fault.CANNOT_CONNECT, Fault.DISCONNECTED)


class _PromptLogprob(msgspec.Struct):
    logprob: float | None = None


class _PromptResponse(msgspec.Struct):
    # One entry per prompt token, None for the first; each maps token ids (as text) to their log-probs.
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


@dataclass(frozen=True)
class ReferenceServers:
    """Spreads samples over the reference servers.

    Attributes:
        urls: base URLs of the servers, at least one.
        concurrency: requests in flight per server.
        return_timeout_s: how long a server may be away while it restarts.
    """

    urls: Sequence[str]
    token: str
    concurrency: int
    request_timeout_s: float
    max_retries: int
    return_timeout_s: float

    def __call__(self, samples: Sequence[Sample]) -> list[Sample | None]:
        """Return the samples with `ref_logprobs`; None for one that the servers could not score.

        Raises:
            EndRunError: no request can succeed (wrong token, unknown route).
        """
        return asyncio.run(self._score_all(samples))

    async def _score_all(self, samples: Sequence[Sample]) -> list[Sample | None]:
        free = asyncio.Semaphore(self.concurrency * len(self.urls))
        urls = itertools.cycle(url.rstrip("/") for url in self.urls)
        async with open_session() as session:
            return await asyncio.gather(*(self._score(sample, next(urls), session, free) for sample in samples))

    async def _score(
        self, sample: Sample, url: str, session: aiohttp.ClientSession, free: asyncio.Semaphore
    ) -> Sample | None:
        body = msgspec.json.encode(
            {
                "model": "actor",
                "token_ids": sample.input_ids,
                "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0},
            }
        )
        try:
            async with free:
                content = await self._post(url + GENERATE_PATH, body, session)
            return msgspec.structs.replace(sample, ref_logprobs=read_prompt_logprobs(content, sample))
        except RolloutError as error:
            logger.warning("no reference log-probs for %s: %s", sample.id, error)
            return None

    async def _post(self, url: str, body: bytes, session: aiohttp.ClientSession) -> bytes:
        give_up_at = time.monotonic() + self.return_timeout_s
        for attempt in itertools.count():
            problem, content, _ = await post(session, url, body, timeout_s=self.request_timeout_s, token=self.token)
            if problem is None:
                return content
            text = f"{url}: {reason_of(problem)}: {content[:300].decode(errors='replace')}"
            verdict = classify(problem)
            if verdict is Verdict.END_RUN:
                raise EndRunError(text)
            # The samples exist already, so it is worth waiting for a server that restarts.
            is_away = problem in _AWAY and time.monotonic() < give_up_at
            if verdict is Verdict.FAIL_ROLLOUT or (attempt >= self.max_retries and not is_away):
                raise RolloutError(reason_of(problem), text)
            await asyncio.sleep(retry_delay_s(attempt, 0.5))
        raise AssertionError("unreachable")


def read_prompt_logprobs(content: bytes, sample: Sample) -> list[float]:
    """Log-probs of the trained tokens from a server's answer.

    Raises:
        RolloutError: `bad_response`, `length_mismatch` or `missing_logprobs`.
    """
    try:
        found = msgspec.json.decode(content, type=_PromptResponse).prompt_logprobs
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RolloutError("bad_response", str(error)) from error
    if found is None or len(found) != len(sample.input_ids):
        got = "none" if found is None else str(len(found))
        raise RolloutError("length_mismatch", f"{got} prompt log-probs for {len(sample.input_ids)} tokens")
    values = []
    for position, label in enumerate(sample.labels):
        if label == IGNORED_LABEL:
            continue
        value = _logprob_at(found[position], label)
        if value is None or not are_logprobs([value]):
            raise RolloutError("missing_logprobs", f"token {label} at position {position} has log-prob {value}")
        values.append(value)
    return values


def _logprob_at(entry: dict[str, Any] | None, token: int) -> float | None:
    found = (entry or {}).get(str(token))
    return None if found is None else found.logprob
