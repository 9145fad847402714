"""The command line of a server from its settings."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.inference import arguments, vllm_options
from pipelinerl.inference.arguments import ServerSettings, check_names, server_arguments
from pipelinerl.inference.server import parser_of_vllm


def settings(**kwargs: object) -> ServerSettings:
    return ServerSettings(**{"model": "/m", "host": "127.0.0.1", "port": 8000, "transport": "gloo", **kwargs})


def options(**kwargs: object) -> list[str]:
    return server_arguments(settings(**kwargs))[0]


def value_of(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_the_protocol_options_are_always_there() -> None:
    argv = options()
    assert value_of(argv, "--model") == "/m"
    assert value_of(argv, "--host") == "127.0.0.1"
    assert value_of(argv, "--port") == "8000"
    assert value_of(argv, "--served-model-name") == "actor"
    assert value_of(argv, "--logprobs-mode") == "processed_logprobs"
    assert json.loads(value_of(argv, "--weight-transfer-config")) == {"backend": "pipelinerl"}
    assert value_of(argv, "--middleware") == "pipelinerl.inference.fast_output.ServerMiddleware"
    assert "--enable-scale-out" in argv


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return parser_of_vllm()


def test_vllm_reads_the_flag_for_code_of_the_model(parser: argparse.ArgumentParser) -> None:
    assert parser.parse_args(options(trust_remote_code=True)).trust_remote_code is True
    assert parser.parse_args(options()).trust_remote_code is False
    refused = options(trust_remote_code=True, vllm_kwargs={"trust_remote_code": False})
    assert parser.parse_args(refused).trust_remote_code is False


def test_the_known_options_are_those_of_vllms_parser(parser: argparse.ArgumentParser) -> None:
    """After a change of vLLM's version: see `vllm_options`."""
    assert vllm_options.options_of_parser() == vllm_options.NAMES
    real = {text[2:] for action in parser._actions for text in action.option_strings if text.startswith("--")}
    check_names(real)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max-modellen", r"Did you mean max-model-len\?"),
        ("no-enable-prefix-cache", "Did you mean"),
        ("compilation-confg.mode", r"Did you mean compilation-config\?"),
        ("qqq", "Remove it"),
    ],
)
def test_a_misspelled_option_is_refused_with_the_nearest_one(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"vllm_config\.vllm_kwargs\.{name}.*{hint}"):
        check_names(["dtype", "no-enable-prefix-caching", "compilation-config.mode", name])


@pytest.mark.parametrize("version", [None, "0.33.0"])
def test_nothing_is_refused_where_another_vllm_is_installed(monkeypatch: pytest.MonkeyPatch, version: object) -> None:
    monkeypatch.setattr(arguments, "_installed_version", lambda: version)
    check_names(["qqq"])


def test_no_option_is_given_twice() -> None:
    """vLLM warns of it at every start, also where it takes all values."""
    changes = dict(dtype="bfloat16", quantization="fp8", fp32_head=True, can_sleep=True, trust_remote_code=True)
    argv = options(**changes, vllm_kwargs={"dtype": "float16", "seed": 3, "hf_overrides": {"a": 1}})
    names = [word for word in argv if word.startswith("--")]
    assert len(names) == len(set(names)) > 10


@pytest.mark.parametrize(
    "kwargs",
    [
        {"compilation-config": {"mode": 0, "cudagraph_mode": "FULL"}},
        {"compilation_config": '{"cudagraph_mode": "full"}'},
        {"compilation-config.cudagraph_mode": "FULL"},
        {"compilation_config.cudagraph_mode": "full"},
        {"--compilation-config": {"cudagraph_mode": 2}},
        {"compilation-config": {"mode": 0}, "compilation-config.cudagraph_mode": "FULL"},
        {"compilation-config": {"cudagraph_mode": "NONE"}, "compilation-config.cudagraph_mode": "FULL"},
    ],
)
def test_graphs_of_mixed_steps_are_refused(kwargs: dict[str, object]) -> None:
    """Seen on two H200: half of all log-probs off by a nat from the first step on, NaN from the ninth."""
    with pytest.raises(ConfigError, match=r"compilation-config.cudagraph_mode: got ('?[Ff]|2).*FULL_DECODE_ONLY"):
        options(vllm_kwargs=kwargs)


@pytest.mark.parametrize("spelling", ["compilation-config", "compilation_config", "--compilation_config"])
def test_fields_of_an_option_keep_their_underscores(spelling: str, parser: argparse.ArgumentParser) -> None:
    """vLLM takes dashes for underscores in the name of the option alone."""
    argv = options(vllm_kwargs={f"{spelling}.cudagraph_mode": "FULL_DECODE_ONLY"})
    assert value_of(argv, "--compilation-config.cudagraph_mode") == "FULL_DECODE_ONLY"
    parsed = parser.parse_args(argv).compilation_config
    assert str(parsed.cudagraph_mode) == "FULL_DECODE_ONLY"


@pytest.mark.parametrize("name", ["weight-transfer-config.backend", "weight_transfer_config.backend", "model"])
def test_a_field_of_a_reserved_option_is_refused_too(name: str) -> None:
    with pytest.raises(ConfigError, match="this option to be left out"):
        options(vllm_kwargs={name: "nccl"})


