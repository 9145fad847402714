"""The adapter for the package verifiers against the real package: rows, rollouts, its rubrics, and what is refused."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers")

from fakes.fake_server import FakeServer
from fakes.scripted_texts import Texts
from transformers import PreTrainedTokenizerFast

from pipelinerl.__main__ import main
from pipelinerl.agents.openai_agent import BlackBox
from pipelinerl.config.task import VerifierConfig
from pipelinerl.domains import verifiers as score
from pipelinerl.domains.verifiers import _rollout, load_problems
from pipelinerl.errors import DomainError, RolloutError
from pipelinerl.grading import open_verifier
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.client import open_session
from pipelinerl.llm.sample_builder import build_samples
from pipelinerl.rollouts import RolloutResult
from pipelinerl.tiny.tokenizer import build_tokenizer

TESTS = Path(__file__).parents[2]
ADDITION = "fakes.verifiers_envs.load_environment"
PUBLIC = "verifiers.envs.integrations.reasoninggym_env.ReasoningGymEnv"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(32)


@pytest.fixture
def texts(tokenizer: PreTrainedTokenizerFast) -> Texts:
    return Texts(tokenizer)


@pytest.fixture
def server(texts: Texts) -> Iterator[FakeServer]:
    with FakeServer(script=texts) as fake:
        fake.version = "0"
        yield fake


@pytest.fixture(autouse=True)
def _environments_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


async def run(problem: dict[str, Any], server: FakeServer, tokenizer: Any) -> RolloutResult:
    llm = TrainableLLM(server.url, "actor", tokenizer, {"max_tokens": 300}, token=server.token, max_retries=0)
    box = BlackBox(_rollout)
    try:
        async with open_session() as session, open_verifier(VerifierConfig(processes=1, memory_mib=4096), []):
            return await box({}, llm, problem, session)
    finally:
        await box.close()


def problem_of(env_id: str = ADDITION, index: int = 0, **settings: Any) -> dict[str, Any]:
    return load_problems(["train"], env_id=env_id, **{"score_timeout_s": 300.0, **settings})[index]


def test_rows_of_both_data_sets_and_a_held_out_part() -> None:
    both = {name: load_problems([name], env_id=ADDITION, env_args={"with_eval": True}) for name in ("train", "test")}
    assert [len(both["train"]), len(both["test"])] == [10, 2]
    kept_out = {name: load_problems([name], env_id=ADDITION, num_test=3) for name in ("train", "test")}
    assert [len(kept_out["train"]), len(kept_out["test"])] == [8, 2]
    answers = [{row["row"]["answer"] for row in rows} for rows in kept_out.values()]
    assert not answers[0] & answers[1]
    first = kept_out["train"][0]
    assert first["row"]["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "0 + 1"}]


def test_signal_handlers_stay_those_of_the_process() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    load_problems(["train"], env_id=ADDITION, env_args={"with_eval": True, "bad": True})
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("score_in", ["process", "worker"])
async def test_a_rollout_is_scored_by_the_rubric(
    score_in: str, server: FakeServer, tokenizer: PreTrainedTokenizerFast, texts: Texts
) -> None:
    problem = problem_of(score_in=score_in)
    for answer, reward, short in (("1", 1.0, 1.0), ("four", 0.0, 0.0)):
        texts.left = [answer]
        result = await run(problem, server, tokenizer)
        assert result.metrics.reward == reward and result.metrics.success == (reward == 1.0)
        assert result.metrics.model_dump()["is_short"] == short
        (sample,) = build_samples(result.training_texts, group_id="g", rollout_id="r")
        assert sample.num_trained_tokens == len(answer) + 1 and sample.reward == reward


async def test_scoring_beside_the_rollout_does_not_wait_while_another_environment_is_made(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, problem = score.environment_of, problem_of(score_in="worker")

    def made_elsewhere(env_id: str, env_args: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread(), "the event loop would wait for the lock"
        return real(env_id, env_args)

    monkeypatch.setattr(score, "environment_of", made_elsewhere)
    texts.left = ["1"]
    assert (await run(problem, server, tokenizer)).metrics.reward == 1.0


@pytest.mark.parametrize("score_in", [pytest.param("process", marks=pytest.mark.slow), "worker"])
async def test_several_turns_are_one_growing_sample(
    score_in: str, server: FakeServer, tokenizer: PreTrainedTokenizerFast, texts: Texts
) -> None:
    texts.left = ["5", "1"]
    result = await run(problem_of("fakes.verifiers_envs.TwoTries", score_in=score_in), server, tokenizer)
    assert result.metrics.reward == pytest.approx(1.03)
    (sample,) = build_samples(result.training_texts, group_id="g", rollout_id="r")
    assert sample.metadata["turns"] == 2 and sample.num_trained_tokens == 4


@pytest.mark.slow
async def test_r1_a_reward_function_that_raises_fails_the_rollout_and_an_answer_without_end_scores_0(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, texts: Texts
) -> None:
    env: dict[str, Any] = {"env_args": {"bad": True}, "num_test": 0}
    texts.left = ["1"]
    with pytest.raises(RolloutError) as caught:
        await run(problem_of(index=6, **env), server, tokenizer)
    assert caught.value.reason == "grader_raised"
    texts.left = ["1"]
    result = await run(problem_of(index=7, **env, score_timeout_s=20.0), server, tokenizer)
    assert (result.metrics.reward, result.metrics.success) == (0.0, False)


@pytest.mark.slow
async def test_a_public_environment_agrees_with_its_own_scorer(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, texts: Texts
) -> None:
    import reasoning_gym

    arguments = {"gym": "leg_counting", "num_train_examples": 3, "num_eval_examples": 2}
    entry = reasoning_gym.create_dataset("leg_counting", size=5, seed=0)[1]
    problem = problem_of(PUBLIC, index=1, env_args=arguments)
    assert problem["row"]["prompt"][-1]["content"] == entry["question"]
    for answer, reward in ((entry["answer"], 1.0), ("-3", 0.0)):
        texts.left = [f"<answer>{answer}</answer>"]
        result = await run(problem, server, tokenizer)
        assert result.metrics.success == (reward == 1.0)
        assert result.metrics.reward == pytest.approx(reward, abs=0.02)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"env_id": "no-such-environment"}, "no-such-environment"),
        ({"env_id": "fakes.no_such.thing"}, "no_such"),
        ({"env_id": "fakes.verifiers_envs.nothing"}, "nothing"),
        ({"env_id": "fakes.verifiers_envs.not_an_environment"}, "int"),
        ({"env_id": ADDITION, "env_args": {"group": True}}, "whole groups"),
        ({"env_id": ADDITION, "env_args": {"colour": "red"}}, "colour"),
        ({"env_id": ADDITION, "score_in": "moon"}, "score_in"),
    ],
)
def test_what_cannot_be_used_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(DomainError, match=words):
        load_problems(["train"], **settings)


@pytest.mark.slow
def test_check_domain() -> None:
    assert main(["check-domain", "verifiers", "+dataset_loader_params.env_args.num_train_examples=20"]) == 0
