"""Hands a request's tokens to the API process in batches instead of one by one.

Called by our scheduler after every engine step. Nobody reads a training request's tokens before it ends, but vLLM ships
every token of every request by itself, with three small arrays of log-probs: with hundreds of short-stepped requests
that costs the engine process more than the model does. Outputs are held back until the request ends, `max_tokens` are
held, or the weights may change: every token is labelled with the version that is current when it is shipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

#: Environment variable with another number than the default; 0 or 1 ship every token at once.
HELD_TOKENS_VARIABLE = "PIPELINERL_HELD_TOKENS"
#: Tokens that are held back at most; the cost by token has long vanished by then.
DEFAULT_MAX_TOKENS = 64


def may_wait(request: Request) -> bool:
    """Whether only the end of this request matters to whoever sent it: no streaming, no stop strings (they are found
    in the text, in the API process)."""
    parameters = request.sampling_params
    return (
        parameters is not None
        and parameters.output_kind == RequestOutputKind.FINAL_ONLY
        and not parameters.stop
        and parameters.prompt_logprobs is None
    )


class StepLogprobs:
    """The log-probs of one step for vLLM's scheduler, which cuts out each request's own.

    Of one token it gets three plain numbers `(id, log-prob, rank)`: to cut three arrays of one element for every token
    and to join them again costs several times as much. `as_lists` makes them what they were.
    """

    def __init__(self, whole: LogprobsLists) -> None:
        self._whole = whole
        self._rows = list(
            zip(
                whole.logprob_token_ids[:, 0].tolist(),
                whole.logprobs[:, 0].tolist(),
                whole.sampled_token_ranks.tolist(),
                strict=True,
            )
        )

    def slice_request(self, index: int, num_positions: int) -> Any:
        return self._rows[index] if num_positions == 1 else self._whole.slice_request(index, num_positions)


def cheap_to_cut(logprobs: Any) -> Any:
    """`StepLogprobs` if there is one column and one token a request, else what was given."""
    if not isinstance(logprobs, LogprobsLists) or logprobs.cu_num_generated_tokens is not None:
        return logprobs
    return StepLogprobs(logprobs) if logprobs.logprobs.shape[1] == 1 else logprobs


def as_lists(parts: list[Any]) -> LogprobsLists:
    """One `LogprobsLists` of the parts of one request, of either form.

    A step has as many columns as the request of it that wants most. A request's own come first and are in every part,
    so that what is beyond the narrowest part was for others.
    """
    if all(type(part) is tuple for part in parts):
        ids, values, ranks = zip(*parts, strict=True)
        return LogprobsLists(
            np.array(ids, np.int32)[:, None], np.array(values, np.float32)[:, None], np.array(ranks, np.int32), None
        )
    lists = [as_lists([part]) if type(part) is tuple else part for part in parts]
    if len(lists) == 1:
        return lists[0]
    columns = min(part.logprobs.shape[1] for part in lists)
    return LogprobsLists(
        np.concatenate([part.logprob_token_ids[:, :columns] for part in lists]),
        np.concatenate([part.logprobs[:, :columns] for part in lists]),
        np.concatenate([part.sampled_token_ranks for part in lists]),
        None,
    )


class OutputHold:
    """Outputs that are held back, by request."""

    def __init__(self, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._held: dict[str, list[EngineCoreOutput]] = {}

    def pass_on(self, outputs: Iterable[EngineCoreOutput], requests: Mapping[str, Request]) -> list[EngineCoreOutput]:
        """Take the outputs of one step; returns those that go out now, each with what was held of its request.

        Args:
            requests: the scheduler's requests.
        """
        ready = []
        for output in outputs:
            held = self._held.get(output.request_id)
            if held is None:
                request = requests.get(output.request_id)
                if request is not None and _plain(output) and may_wait(request):
                    # The first token goes out at once: it carries what is known about the prompt.
                    self._held[output.request_id] = []
                ready.append(merge([output]))
            elif _plain(output) and len(held) + 1 < self._max_tokens:
                held.append(output)
            else:
                ready.append(merge([*held, output]))
                held.clear()
                if output.finished:
                    del self._held[output.request_id]
        return ready

    def release(self) -> list[EngineCoreOutput]:
        """Everything that is held, one output a request; the requests go on being held back afterwards."""
        released = [merge(held) for held in self._held.values() if held]
        for held in self._held.values():
            held.clear()
        return released

    def void_logprobs(self) -> int:
        """Take the log-probs away from what is held, so that these samples are refused; returns the requests hit."""
        hit = 0
        for held in self._held.values():
            hit += bool(held)
            held[:] = [msgspec.structs.replace(output, new_logprobs=None) for output in held]
        return hit

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what is held of requests that end without an output (aborted ones)."""
        for request_id in request_ids:
            self._held.pop(request_id, None)


def merge(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """One output with the tokens and log-probs of several of the same request, in order; the last one's ending."""
    last = outputs[-1]
    parts = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if len(outputs) == 1:
        if type(last.new_logprobs) is tuple:
            last.new_logprobs = as_lists(parts)
        return last
    tokens = [token for output in outputs for token in output.new_token_ids]
    logprobs = as_lists(parts) if parts else None
    return msgspec.structs.replace(last, new_token_ids=tokens, new_logprobs=logprobs)


def _plain(output: EngineCoreOutput) -> bool:
    """Nothing but tokens and log-probs, in the middle of a request."""
    return (
        output.finish_reason is None
        and output.new_prompt_logprobs_tensors is None
        and output.pooling_output is None
        and output.kv_transfer_params is None
        and output.routed_experts is None
        and output.new_sampling_mask is None
        and not output.mm_cache_miss_hashes
    )
