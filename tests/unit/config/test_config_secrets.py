"""Secrets are refused before they can be saved, and no message shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.config import RunConfig, save_config
from pipelinerl.config.compose import compose
from pipelinerl.config.secrets import refuse_secrets
from pipelinerl.errors import ConfigError

SECRET = "sk-0123456789abcdef"


@pytest.mark.parametrize(
    "data",
    [
        {"custom": {"api_key": SECRET}},
        {"custom": {"judge": [{"openai-api-key": SECRET}]}},
        {"environment": {"password": SECRET}},
        {"custom": {"hf_token": SECRET}},
        {"custom": {"token": SECRET}},
        {"streams": {"url": f"redis://user:{SECRET}@localhost:1/0"}},
        {"streams": {"url": f"redis://localhost:1/0?password={SECRET}"}},
    ],
)
def test_secrets_by_name_and_in_addresses(data: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_secrets(data, {})
    assert SECRET not in str(caught.value)


def test_an_address_with_a_password_has_a_variable_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"Leave streams\.url out.*PIPELINERL_REDIS_URL") as caught:
        compose(["output_dir=x", "streams=redis", f"streams.url=redis://:{SECRET}@localhost:1/0"])
    assert "in your code" not in str(caught.value)
    with pytest.raises(ConfigError, match="in your code"):
        compose(["output_dir=x", f"custom.judge=https://user:{SECRET}@localhost/"])


def test_the_value_of_a_secret_variable() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_secrets({"custom": {"header": f"Bearer {SECRET}"}}, {"JUDGE_API_KEY": SECRET})
    assert "$JUDGE_API_KEY" in str(caught.value) and SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        {"custom": {"api_key": None, "token": "", "max_tokens": 3}},
        {"custom": {"pad_token": "<pad>", "tokenizer": "a/b"}},
        {"streams": {"url": "redis://localhost:1/0"}},
        {"custom": {"address": "https://example.com/a@b"}},
    ],
)
def test_what_is_no_secret(data: dict[str, object]) -> None:
    refuse_secrets(data, {"PATH": "a/b", "SORT_KEY": "<pad>"})


def test_o5_the_command_line_and_saving_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no secret in the configuration"):
        compose(["output_dir=x", f"custom.api_key={SECRET}"])
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    with pytest.raises(ConfigError, match=r"\$JUDGE_API_KEY"):
        compose(["output_dir=x", "custom.judge=${oc.env:JUDGE_API_KEY}"])
    with pytest.raises(ConfigError, match=r"\$JUDGE_API_KEY"):
        save_config(RunConfig(output_dir="x", custom={"judge": SECRET}), tmp_path / "exp.yaml")
    assert list(tmp_path.iterdir()) == []
