"""The command `view`: what its server answers about a recorded run, to whom, and that texts in it are inert."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fakes.recorded_run import RecordedRun
from fakes.short_sample import evaluation_result, evaluation_sample, fate_record, rollout_summary, step_done
from fastapi.testclient import TestClient

from pipelinerl.__main__ import main
from pipelinerl.analysis.select import StoredGroup
from pipelinerl.analysis.view import export, watched_run
from pipelinerl.analysis.view.answers import MAX_POINTS, inert
from pipelinerl.analysis.view.rollout_index import Filter
from pipelinerl.analysis.view.view_app import PAGE_MODULES, make_app, page_file
from pipelinerl.analysis.view.view_command import names_of
from pipelinerl.analysis.view.watched_run import WatchedRun
from pipelinerl.records import (
    EvaluationResult,
    EvaluationRollout,
    FateRecord,
    MetricRecord,
    TokenRatios,
    TrainerMessage,
    TrainerStarted,
    TrainingBatch,
)
from pipelinerl.records.sample import Array
from pipelinerl.streams.base import ACTOR_TOPIC
from pipelinerl.streams.redis_server import REDIS_URL_KEY, RedisServer

GROUPS = 40
TOKEN = "secret"
ADDRESS = "http://127.0.0.1:8765"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(1)</script>\x1b[31m\u202eevil\x07"


def wait_until(holds: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def in_group(run: RecordedRun, n: int, **fields: Any) -> Any:
    return run.plain_groups(1, first=n, **fields)[0]


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts_in([*value, *value.values()])
    elif isinstance(value, list):
        for each in value:
            yield from texts_in(each)


def evaluation(name: str, **fields: Any) -> EvaluationRollout:
    values: dict[str, Any] = {
        "id": name,
        "group_id": "e",
        "problem_id": "p",
        "dataset_name": "test",
        "problem": "{}",
        "due_version": 0,
        "is_final": False,
    }
    return EvaluationRollout(**{**values, **fields})


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    """Groups `0-0` to `0-39` in many small files. Step 1 trained `0-0`; `0-1` was filtered."""
    run = RecordedRun(tmp_path, streams={"shard_bytes": 1500})
    run.write(*run.plain_groups(GROUPS))
    first = in_group(run, 0)
    samples = [msgspec.structs.replace(sample, advantage=0.5) for sample in first.samples]
    batch = TrainingBatch(id="b", step=1, samples=samples, group_ids=["0-0"], plan=[[[0, 1]]], actor_offset=1)
    run.write(batch, topic="training_data", instance="preprocessor_0", kind=TrainingBatch)
    run.write(
        TrainerStarted(step=0, data_offset=0, time=1),
        step_done(1, 2),
        topic="trainer",
        instance="finetune_0",
        kind=TrainerMessage,
    )
    own: dict[str, Any] = {"version": 1, "group_id": "0-0", "output_tokens": 30, "num_rollouts": 2}
    trained = fate_record("trained", "0-0/r0/s0", "0-0/r1/s0", **own)
    run.write(trained, topic="fates", instance="finetune_0", kind=FateRecord)
    own = {"reason": "zero_advantage", "group_id": "0-1", "output_tokens": 10, "num_rollouts": 2}
    filtered = fate_record("filtered", "0-1/r0/s0", **own)
    run.write(filtered, topic="fates", instance="preprocessor_0", kind=FateRecord)
    values = {"finetune/reward_mean": 0.25, "finetune/step_s": 36.0, "finetune/samples": 2.0}
    run.write(
        MetricRecord(source="finetune_0", step=1, time=2, values=values),
        topic="metrics",
        instance="finetune_0",
        kind=MetricRecord,
    )
    return run


@pytest.fixture
def watched(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedRun]:
    monkeypatch.setattr("pipelinerl.analysis.view.watched_run.HEAD_START_S", 0)
    watched = WatchedRun(run.root).start()
    wait_until(lambda: watched.index["training"].num_rollouts >= 2 * GROUPS and watched.read(lambda s: s.fates))
    yield watched
    watched.close()


@pytest.fixture
def client(watched: WatchedRun) -> TestClient:
    client = TestClient(make_app([watched], TOKEN), base_url=ADDRESS)
    assert client.get(f"/?token={TOKEN}").status_code == 200
    return client


def rewards(client: TestClient, **parameters: Any) -> list[float]:
    answer = client.get("/api/runs/0/rollouts", params=parameters)
    assert answer.status_code == 200, answer.text
    return [row["reward"] for row in answer.json()["rows"]]


def test_only_who_has_the_token_gets_an_answer(watched: WatchedRun) -> None:
    client = TestClient(make_app([watched], TOKEN), base_url=ADDRESS)
    for path in ("/", "/page/main.js", "/api/runs", "/?token=other", "/docs", "/openapi.json"):
        assert client.get(path).status_code == 403, path
    first = client.get(f"/?token={TOKEN}", follow_redirects=False)
    assert (first.status_code, first.headers["location"]) == (303, "/")
    assert "HttpOnly" in first.headers["set-cookie"] and "SameSite=strict" in first.headers["set-cookie"]
    assert client.get("/api/runs").json()[0]["name"] == "run"
    assert client.get("/api/runs", headers={"host": "attacker.example:8765"}).status_code == 421
    for host in ("localhost:1", "127.0.0.1:1", "[::1]:1"):
        assert client.get("/", headers={"host": host}, follow_redirects=False).status_code in (200, 403)
    assert client.get("/page/../answers.py").status_code == 404
    assert client.post("/api/runs").status_code == 405


def test_a_machine_is_asked_for_by_all_its_names_if_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Box")
    monkeypatch.setattr("socket.getfqdn", lambda: "box.lab.example")
    assert names_of("0.0.0.0") == {"0.0.0.0", "box", "box.local", "box.lab.example"}
    assert "box.lab.example" not in names_of("127.0.0.1"), "no name server is asked"


def test_the_page_may_load_nothing_but_itself(client: TestClient) -> None:
    policy = client.get("/").headers["content-security-policy"].split("; ")
    assert policy[:2] == ["default-src 'none'", "script-src 'self'"]
    assert not any("unsafe" in rule or "http" in rule for rule in policy)
    for name in (*(f"{module}.js" for module in PAGE_MODULES), "style.css", "uPlot.min.css", "uPlot.iife.min.js"):
        assert client.get(f"/page/{name}").status_code == 200
        assert name.startswith("uPlot") or "innerHTML" not in page_file(name)


def test_filters_hold_together_over_all_files(client: TestClient, run: RecordedRun) -> None:
    newest = [float(n * sign) for n in range(GROUPS - 1, -1, -1) for sign in (-1, 1)]
    assert rewards(client, count=2000) == newest
    assert rewards(client, count=3, skip=2) == newest[2:5]
    assert rewards(client, version_from=5, version_to=6) == [-6.0, 6.0, -5.0, 5.0]
    assert rewards(client, version_from=38, success="true") == [39.0, 38.0]
    assert rewards(client, reward_from=-2, reward_to=-1) == [-2.0, -1.0]
    assert rewards(client, group="0-7") == rewards(client, problem="p-0-7") == [-7.0, 7.0]
    assert rewards(client, dataset="train", order="best", count=2) == [39.0, 38.0]
    assert rewards(client, order="worst", count=2, skip=1) == [-38.0, -37.0]
    assert rewards(client, dataset="other") == rewards(client, cut="true") == rewards(client, failed="true") == []
    assert rewards(client, step_from=1, step_to=1) == [-0.0, 0.0]
    assert rewards(client, step_from=2) == []
    assert rewards(client, text="Q12") == [-12.0, 12.0]
    for wrong in ({"version_from": -1}, {"order": "other"}, {"count": 10**9}, {"reward_from": "x"}):
        assert client.get("/api/runs/0/rollouts", params=wrong).status_code == 422


def test_cut_and_failed_rollouts_are_found(client: TestClient, run: RecordedRun, watched: WatchedRun) -> None:
    cut = run.sample("0-90/r0/s0", [("q", False), ("a", True)], [90], finished=False, reward=9.0)
    run.write(run.group("0-90", [cut], dataset="new", failed_rollouts=3))
    wait_until(lambda: watched.index["training"].num_rollouts == 2 * GROUPS + 1, 2.0)
    for wanted in ({"cut": "true"}, {"failed": "true"}, {"dataset": "new"}):
        assert rewards(client, **wanted) == [9.0]


def test_a_group_has_its_advantages_fates_and_step(client: TestClient) -> None:
    group = client.get("/api/runs/0/group?offset=0").json()
    assert (group["group_id"], group["problem_id"], group["step"]) == ("0-0", "p-0-0", 1)
    first = group["rollouts"][0]["samples"][0]
    assert (first["advantage"], first["fate"]) == (0.5, "trained in step 1")
    assert [turn["kind"] for turn in first["turns"]] == ["prompt", "generated"]
    other = client.get("/api/runs/0/group?offset=1").json()
    assert other["step"] is None
    assert [each["samples"][0]["fate"] for each in other["rollouts"]] == ["filtered: zero_advantage", "pending"]
    assert client.get("/api/runs/0/group?offset=999").status_code == 404
    found = client.get("/api/runs/0/previews?at=3.1,2.0").json()
    assert [(each["rollout_id"], each["text"]) for each in found] == [
        ("0-3/r1", "3.1<|end|>"),
        ("0-2/r0", "2.0<|end|>"),
    ]


def test_tokens_have_the_importance_ratio_that_a_rank_recorded(client: TestClient, run: RecordedRun) -> None:
    """Of the start whose step counts, from whichever rank trained the sample."""
    (sample,) = (each for each in in_group(run, 0).samples if each.id == "0-0/r1/s0")
    count = sample.num_trained_tokens
    assert client.get("/api/runs/0/tokens?offset=0&place=1").json()["importance"] == [None] * len(sample.input_ids)
    own = [math.log(2.0), *[0.0] * (count - 2), -math.log(2.0)]
    for rank, samples, values in (
        ("finetune_0", ["0-0/r0/s0"], [[9.0]]),
        ("finetune_1", ["other", "0-0/r1/s0", "more"], [[9.0, 9.0], own, [9.0]]),
    ):
        flat = np.array([value for each in values for value in each], "<f2")
        record = TokenRatios(
            step=1,
            sample_ids=samples,
            lengths=[len(each) for each in values],
            log_ratios=Array("<f2", [len(flat)], flat.tobytes()),
        )
        # Around it are records of another step and of another start.
        earlier, later = (msgspec.structs.replace(record, **fields) for fields in ({"step": 0}, {"incarnation": 1}))
        run.write(earlier, record, later, topic="token_ratios", instance=rank, kind=TokenRatios)
    found = client.get("/api/runs/0/tokens?offset=0&place=1").json()["importance"]
    shown = [2.0, *[1.0] * (count - 2), 0.5]
    assert found == [None] * (len(sample.input_ids) - count) + [pytest.approx(value, abs=1e-3) for value in shown]


def test_an_importance_ratio_is_found_without_a_walk_through_the_steps(watched: WatchedRun, run: RecordedRun) -> None:
    """Start 0 recorded nothing up to step 100 and ended after 600; start 1 trained on from 500, `s0` on rank 1."""
    done = [(start, step) for start, steps in ((0, range(101, 601)), (1, range(501, 1001))) for step in steps]
    reports = [step_done(step, incarnation=start) for start, step in done]
    started = TrainerStarted(step=500, incarnation=1, data_offset=0, time=1)
    run.write(*reports[:500], started, *reports[500:], topic="trainer", instance="finetune_0", kind=TrainerMessage)
    for rank, name in enumerate(("other", "s0")):
        records = []
        plain = TokenRatios(step=0, sample_ids=[name], lengths=[1], log_ratios=Array("<f2", [1], b""))
        for start, step in done:
            ratios = Array("<f2", [1], np.array([start + step / 1024], "<f2").tobytes())
            records.append(msgspec.structs.replace(plain, step=step, incarnation=start, log_ratios=ratios))
        run.write(*records, topic="token_ratios", instance=f"finetune_{rank}", kind=TokenRatios)
    wait_until(lambda: watched.read(lambda state: state.steps) == 1000)
    read: list[int] = []
    record = watched.record
    watched.record = lambda *place: read.append(place[-1]) or record(*place)  # type: ignore[method-assign,func-returns-value]
    steps = {101: 101, 500: 500, 501: 1525, 1000: 2024, 100: None, 1001: None}
    found = {step: watched.log_ratios(step, "s0") for step in steps}
    assert found == {step: [] if value is None else [value / 1024] for step, value in steps.items()}
    assert len(read) <= len(steps) * 2 * 22
    assert watched.log_ratios(501, "missing") == []


def test_tokens_say_where_an_update_crossed_the_sequence(client: TestClient, run: RecordedRun) -> None:
    parts = [("question", False), ("one ", True), ("given", False), ("two", True)]
    sample = run.sample("0-91/r0/s0", parts, [3, 5], reward=1.0)
    run.write(run.group("0-91", [sample]))
    wait_until(lambda: client.get("/api/runs/0/rollouts?group=0-91").json()["total"] == 1, 2.0)
    answer = client.get(f"/api/runs/0/tokens?offset={GROUPS}&place=0").json()
    assert "".join(answer["texts"]) == "questionone giventwo"
    lengths = [len(run.ids(text)) for text, _ in parts]
    versions = [None] * lengths[0] + [3] * lengths[1] + [None] * lengths[2] + [5] * lengths[3]
    assert answer["versions"] == versions
    assert answer["logprobs"] == [None if version is None else -0.5 for version in versions]
    assert client.get(f"/api/runs/0/tokens?offset={GROUPS}&place=0&sample=1").status_code == 404


@pytest.mark.parametrize(
    "question",
    ["previews?at=0.-1", "previews?at=-1.0", "previews?at=0", f"previews?at={'0.0,' * 200}0.0", "group?offset=-1",
     f"tokens?offset=0&place={10**20}"],
)  # fmt: skip
def test_places_that_cannot_be_are_refused(client: TestClient, question: str) -> None:
    assert client.get(f"/api/runs/0/{question}").status_code == 422


def test_previews_read_a_record_once_and_keep_the_order(client: TestClient, watched: WatchedRun) -> None:
    read: list[int] = []
    record = watched.record
    watched.record = lambda *place: read.append(place[-1]) or record(*place)  # type: ignore[method-assign,func-returns-value]
    places = ["7.1", "3.0", "7.0", "9999.0", "3.0"]
    found = client.get(f"/api/runs/0/previews?at={','.join(places)}").json()
    assert [f"{each['offset']}.{each['place']}" for each in found] == ["7.1", "3.0", "7.0", "3.0"]
    assert [each["rollout_id"] for each in found] == ["0-7/r1", "0-3/r0", "0-7/r0", "0-3/r0"]
    assert read == [3, 7, 9999]


def test_feeds_wait_for_no_heartbeats_and_counters_are_copied_while_they_wait(
    client: TestClient, watched: WatchedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    status_of = watched_run.status_of
    seen: list[int] = []

    def slow(*arguments: Any) -> Any:
        feed = threading.Thread(target=lambda: seen.append(watched.changes), daemon=True)
        feed.start()
        feed.join(10)
        return status_of(*arguments)

    class Reasons(dict[Any, int]):
        """Is read by whoever holds the lock alone."""

        def __iter__(self) -> Iterator[Any]:
            assert watched._lock._is_owned()  # type: ignore[attr-defined]
            return super().__iter__()

        keys = __iter__  # type: ignore[assignment]

    monkeypatch.setattr(watched_run, "status_of", slow)
    watched._status, watched.reasons = None, Reasons(watched.reasons)  # type: ignore[assignment]
    answer = client.get("/api/runs/0/overview")
    assert answer.json()["reasons"] == [{"fate": "filtered", "reason": "zero_advantage", "count": 2}]
    assert len(seen) == 1


def test_the_overview_adds_up(client: TestClient) -> None:
    run = client.get("/api/runs/0/overview").json()
    assert (run["step"], run["fates"], run["fate_tokens"]) == (
        1,
        {"trained": 2, "filtered": 2},
        {"trained": 30, "filtered": 10},
    )
    assert run["goodput"] == 0.75
    assert run["reasons"] == [{"fate": "filtered", "reason": "zero_advantage", "count": 2}]
    curves = client.get("/api/runs/0/curves?names=reward,success").json()
    assert curves == {"steps": [1], "hours": [0.01], "samples": [2.0], "series": {"reward": [0.25], "success": [None]}}


def test_a_long_curve_is_averaged(run: RecordedRun, client: TestClient, watched: WatchedRun) -> None:
    steps = 2 * MAX_POINTS
    done = [step_done(step) for step in range(2, steps + 1)]
    run.write(*done, topic="trainer", instance="finetune_0", kind=TrainerMessage)
    values = [MetricRecord(source="finetune_0", step=n, time=n, values={"x": float(n)}) for n in range(1, steps + 1)]
    run.write(*values, topic="metrics", instance="finetune_0", kind=MetricRecord)
    wait_until(lambda: watched.read(lambda state: len(state.curve(("x",)))) == steps)
    curves = client.get("/api/runs/0/curves?names=x").json()
    assert (len(curves["steps"]), curves["steps"][:2], curves["series"]["x"][:2]) == (MAX_POINTS, [2, 4], [1.5, 3.5])


def test_rollouts_of_evaluations_with_their_failures(client: TestClient, run: RecordedRun, watched: WatchedRun) -> None:
    sample = evaluation_sample("e/r0/s0", run.ids("q"), run.ids("a"))
    rollouts = [
        evaluation("e/r0", samples=[sample], summary=rollout_summary(), due_version=4),
        evaluation("e/r1", failure="timeout", message="took too long", due_version=4),
    ]
    run.write(*rollouts, topic="evaluation_rollouts", kind=EvaluationRollout)
    result = evaluation_result(4, 1.0)
    run.write(result, topic="evaluation", kind=EvaluationResult)
    wait_until(lambda: watched.index["evaluation"].num_rollouts == 2 and watched.evaluations.made, 2.0)
    assert rewards(client, source="evaluation") == [None, 1.0]
    assert rewards(client, source="evaluation", failure="timeout") == [None]
    assert rewards(client, source="evaluation", success="true", version_from=4) == [1.0]
    failed = client.get("/api/runs/0/group?source=evaluation&offset=1").json()["rollouts"][0]
    assert (failed["failure"], failed["message"], failed["has_result"]) == ("timeout", "took too long", True)
    assert client.get("/api/runs/0/tokens?source=evaluation&offset=0&place=0").json()["texts"] == ["q", "a"]


def test_texts_are_inert(client: TestClient, run: RecordedRun, watched: WatchedRun) -> None:
    sample = run.sample(
        "0-92/r0/s0", [(HOSTILE, False), ("a", True)], metadata={HOSTILE: [HOSTILE]}, finish_reason=HOSTILE
    )
    run.write(run.group("0-92", [sample], dataset=HOSTILE, problem_id=HOSTILE))
    wait_until(lambda: watched.index["training"].num_rollouts == 2 * GROUPS + 1, 2.0)
    paths = (
        "overview",
        f"group?offset={GROUPS}",
        f"tokens?offset={GROUPS}&place=0",
        f"previews?at={GROUPS}.0",
        "rollouts?count=1",
    )
    for path in paths:
        answer = client.get(f"/api/runs/0/{path}")
        assert answer.headers["content-type"] == "application/json"
        assert all(text.replace("\n", "").isprintable() for text in texts_in(answer.json())), path


def test_keys_and_lone_surrogates_are_inert_too() -> None:
    assert inert({"\x1b": ["\ud800", 1, None, ("\u202e",)]}) == {"\\x1b": ["\\ud800", 1, None, ["\\u202e"]]}


def test_a_damaged_stream_is_named_and_the_rest_is_shown(run: RecordedRun) -> None:
    file = next((run.root / "streams" / "metrics" / "finetune_0" / "0").glob("*.jsonl"))
    file.write_bytes(b"{}\n")
    watched = WatchedRun(run.root).start()
    client = TestClient(make_app([watched], TOKEN), base_url=ADDRESS)
    client.get(f"/?token={TOKEN}")
    wait_until(lambda: watched.faults and watched.index["training"].num_rollouts == 2 * GROUPS)
    faults = client.get("/api/runs/0/overview").json()["faults"]
    assert [each["stream"] for each in faults] == ["metrics/finetune_0"]
    watched.close()


def test_no_name_stands_in_two_modules_which_are_one_script_in_an_exported_file() -> None:
    pattern = re.compile(r"^(?:export )?(?:async )?(?:function|const|class|let) (\w+)", re.MULTILINE)
    names = [name for module in PAGE_MODULES for name in pattern.findall(page_file(f"{module}.js"))]
    assert len(names) > 50 and len(names) == len(set(names))


def test_the_exported_file_holds_chosen_rollouts_and_is_inert(run: RecordedRun, tmp_path: Path) -> None:
    sample = run.sample("0-93/r0/s0", [("</script><script>alert(1)</script>", False), ("a", True)])
    run.write(run.group("0-93", [sample]))
    file = tmp_path / "run.html"
    assert main(["view", str(run.root), "--export", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert len(text) < 5_000_000
    assert text.count("</script>") == text.count("<script") == 3
    assert "0-93/r0" in text and "0-39/r0" in text and "0-20/r0" not in text
    assert not re.search(r"\b(import|export) [{\w]", text.split('"exported">')[1].split("</script>", 2)[2])
    assert main(["view", str(run.root), "--export", str(tmp_path / "run.html" / "x")]) == 2


def test_curves_leave_room_for_rollouts_in_an_exported_file(
    run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 120
    done = [step_done(step) for step in range(2, steps + 1)]
    run.write(*done, topic="trainer", instance="finetune_0", kind=TrainerMessage)
    names = ["actor/server_idle_s_0", "finetune/ess", *(f"actor/own_{number}" for number in range(500))]
    values = [
        MetricRecord(source="finetune_0", step=n, time=n, values={name: n / 7 for name in names})
        for n in range(1, steps + 1)
    ]
    run.write(*values, topic="metrics", instance="finetune_0", kind=MetricRecord)
    file = tmp_path / "run.html"
    monkeypatch.setattr(export, "MAX_BYTES", 350_000)
    assert main(["view", str(run.root), "--export", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert len(text.encode()) <= 350_000
    answers = json.loads(text.split('id="exported">')[1].split("</script>")[0])["answers"]
    curves = answers["/api/runs/0/curves"]
    assert 0 < len(curves["steps"]) <= 50
    assert {"reward", "finetune/ess", "actor/server_idle_s_0"} <= curves["series"].keys()
    assert answers["/api/runs/0/metrics"] == list(curves["series"]) and len(curves["series"]) < 400
    assert answers["/api/runs/0/rollouts?source=training"]["total"] > 10


@pytest.mark.slow
def test_an_ended_run_on_its_own_redis_server(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, streams={"backend": "redis"})
    with RedisServer(run.root / "redis", run.config.streams) as server:
        run.environ = {REDIS_URL_KEY: server.url}
        run.write(*run.plain_groups(300))
    watched = WatchedRun(run.root)
    watched.read_all()
    hits, total = watched.index["training"].find(Filter(problem="p-0-7"), "newest", 300, 0, 9)
    assert (total, [hit.offset for hit in hits], watched.faults) == (2, [7, 7], {})
    assert watched.record(ACTOR_TOPIC, "actor_0", StoredGroup, 7).id == "0-7"
    watched.close()


def test_a_wrong_folder_or_address_is_refused(tmp_path: Path, run: RecordedRun) -> None:
    assert main(["view", str(tmp_path / "nothing")]) == 2
    assert main(["view", str(run.root), "--host", "256.0.0.1"]) == 2
