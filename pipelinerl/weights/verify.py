"""The log-prob probe: the same tokens, computed afresh by trainer and servers, at the same version.

It is the only check that finds a server whose weights arrived but are not used (a packed copy, a stale cache).
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipelinerl.errors import WeightSyncError
from pipelinerl.weights.link import ControlClient


@dataclass(frozen=True)
class ProbeSequence:
    """Tokens and the trainer's log-probs of them.

    Attributes:
        token_ids: at least two ids.
        logprobs: `logprobs[i]` is log p(token_ids[i + 1] | token_ids[: i + 1]) in nats at temperature 1, so there is
            one fewer than ids.
    """

    token_ids: list[int]
    logprobs: list[float]

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2 or len(self.logprobs) != len(self.token_ids) - 1:
            raise ValueError(
                f"probe: got {len(self.token_ids)} ids and {len(self.logprobs)} log-probs, "
                "expected at least 2 ids and one log-prob fewer"
            )


@dataclass(frozen=True)
class ProbeResult:
    """|log-prob difference| between trainer and servers, in nats, over `num_tokens` tokens of all servers.

    `server_dtypes`: dtype of the weights of those servers that told it, such as `bfloat16`.
    """

    mean_abs_diff: float
    max_abs_diff: float
    num_tokens: int
    per_server_mean: dict[str, float]
    server_dtypes: dict[str, str] = field(default_factory=dict)


async def probe_servers(
    clients: Sequence[ControlClient], sequences: Sequence[ProbeSequence], timeout_s: float
) -> ProbeResult:
    """Ask every server for the log-probs of `sequences` and compare.

    Raises:
        WeightSyncError: no answer in time, or an answer without usable log-probs.
    """
    if not clients or not sequences:
        raise ValueError(f"probe: got {len(clients)} servers and {len(sequences)} sequences, expected one or more")
    diffs_by_server: dict[str, list[float]] = {}
    for client in clients:
        try:
            async with asyncio.timeout(timeout_s):
                diffs = await asyncio.gather(*(_diffs(client, sequence) for sequence in sequences))
        except TimeoutError as error:
            raise WeightSyncError(client.name, f"the log-prob probe had no answer after {timeout_s:g} s") from error
        diffs_by_server[client.name] = [value for part in diffs for value in part]
    flat = [value for values in diffs_by_server.values() for value in values]
    return ProbeResult(
        mean_abs_diff=math.fsum(flat) / len(flat),
        max_abs_diff=max(flat),
        num_tokens=len(flat),
        per_server_mean={name: math.fsum(values) / len(values) for name, values in diffs_by_server.items()},
    )


async def _diffs(client: ControlClient, sequence: ProbeSequence) -> list[float]:
    server = await server_logprobs(client, sequence.token_ids)
    diffs = [abs(ours - theirs) for ours, theirs in zip(sequence.logprobs, server, strict=True)]
    if not all(math.isfinite(value) for value in diffs):
        raise WeightSyncError(client.name, "the log-prob probe met a value that is not finite")
    return diffs


async def server_logprobs(client: ControlClient, token_ids: list[int]) -> list[float]:
    """The server's log-probs of `token_ids[1:]` at temperature 1, computed in one full forward pass.

    Prompt log-probs make vLLM bypass the prefix cache for reading; the salt keeps the entries from others as well.
    """
    answer = await client.generate(
        {
            "model": "actor",
            "token_ids": token_ids,
            "cache_salt": f"probe-{uuid.uuid4().hex}",
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
        }
    )
    entries = answer.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(token_ids):
        raise WeightSyncError(client.name, f"the log-prob probe got {str(entries)[:200]!r} for {len(token_ids)} tokens")
    return [_logprob_of(client, entry, token) for entry, token in zip(entries[1:], token_ids[1:], strict=True)]


def _logprob_of(client: ControlClient, entry: object, token: int) -> float:
    """`entry` maps token ids (as strings in JSON) to `{"logprob": value, ...}`."""
    found = entry.get(str(token)) if isinstance(entry, dict) else None
    if not isinstance(found, dict) or "logprob" not in found:
        raise WeightSyncError(client.name, f"the log-prob probe got {str(entry)[:200]!r} for token {token}")
    return float(found["logprob"])
