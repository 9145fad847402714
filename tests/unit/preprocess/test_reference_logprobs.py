"""Reference log-probs from servers: what is sent, what is read, what is refused."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from aiohttp import web
from preprocess_groups import group, sample

import pipelinerl.preprocess.reference as reference_module
from pipelinerl.config.finetune import FinetuneConfig
from pipelinerl.errors import EndRunError, RolloutError
from pipelinerl.llm.client import Fault, Reply, post
from pipelinerl.preprocess.batcher import GroupScorer, ResumePoint
from pipelinerl.preprocess.reference import ReferenceServers, read_prompt_logprobs
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


class Server:
    """A reference server on a random port; `statuses` are answered first, then 200."""

    def __init__(self, statuses=()):
        self.statuses = list(statuses)
        self.requests = []
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        self.thread = threading.Thread(target=self._main, args=(started,), daemon=True)
        self.thread.start()
        assert started.wait(60)

    def _main(self, started):
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._start())
        started.set()
        self.loop.run_forever()
        self.loop.run_until_complete(self.runner.cleanup())

    async def _start(self):
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def _answer(self, request):
        body = await request.json()
        self.requests.append((request.headers.get("Authorization"), body))
        if self.statuses:
            return web.Response(status=self.statuses.pop(0), text="no")
        return web.json_response(answer(body["token_ids"]))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)


def servers(*urls, concurrency=64, return_timeout_s=0.0):
    return ReferenceServers(urls, "secret", concurrency, 300.0, 3, return_timeout_s)


def test_samples_are_scored_with_retries():
    with Server([503]) as one, Server() as two:
        score = servers(one.url, two.url + "/")
        done = score([sample(f"g/r{i}/s0") for i in range(4)])
    assert [s.ref_logprobs for s in done] == [[-0.3, -0.4, -0.5]] * 4
    authorization, body = two.requests[0]
    assert authorization == "Bearer secret"
    assert body["sampling_params"] == {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
    assert len(one.requests) + len(two.requests) == 5


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.CANNOT_CONNECT, Fault.DISCONNECTED])
def test_a_server_that_is_started_again_is_waited_for(monkeypatch, fault):
    monkeypatch.setattr(reference_module, "retry_delay_s", lambda attempt, jitter: 0.0)
    problems = [fault] * 9

    async def away(*args, **kwargs):
        return Reply(problems.pop(0), b"away") if problems else await post(*args, **kwargs)

    monkeypatch.setattr(reference_module, "post", away)
    with Server() as server:
        waiting = servers(server.url, return_timeout_s=60.0)
        assert waiting([sample("g/r0/s0")])[0] is not None
        problems[:] = [fault] * 9
        assert servers(server.url)([sample("g/r0/s0")]) == [None]
        problems[:] = [503] * 9  # a server that is there and busy is not waited for so long
        assert waiting([sample("g/r0/s0")]) == [None]


def test_a_refused_sample_fails_alone_and_a_wrong_token_ends_the_run():
    with Server([400]) as server:
        done = servers(server.url, concurrency=1)([sample("g/r0/s0"), sample("g/r1/s0")])
        assert sum(s is None for s in done) == 1
    with Server([401]) as server, pytest.raises(EndRunError):
        servers(server.url)([sample("g/r0/s0")])


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