@pytest.mark.parametrize("name", ["compilation", "logprobs-m", "weight-transfer", "middlewar"])
def test_shortened_names_do_not_get_past_the_checks(
    name: str, parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = options(vllm_kwargs={name: "3"})
    with pytest.raises(SystemExit):
        parser.parse_args(argv)
    assert f"unrecognized arguments: --{name}" in capsys.readouterr().err


def test_a_single_override_of_the_model_is_refused() -> None:
    """vLLM takes options with a dot last, so that the mapping with our fp32 head would be dropped."""
    with pytest.raises(ConfigError, match=r"hf_overrides.rope_theta: got 5, expected hf-overrides as one mapping"):
        options(vllm_kwargs={"hf_overrides.rope_theta": 5})


@pytest.mark.parametrize("value", [{"cudagraph_mode": "FULL_DECODE_ONLY"}, {"mode": 3}, '{"mode": 0}', "not json", 3])
def test_other_compilation_is_for_vllm_to_judge(value: object) -> None:
    assert "--compilation-config" in options(vllm_kwargs={"compilation-config": value})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ["--some-option"]),
        (None, ["--some-option"]),
        (True, ["--some-option"]),
        (False, ["--no-some-option"]),
        (4096, ["--some-option", "4096"]),
        (0.5, ["--some-option", "0.5"]),
        ("auto", ["--some-option", "auto"]),
        ({"a": 1}, ["--some-option", '{"a": 1}']),
        ([1, 2], ["--some-option", "1", "2"]),
    ],
)
@pytest.mark.parametrize("name", ["some-option", "some_option", "--some-option"])
def test_values_of_every_kind_and_every_spelling(name: str, value: object, expected: list[str]) -> None:
    argv = options(vllm_kwargs={name: value})
    assert argv[-len(expected) :] == expected or " ".join(expected) in " ".join(argv)
    assert argv.count(expected[0]) == 1


@pytest.mark.parametrize(
    "name",
    ["num-scheduler-steps", "disable_log_requests", "disable-frontend-multiprocessing", "return-tokens-as-token-ids"],
)
def test_options_of_older_versions_are_dropped_with_a_note(name: str) -> None:
    argv, notes = server_arguments(settings(vllm_kwargs={name: "", "enable-chunked-prefill": ""}))
    assert "--" + name.replace("_", "-") not in argv
    assert "--enable-chunked-prefill" in argv
    assert len(notes) == 1
    assert name in notes[0]


@pytest.mark.parametrize("name", ["port", "api-key", "weight_transfer_config", "scheduler-cls", "middleware", "model"])
def test_reserved_options_are_refused_with_the_key(name: str) -> None:
    with pytest.raises(ConfigError, match=f"vllm_config.vllm_kwargs.{name}"):
        options(vllm_kwargs={name: "x"})


def test_two_spellings_of_one_option_are_refused() -> None:
    with pytest.raises(ConfigError, match="one spelling"):
        options(vllm_kwargs={"max-model-len": 1, "max_model_len": 2})


def test_raw_logprobs_are_refused() -> None:
    with pytest.raises(ConfigError, match="sampling distribution"):
        options(vllm_kwargs={"logprobs-mode": "raw_logprobs"})


def test_user_options_win_over_defaults() -> None:
    argv = options(dtype="float32", vllm_kwargs={"dtype": "bfloat16", "seed": 7})
    assert value_of(argv, "--dtype") == "bfloat16"
    assert value_of(argv, "--seed") == "7"


@pytest.mark.parametrize("given", [None, {"rope_theta": 5}, '{"rope_theta": 5}'])
def test_the_fp32_head_joins_other_overrides(given: object) -> None:
    argv = options(fp32_head=True, vllm_kwargs={} if given is None else {"hf-overrides": given})
    expected = {"head_dtype": "float32"} | ({} if given is None else {"rope_theta": 5})
    assert json.loads(value_of(argv, "--hf-overrides")) == expected


def test_broken_overrides_are_a_clear_error() -> None:
    for given in ("{", "xx", "3", "[1]", 5, True):
        # Whether or not the head is among them: vLLM would refuse them half a minute later.
        for fp32_head in (True, False):
            with pytest.raises(ConfigError, match=r"hf-overrides: got .* expected a JSON object"):
                options(fp32_head=fp32_head, vllm_kwargs={"hf-overrides": given})


def test_no_option_holds_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINERL_SERVER_TOKEN", "very-secret-token-of-the-run")
    assert not any("very-secret" in word for word in options())


def test_the_module_loads_without_torch_and_vllm() -> None:
    code = (
        "import sys, pipelinerl.inference.arguments, pipelinerl.inference.auth;"
        "import pipelinerl.inference.server, pipelinerl.inference.main;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


def test_cpu_servers_do_not_cut_prompts_into_chunks() -> None:
    """A seeded request in chunks ends vLLM's engine on a CPU."""
    on_cpu, _ = server_arguments(ServerSettings("m", "127.0.0.1", 1, "gloo"))
    on_gpu, _ = server_arguments(ServerSettings("m", "127.0.0.1", 1, "nccl"))
    assert "--no-enable-chunked-prefill" in on_cpu and "--no-enable-chunked-prefill" not in on_gpu
