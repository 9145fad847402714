"""A vLLM server of ours whose engine is a stub: everything of the API process is real, no model is run.

Started by `benchmark_api_process.py` in a process of its own. The stub hands tokens on as our scheduler does: the first
one at once, then up to `--held` of a request together, decoded from the same messages that an engine process sends;
every step has a message with the scheduler's figures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import defaultdict
from typing import Any

import numpy as np

from pipelinerl.inference import server
from pipelinerl.inference.arguments import ServerSettings


class StubEngine:
    """What vLLM's `AsyncLLM` asks of its connection to an engine process."""

    def __init__(self, held: int) -> None:
        from types import SimpleNamespace

        self._held = max(1, held)
        self._templates: dict[tuple[int, bool, bool], list[Any]] = {}
        self._due: dict[int, list[tuple[Any, int]]] = defaultdict(list)
        self._gone: set[str] = set()
        self._step = 0
        self._active = 0
        self._work = asyncio.Event()
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        self._due[self._step + 1].append((request, 0))
        self._active += 1
        self._work.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self._gone.update(request_ids)

    async def get_output_async(self) -> Any:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.metrics.stats import SchedulerStats

        if not self._active:
            self._work.clear()
            await self._work.wait()
        await asyncio.sleep(0)
        self._step += 1
        outputs = [self._output(request, sent) for request, sent in self._due.pop(self._step, ())]
        stats = SchedulerStats(num_running_reqs=self._active)
        return EngineCoreOutputs(outputs=outputs, scheduler_stats=stats, weight_version="0")

    def _output(self, request: Any, sent: int) -> Any:
        from vllm.v1.engine import FinishReason

        total = request.sampling_params.max_tokens
        count = min(total - sent, self._held) if sent else 1
        finished = sent + count >= total or request.request_id in self._gone
        output = self._decoded(count, request.sampling_params.logprobs is not None, not sent)
        output.request_id = request.request_id
        if finished:
            output.finish_reason = FinishReason.LENGTH
            self._active -= 1
        else:
            following = min(total - sent - count, self._held)
            self._due[self._step + following].append((request, sent + count))
        return output

    def _decoded(self, count: int, with_logprobs: bool, is_first: bool) -> Any:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder

        key = (count, with_logprobs, is_first)
        if key not in self._templates:
            self._templates[key] = [MsgpackDecoder(EngineCoreOutputs), _message(*key)]
        decoder, frames = self._templates[key]
        return decoder.decode(frames).outputs[0]

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to end."""

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_async"):
            raise AttributeError(name)

        async def nothing(*args: Any, **kwargs: Any) -> None:
            """Any other call to the engine."""

        return nothing


def _message(count: int, with_logprobs: bool, is_first: bool) -> list[bytes]:
    """The frames that an engine process sends for `count` tokens of one request."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackEncoder

    ids = np.arange(10, 10 + count, dtype=np.int32)
    logprobs = None
    if with_logprobs:
        values = np.linspace(-9, -0.01, count, dtype=np.float32)
        logprobs = LogprobsLists(ids[:, None], values[:, None], np.ones(count, np.int64), None)
    output = EngineCoreOutput("request-id-of-about-this-length", ids.tolist(), new_logprobs=logprobs)
    if is_first:
        output.prefill_stats = PrefillStats()
    return [bytes(frame) for frame in MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output]))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--held", type=int, default=64)
    args = parser.parse_args()
    kwargs = {"enforce-eager": "", "max_model_len": 1024, "block_size": 32, "max_num_seqs": 1024}
    settings = ServerSettings(args.model, "127.0.0.1", args.port, "gloo", kwargs, dtype="float32")
    # vLLM reads variables when it is imported.
    server.prepare_environment(os.environ, settings, 1.0)
    from vllm.v1.engine.core_client import EngineCoreClient

    def make(vllm_config: Any, *_: Any, **__: Any) -> StubEngine:
        vllm_config.cache_config.num_gpu_blocks = 1000
        return StubEngine(args.held)

    EngineCoreClient.make_async_mp_client = staticmethod(make)  # type: ignore[assignment]
    server.serve(settings)


if __name__ == "__main__":
    main()
