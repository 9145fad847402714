"""Faults of every kind of tensor between trainer and server, with vLLM's own layers and loaders: each is found at once.

Without a server by what arrives and is loaded alone; with a server also by what the model computes, as in
`unit/finetune/test_injected_faults`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fakes.family_trial import IDS, Trial, WithoutSome, last_of_each_kind
from fakes.limits import PROCESS_LIMIT_S
from fakes.updated_server import connect
from fakes.vllm_process import VLLMProcess

from pipelinerl.errors import WeightSyncError
from pipelinerl.finetune.probe import PROBE_TOLERANCE
from pipelinerl.weights.buffers import NamedTensors, TensorMeta, WeightSource
from pipelinerl.weights.sync import ProbeSequence

TESTS = Path(__file__).parents[1]
#: Embeddings, heads, norms, queries to outputs and MLPs; routers with a bias and experts; sinks and experts in one
#: tensor; convolutions, decays and steps; a bias that is all that its layer has.
KINDS = ["qwen3", "glm4_moe", "gpt_oss", "qwen3_next", "mamba2", "exaone_moe"]
FOUND_BY = {
    "left out": "1 tensors are left out: {}",
    "ignored": "IncompleteUpdateError: the server's model ignored 1 of the tensors: {}",
    "zeroed": "(all zeros)",
    "swapped": "arrived damaged",
    "of an earlier pass": "arrived damaged",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_w1_every_fault_of_every_kind_of_tensor_is_found(family: str, tmp_path: Path) -> None:
    environ = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    environ["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [sys.executable, str(TESTS / "fakes" / "loaded_model.py"), family, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=PROCESS_LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["kinds"]) >= 12
    for fault, words in FOUND_BY.items():
        found = result["found"][fault]
        assert [name for name in result["kinds"] if words.format(name) not in found.get(name, "")] == [], fault


class WithOther:
    """A source that sends other values for one tensor."""

    def __init__(self, source: WeightSource, name: str, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._source, self._name, self._other = source, name, other

    def metadata(self) -> list[TensorMeta]:
        return self._source.metadata()

    def buckets(self) -> Iterator[NamedTensors]:
        for bucket in self._source.buckets():
            yield [(name, self._other(tensor) if name == self._name else tensor) for name, tensor in bucket]


def shuffled(tensor: torch.Tensor) -> torch.Tensor:
    """As of another layer."""
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    return noise.mul(tensor.std()).add(tensor.mean())


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("family", ["qwen3", "glm4_moe"])
def test_w1_a_server_is_refused_after_every_fault_and_the_next_update_repairs_it(family: str, tmp_path: Path) -> None:
    trial = Trial(family, tmp_path)
    skipped = tmp_path / "skipped"
    skipped.touch()
    environ = {**os.environ, "PIPELINERL_TEST_SKIPPED": str(skipped), "PYTHONPATH": str(TESTS / "fakes/in_place_site")}
    source = trial.backend.weight_source(torch.float32)
    expected = [ProbeSequence(ids, own) for ids, own in zip(IDS, trial.logprobs(), strict=True)]
    kwargs = {"max_model_len": 128}
    with VLLMProcess(trial.export(), tmp_path / "server.log", kwargs, environ=environ) as server:

        def publish(sent: WeightSource) -> tuple[str | None, float]:
            """Why the server has not got it; how far its log-probs are off."""
            with connect(server) as publisher:
                failed = publisher.publish(1, sent).failed.get("tiny")
                return failed, 0.0 if failed else publisher.probe(expected, "tiny").mean_abs_diff

        for name in last_of_each_kind([meta.name for meta in source.metadata()]):
            with pytest.raises(WeightSyncError, match=f"left out: {name}"):
                publish(WithoutSome(source, [name]))
            for other in (torch.zeros_like, shuffled):
                assert publish(WithOther(source, name, other))[1] > PROBE_TOLERANCE["float32"], (name, other)
            skipped.write_text(name)
            reason, _ = publish(source)
            assert f"ignored 1 of the tensors: {name}" in str(reason)
            skipped.write_text("")
            assert publish(source) == (None, pytest.approx(0.0, abs=1e-4))
