"""Reference log-probs from servers: what is sent, what is read, what is refused."""

from __future__ import annotations

import json

import pytest
from fakes.fake_server import FakeServer
from fakes.fake_server import Fault as HTTPFault
from preprocess_groups import group, sample

import pipelinerl.preprocess.reference as reference_module
from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.errors import EndRunError, RolloutError
from pipelinerl.llm.client import Fault, Reply, post
from pipelinerl.preprocess.batcher import GroupScorer, ResumePoint
from pipelinerl.preprocess.reference import ReferenceServers, read_prompt_logprobs
from pipelinerl.records.completion import GENERATE_PATH
from pipelinerl.streams.base import Entry


def answer(token_ids, **changes):
    entries = [None, *({str(t): {"logprob": -t / 10, "rank": 1}, "999": {"logprob": -9.0}} for t in token_ids[1:])]
    return {"prompt_logprobs": entries, **changes}


def test_only_trained_tokens_are_taken():
    s = sample("g/r0/s0")  # tokens 1..5, the last three trained
    assert read_prompt_logprobs(json.dumps(answer(s.input_ids)).encode(), s) == [-0.3, -0.4, -0.5]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"nope", "bad_response"),
        (b"{}", "length_mismatch"),
        (json.dumps(answer([1, 2, 3, 4])).encode(), "length_mismatch"),
        (json.dumps(answer([1, 2, 3, 4, 6])).encode(), "missing_logprobs"),
        (json.dumps({"prompt_logprobs": [None] * 5}).encode(), "missing_logprobs"),
        (json.dumps(answer([1, 2, 3, 4, 5])).replace("-0.5", "-9999.0").encode(), "missing_logprobs"),
    ],
)
def test_faulty_answers_are_refused(content, reason):
    with pytest.raises(RolloutError) as caught:
        read_prompt_logprobs(content, sample("g/r0/s0"))
    assert caught.value.reason == reason


def server(*statuses):
    """A reference server whose first answers have these statuses."""
    fake = FakeServer()
    fake.inject(GENERATE_PATH, *(HTTPFault("status", status) for status in statuses))
    return fake


def servers(*urls, concurrency=64, return_timeout_s=0.0):
    return ReferenceServers(urls, FakeServer().token, concurrency, 300.0, 3, return_timeout_s)


def test_samples_are_scored_with_retries():
    with server(503) as one, server() as two:
        done = servers(one.url, two.url + "/")([sample(f"g/r{i}/s0") for i in range(4)])
    assert [s.ref_logprobs for s in done] == [[-0.5, -0.5, -0.5]] * 4
    assert two.requests[0]["sampling_params"] == {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
    assert len(one.calls) + len(two.calls) == 5


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.CANNOT_CONNECT, Fault.DISCONNECTED])
def test_a_server_that_is_started_again_is_waited_for(monkeypatch, fault):
    monkeypatch.setattr(reference_module, "retry_delay_s", lambda attempt, jitter: 0.0)
    problems = [fault] * 9

    async def away(*args, **kwargs):
        return Reply(problems.pop(0), b"away") if problems else await post(*args, **kwargs)

    monkeypatch.setattr(reference_module, "post", away)
    with server() as one:
        waiting = servers(one.url, return_timeout_s=60.0)
        assert waiting([sample("g/r0/s0")])[0] is not None
        problems[:] = [fault] * 9
        assert servers(one.url)([sample("g/r0/s0")]) == [None]
        problems[:] = [503] * 9  # a server that is there and busy is not waited for so long
        assert waiting([sample("g/r0/s0")]) == [None]


def test_a_refused_sample_fails_alone_and_a_wrong_token_ends_the_run():
    with server(400) as one:
        done = servers(one.url, concurrency=1)([sample("g/r0/s0"), sample("g/r1/s0")])
        assert sum(s is None for s in done) == 1
    with server(401) as one, pytest.raises(EndRunError):
        servers(one.url)([sample("g/r0/s0")])


def test_groups_are_scored_before_the_advantages_and_fails_what_could_not_be_scored():
    def scorer(samples):
        return [None if s.id == "g/r1/s0" else s for s in samples]

    group_scorer = GroupScorer(FinetuneConfig(seq_length=16), ResumePoint(), scorer)
    items = [sample("g/r0/s0", 1.0), sample("g/r1/s0", 0.5), sample("g/r2/s0", 0.0), sample("g/r3/s0", 0.0, output=60)]
    ((ready, rejections),) = group_scorer.score([Entry(7, group("g", samples=items))])
    assert ready.offset == 7
    assert [(r.sample.id, r.fate, r.reason) for r in rejections] == [
        ("g/r1/s0", "failed", "no_ref_logprobs"),
        ("g/r3/s0", "filtered", "longer_than_seq_length"),
    ]
    assert [item.advantage for item in ready.record.samples] == [1.0, -0.5]
