"""vLLM's real asynchronous scheduler, ours around it, with made-up model outputs: batches lose and change nothing.

Servers on a CPU do not use it, so this is where it is tested without a GPU.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from fakes.random_model import save_random_model

pytest.importorskip("vllm")
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from pipelinerl.inference.engine import EpochAsyncScheduler, salt_for_epoch
from pipelinerl.inference.fast_output import HELD_TOKENS_VARIABLE

LENGTHS = {"one": 1, "short": 5, "long": 30, "streamed": 12}
BLOCKS = 100


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = save_random_model(tmp_path_factory.mktemp("async_scheduler") / "model", tied=True)
    engine = EngineArgs(model=str(model), max_model_len=256, max_num_seqs=8, block_size=32, enable_prefix_caching=False)
    made = engine.create_engine_config()
    made.scheduler_config.async_scheduling = True  # refused on a CPU by the platform, not by the scheduler
    made.cache_config.num_gpu_blocks = BLOCKS
    return made


class Engine:
    """Two steps in flight, as in the engine's loop; the token and the log-prob of a request count up."""

    def __init__(self, config: Any) -> None:
        spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
        caches = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        manager = StructuredOutputManager(config)
        self.scheduler = EpochAsyncScheduler(config, caches, manager, block_size=32, log_stats=True)
        self.sent: dict[str, list[EngineCoreOutput]] = {name: [] for name in LENGTHS}
        self._sampled = dict.fromkeys(LENGTHS, 0)
        self._in_flight: deque[Any] = deque()
        for name, length in LENGTHS.items():
            kind = RequestOutputKind.DELTA if name == "streamed" else RequestOutputKind.FINAL_ONLY
            params = SamplingParams(
                max_tokens=length, logprobs=None if name == "short" else 0, ignore_eos=True, output_kind=kind
            )
            self.scheduler.add_request(Request(name, list(range(5, 25)), params, None))

    def step(self) -> None:
        if self.scheduler.has_requests():
            self._in_flight.append(self.scheduler.schedule())
            if len(self._in_flight) < 2:
                return
        if self._in_flight:
            self._finish(self._in_flight.popleft())

    def run(self) -> None:
        while self.scheduler.has_requests() or self._in_flight:
            self.step()

    def _finish(self, scheduled: Any) -> None:
        names = list(scheduled.num_scheduled_tokens)
        numbers = []
        for name in names:
            self._sampled[name] += 1
            numbers.append(self._sampled[name])
        ids = np.array(numbers, np.int32).reshape(-1, 1)
        logprobs = LogprobsLists(ids, -ids.astype(np.float32) / 7, np.ones(len(ids), np.int64), None) if names else None
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[number] for number in numbers],
            logprobs=logprobs,
            prompt_logprobs_dict={},
        )
        for batch in self.scheduler.update_from_output(scheduled, output).values():
            frames = MsgpackEncoder().encode(batch)
            for each in MsgpackDecoder(EngineCoreOutputs).decode([bytes(frame) for frame in frames]).outputs:
                self.sent[each.request_id].append(each)


def told(outputs: list[EngineCoreOutput]) -> tuple[list[int], list[float], list[int], str]:
    """Ids, log-probs, the ids that these are of, and the ending."""
    ids = [token for output in outputs for token in output.new_token_ids]
    parts = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    values = [float(value) for part in parts for value in part.logprobs[:, 0]]
    named = [int(token) for part in parts for token in part.logprob_token_ids[:, 0]]
    return ids, values, named, str(outputs[-1].finish_reason)


@pytest.mark.parametrize("held", ["0", "1", "4", "64"])
def test_every_token_arrives_once_with_its_own_logprob(config: Any, monkeypatch: pytest.MonkeyPatch, held: str) -> None:
    monkeypatch.setenv(HELD_TOKENS_VARIABLE, held)
    engine = Engine(config)
    engine.run()
    for name, length in LENGTHS.items():
        numbers = list(range(1, length + 1))
        expected = [] if name == "short" else (-np.array(numbers, np.float32) / 7).tolist()
        assert told(engine.sent[name]) == (numbers, expected, numbers if expected else [], "length"), name
    messages = {name: len(outputs) for name, outputs in engine.sent.items()}
    if held in ("0", "1"):
        assert messages == LENGTHS
    else:
        assert messages["streamed"] == 12  # each at once
        assert messages["long"] == {"4": 1 + 8, "64": 2}[held]  # the first, then batches; 29 = 7 * 4 + 1


def test_a_pause_lets_everything_out_before_it_ends(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HELD_TOKENS_VARIABLE, "64")
    engine = Engine(config)
    for _ in range(12):
        engine.step()
    assert len(engine.sent["long"]) == 1  # all but the first token are held
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(2):
        engine.step()
    shipped = told(engine.sent["long"])[0]
    assert len(shipped) == engine._sampled["long"] > 10
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    numbers = list(range(1, 31))
    assert told(engine.sent["long"]) == (numbers, (-np.array(numbers, np.float32) / 7).tolist(), numbers, "length")


@pytest.mark.parametrize(
    ("salt", "epoch", "expected"),
    [
        (None, 0, "weights-epoch-0:"),
        ("mine", 3, "weights-epoch-3:mine"),
        ("weights-epoch-3:mine", 4, "weights-epoch-4:mine"),
        ("weights-epoch-12:", 13, "weights-epoch-13:"),
    ],
)
def test_salts_keep_the_callers_part(salt: str | None, epoch: int, expected: str) -> None:
    assert salt_for_epoch(salt, epoch) == expected
