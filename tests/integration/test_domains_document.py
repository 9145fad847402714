"""The examples of a user's own task in README.md and docs/domains.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from fakes.actor_run import ActorRun, CountingTrainer
from fakes.fake_server import FakeServer
from fakes.limits import PROCESS_LIMIT_S
from fakes.random_model import save_random_model

ROOT = Path(__file__).resolve().parents[2]


def block(text: str, language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.mark.parametrize(
    ("document", "module", "test_problems"), [("docs/domains.md", "my_sums", 200), ("README.md", "sums", 64)]
)
def test_the_thirty_lines(document: str, module: str, test_problems: int, tmp_path: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    source, settings = block(text, "python"), yaml.safe_load(block(text, "yaml"))
    assert len([line for line in source.splitlines() if line.strip()]) <= 30
    assert settings.pop("defaults") == ["base_cpu", "_self_"]
    assert settings["max_lag"] == 64
    # ActorRun samples 5 tokens unless the document's own settings say otherwise.
    max_tokens = settings.get("llm", {}).get("parameters", {}).get("max_tokens", 5)
    model = save_random_model(tmp_path / "model")
    with FakeServer() as server:
        run = ActorRun(tmp_path, model, [server.url], server.token, source, module=module, **settings)

        def set_version(version: int) -> None:
            server.version = str(version)

        with run.started(), CountingTrainer(run, steps=2, on_version=set_version) as trainer:
            assert run.wait(PROCESS_LIMIT_S) == 0, run.stderr
    sample = trainer.batches[0][0].samples[0]
    assert sample.reward == 0.0 and sample.output_tokens == max_tokens
    assert run.evaluations[0].num_rollouts == test_problems and run.evaluations[0].dataset_name == "test"
