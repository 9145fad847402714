"""Mathematics with a Python tool: what is run, what the model sees of it, and what is graded and trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fakes.fake_server import FakeServer
from fakes.scripted_texts import Texts, chat_tokenizer

from pipelinerl.config.compose import compose
from pipelinerl.config.load import to_dictconfig
from pipelinerl.domains import tir
from pipelinerl.errors import DomainError
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.client import open_session
from pipelinerl.rollouts import RolloutResult
from pipelinerl.sandbox.programs import ProgramRun

PROBLEM = {"dataset": "train", "task": "What is 6 * 7?", "answer": "42", "max_programs": 2, "max_output_characters": 40}
BLOCK = "I compute.\n```python\nprint(6 * 7)\n```\n"
TOOL_CALL = '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>'


class Bench:
    """A server with scripted answers, and a sandbox that notes the programs it gets and prints `42`."""

    def __init__(self, server: FakeServer, texts: Texts, tokenizer: Any) -> None:
        self.server, self.texts, self.tokenizer = server, texts, tokenizer
        self.programs: list[str] = []
        self.outcome = ProgramRun("finished", "42\n")

    def run(self, program: str, **settings: Any) -> ProgramRun:
        self.programs.append(program)
        return self.outcome

    async def rollout(self, *answers: str, words: tuple[str, ...] = (), **settings: Any) -> RolloutResult:
        self.texts.left = list(answers)
        config = compose(["--config-name", "tir", "output_dir=x", *words]).config
        assert config is not None
        parameters = {"max_tokens": 400, "temperature": 1.0, "detokenize": False}
        llm = TrainableLLM(
            self.server.url, "actor", self.tokenizer, parameters, token=self.server.token, max_retries=0, **settings
        )
        async with open_session() as session:
            result = await tir.generate_tir_rollout(to_dictconfig(config), llm, dict(PROBLEM), session)
        assert self.texts.left == []
        return result

    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(request["token_ids"]) for request in self.server.requests]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    tokenizer = chat_tokenizer(9)
    texts = Texts(tokenizer)

    async def verify(grader: Any, text: str, problem: dict[str, Any]) -> Any:
        return grader(text, problem)

    with FakeServer(script=texts) as server:
        server.version = "0"
        made = Bench(server, texts, tokenizer)
        monkeypatch.setattr(tir, "run_in_sandbox", made.run)
        monkeypatch.setattr(tir, "verify", verify)
        yield made


async def test_a_program_is_run_and_the_answer_after_its_output_is_graded(bench: Bench) -> None:
    result = await bench.rollout(BLOCK, "So \\boxed{42}.")
    assert bench.programs == ["print(6 * 7)\n"]
    assert bench.prompts()[1].endswith(BLOCK + "<|end|><|user|>```output\n42\n```<|end|><|assistant|>")
    (text,) = result.training_texts
    trained = [token for token in text.labels if token != -100]
    assert bench.tokenizer.decode(trained) == f"{BLOCK}<|end|>So \\boxed{{42}}.<|end|>"
    assert (text.reward, result.metrics.success, result.metrics.programs, result.metrics.programs_failed) == (
        *(1.0, True, 1.0, 0.0),
    )
    first, second = (request["sampling_params"] for request in bench.server.requests)
    assert first["stop"] == second["stop"] == ["```output"] and first["detokenize"]
    # All turns together have max_tokens; the first one took its characters and an end.
    assert (first["max_tokens"], second["max_tokens"]) == (400, 400 - len(BLOCK) - 1)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("\\boxed{42}", True),
        ("\\boxed{41}", False),
        (f"{BLOCK}That prints \\boxed{{42}}.", True),
        ("<think>```python\nprint(1)\n```</think>\\boxed{42}", True),
        ("I do not know.", False),
        ("```python\nprint(6 * 7)", False),
    ],
)
async def test_an_answer_without_a_program_before_it_ends_the_rollout(bench: Bench, answer: str, status: bool) -> None:
    result = await bench.rollout(answer)
    assert (bench.programs, result.metrics.success) == ([], status)


async def test_the_answer_may_be_tried_before_the_program(bench: Bench) -> None:
    result = await bench.rollout(f"Maybe \\boxed{{41}}. {BLOCK}", "\\boxed{42}")
    assert len(bench.programs) == 1 and result.metrics.success


async def test_programs_are_counted_and_the_last_turn_is_the_answer(bench: Bench) -> None:
    result = await bench.rollout(BLOCK, BLOCK, f"{BLOCK}\\boxed{{42}}")
    assert len(bench.programs) == 2 and result.metrics.success and result.metrics.programs == 2
    assert "No more programs" not in bench.prompts()[1] and "No more programs" in bench.prompts()[2]
    bench.programs.clear()
    result = await bench.rollout(BLOCK, BLOCK, BLOCK)
    assert (len(bench.programs), result.metrics.success, result.metrics.no_answer) == (2, False, True)


async def test_the_models_own_tool_calls(bench: Bench) -> None:
    wrong = ['{"name": "python", "arguments": {"program": 1}}', '{"name": "ruby", "arguments": {"code": "1"}}']
    calls = "".join(f"<tool_call>{call}</tool_call>" for call in wrong)
    result = await bench.rollout(TOOL_CALL + calls, "\\boxed{42}", words=("+custom.native_tools=true",))
    assert bench.programs == ["print(6 * 7)"] and result.metrics.success
    assert (result.metrics.programs, result.metrics.programs_failed) == (2, 1)
    _, *results = bench.prompts()[1].split("<|tool|>")
    assert [text.partition("<|end|>")[0].partition(" ")[0] for text in results] == ["42", "error:", "No"]
    assert "```" not in bench.prompts()[0] and bench.server.requests[0]["sampling_params"]["stop"] == []


async def test_a_full_context_ends_the_rollout_and_its_turns_are_trained(bench: Bench) -> None:
    bench.outcome = ProgramRun("finished", "1" * 40)
    result = await bench.rollout(BLOCK, max_model_len=len(bench_prompt(bench)) + 80)
    (text,) = result.training_texts
    assert len(bench.programs) == 1 and result.metrics.no_answer and text.reward == 0.0


def bench_prompt(bench: Bench) -> list[int]:
    """Ids of the first prompt."""
    messages = [{"role": "system", "content": tir.SYSTEM_PROMPT}, {"role": "user", "content": PROBLEM["task"]}]
    return bench.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize(
    ("run", "shown"),
    [
        (ProgramRun("finished", " 42\n"), "42"),
        (ProgramRun("finished", ""), "(nothing was printed)"),
        (ProgramRun("crashed", "1\n", "Traceback\nNameError: x\n"), "1\nTraceback\nNameError: x"),
        (ProgramRun("time_limit", "1\n"), "1\nerror: the program took too long"),
        (ProgramRun("output_limit", "7" * 99), f"{'7' * 20}\n...\nram printed too much"),
    ],
)
def test_what_the_model_sees_of_a_program(run: ProgramRun, shown: str) -> None:
    assert tir.shown_output(run, 40) == shown


def test_problems_are_those_of_math_with_limits() -> None:
    [problem, *_] = tir.load_problems(["train"], num_train=3, num_test=2, max_programs=1)
    assert (problem["max_programs"], problem["max_output_characters"]) == (1, 1000)
    assert tir.validate(problem) == 1.0
    for wrong in (0, True, "4"):
        with pytest.raises(DomainError, match="max_programs"):
            tir.load_problems(["train"], max_programs=wrong)
