"""Mathematics with a Python tool, with the real sandbox and graders: what programs print, and what they cannot."""

from __future__ import annotations

import pytest
from fakes.fake_server import FakeServer
from fakes.scripted_texts import Texts, chat_tokenizer

from pipelinerl.__main__ import main
from pipelinerl.config.compose import compose
from pipelinerl.config.load import to_dictconfig
from pipelinerl.domains import tir
from pipelinerl.grading import open_verifier
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.client import open_session
from pipelinerl.sandbox.programs import SandboxUnavailableError, check_sandbox


@pytest.fixture(autouse=True)
def sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDBOX_ENDPOINT", raising=False)
    try:
        check_sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(str(error)[:200])


def block(program: str) -> str:
    return f"```python\n{program}\n```"


async def test_programs_run_alone_and_the_answer_is_graded() -> None:
    """The second program does not know the first one; the third finds neither files nor processes of this machine."""
    tokenizer = chat_tokenizer(9)
    texts = Texts(tokenizer)
    texts.left = [
        block("x = sum(range(10))\nprint(x)"),
        block("print(x)"),
        block("import os\nprint(os.path.exists('/etc/passwd'), os.path.exists('/proc/self'))"),
        "So it is \\boxed{45}.",
    ]
    config = compose(["--config-name", "tir", "output_dir=x"]).config
    assert config is not None
    problem = {"dataset": "train", "task": "0 + 1 + ... + 9?", "answer": "45"}
    with FakeServer(script=texts) as server:
        server.version = "0"
        llm = TrainableLLM(server.url, "actor", tokenizer, {"max_tokens": 900, "temperature": 1.0}, token=server.token)
        async with open_session() as session, open_verifier(config.verifier, []):
            result = await tir.generate_tir_rollout(to_dictconfig(config), llm, problem, session)
        *_, last = (tokenizer.decode(request["token_ids"]) for request in server.requests)
    outputs = [part.partition("\n```")[0] for part in last.split("<|user|>```output\n")[1:]]
    assert outputs[0] == "45" and outputs[1].endswith("NameError: name 'x' is not defined")
    assert outputs[2] == "False False"
    assert (result.metrics.success, result.metrics.programs, result.metrics.programs_failed) == (True, 3, 1)
    (text,) = result.training_texts
    trained = tokenizer.decode([token for token in text.labels if token != -100])
    assert text.reward == 1.0 and "print(x)" in trained and "output" not in trained


@pytest.mark.parametrize("words", [[], ["+custom.native_tools=true"]])
def test_check_domain_passes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    small = ["+dataset_loader_params.num_train=20", "+dataset_loader_params.num_test=5"]
    assert main(["check-domain", "tir", *small, *words]) == 0
    out = capsys.readouterr().out
    assert "all score 1" in out and "success True" in out
