"""The log-probs of sampled tokens as arrays, without one Python object for each: the one place that reaches into vLLM.

vLLM's `LogprobsProcessor` turns every token of every request into Python numbers and objects in the API process, which
then costs several times what the rest of the request does. `keep_arrays` gives one request a processor that keeps the
engine's arrays as they come. Where vLLM is built otherwise than expected it does nothing: `sampled_logprobs` reads the
flat lists of vLLM's own as well. Called by `inference.lean_route`; a contract test holds both ways against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists


class ArrayLogprobs(LogprobsProcessor):
    """Collects what the engine sends. Its `logprobs`, which vLLM hands on unseen, is a list of `LogprobsLists`."""

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        self.logprobs.append(logprobs_lists)  # type: ignore[union-attr,arg-type]


def keep_arrays(engine: Any, request_id: str) -> bool:
    """Let the engine client collect this request's log-probs as arrays; False if that is not possible.

    Args:
        engine: vLLM's engine client in this process.
        request_id: the inner id of a request that asked for `logprobs=0` and `flat_logprobs`.
    """
    states: dict[str, Any] = getattr(getattr(engine, "output_processor", None), "request_states", {})
    state: Any = states.get(request_id)
    present = getattr(state, "logprobs_processor", None)
    if type(present) is not LogprobsProcessor or not isinstance(present.logprobs, FlatLogprobs):
        return False
    state.logprobs_processor = ArrayLogprobs(
        tokenizer=None,
        logprobs=_parts_of(present.logprobs),  # type: ignore[arg-type]
        prompt_logprobs=None,
        cumulative_logprob=None,
        num_logprobs=present.num_logprobs,
        num_prompt_logprobs=None,
    )
    return True


def sampled_logprobs(collected: Any, token_ids: Sequence[int]) -> np.ndarray:
    """Return the log-probs of `token_ids`, float32 of shape (tokens that have one,).

    Args:
        collected: `logprobs` of a completion with `flat_logprobs`, its processor replaced or not.
        token_ids: the sampled tokens. One whose log-prob is said to be of another token gets NaN, which no client
            takes for a log-prob.
    """
    parts = _parts_of(collected) if isinstance(collected, FlatLogprobs) else collected
    if not parts:
        return np.zeros(0, np.float32)
    # The sampler puts the sampled token first.
    values = np.concatenate([part.logprobs[:, 0] for part in parts]).astype(np.float32, copy=False)
    named = np.concatenate([part.logprob_token_ids[:, 0] for part in parts])
    if len(named) == len(token_ids) and not np.array_equal(named, token_ids):
        values = np.where(named == np.asarray(token_ids), values, np.float32(np.nan))
    return values


def _parts_of(flat: FlatLogprobs) -> list[LogprobsLists]:
    """What vLLM's own processor has collected, as one part; none of nothing."""
    if not flat.start_indices:
        return []
    ids = np.asarray([flat.token_ids[index] for index in flat.start_indices])
    values = np.asarray([flat.logprobs[index] for index in flat.start_indices], np.float32)
    return [LogprobsLists(ids[:, None], values[:, None], np.zeros(len(ids), np.int32), None)]
