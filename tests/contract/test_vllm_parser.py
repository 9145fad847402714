"""Our options as vLLM's own argument parser reads them."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.models.config import HybridAttentionMambaModelConfig, MambaModelConfig

from pipelinerl.inference.arguments import VLLM_OPTIONS, ServerSettings, check_names, server_arguments
from pipelinerl.inference.server import option_names, parser_of_vllm, serve_hybrids_whole_prompts


def options(**kwargs: object) -> list[str]:
    settings = {"model": "/m", "host": "127.0.0.1", "port": 8000, "on_cpu": True, **kwargs}
    return server_arguments(ServerSettings(**settings))[0]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return parser_of_vllm()


def test_vllm_reads_the_flag_for_code_of_the_model(parser: argparse.ArgumentParser) -> None:
    assert parser.parse_args(options(trust_remote_code=True)).trust_remote_code is True
    assert parser.parse_args(options()).trust_remote_code is False
    refused = options(trust_remote_code=True, vllm_kwargs={"trust_remote_code": False})
    assert parser.parse_args(refused).trust_remote_code is False


def test_the_known_options_are_those_of_vllms_parser(parser: argparse.ArgumentParser) -> None:
    """After a change of vLLM's version: print `server.option_names()` and put it into `arguments`."""
    assert option_names() == VLLM_OPTIONS
    real = {text[2:] for action in parser._actions for text in action.option_strings if text.startswith("--")}
    check_names(real)


@pytest.mark.parametrize("spelling", ["compilation-config", "compilation_config", "--compilation_config"])
def test_fields_of_an_option_keep_their_underscores(spelling: str, parser: argparse.ArgumentParser) -> None:
    """vLLM takes dashes for underscores in the name of the option alone."""
    argv = options(vllm_kwargs={f"{spelling}.cudagraph_mode": "FULL_DECODE_ONLY"})
    assert argv[argv.index("--compilation-config.cudagraph_mode") + 1] == "FULL_DECODE_ONLY"
    parsed = parser.parse_args(argv).compilation_config
    assert str(parsed.cudagraph_mode) == "FULL_DECODE_ONLY"


@pytest.mark.parametrize("name", ["compilation", "logprobs-m", "weight-transfer", "middlewar"])
def test_shortened_names_do_not_get_past_the_checks(
    name: str, parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = options(vllm_kwargs={name: "3"})
    with pytest.raises(SystemExit):
        parser.parse_args(argv)
    assert f"unrecognized arguments: --{name}" in capsys.readouterr().err


@pytest.mark.parametrize(("in_chunks", "keeps_cache"), [(True, True), (False, False)])
def test_hybrid_models_are_served_where_prompts_are_whole(
    monkeypatch: pytest.MonkeyPatch, in_chunks: bool, keeps_cache: bool
) -> None:
    monkeypatch.setattr(MambaModelConfig, "verify_and_update_config", MambaModelConfig.verify_and_update_config)
    serve_hybrids_whole_prompts()
    cache = SimpleNamespace(enable_prefix_caching=True, mamba_cache_mode="none", mamba_block_size=None, block_size=32)
    HybridAttentionMambaModelConfig.verify_and_update_config(
        SimpleNamespace(  # type: ignore[arg-type]
            model_config=SimpleNamespace(architecture="Tiny", max_model_len=128),
            cache_config=cache,
            scheduler_config=SimpleNamespace(enable_chunked_prefill=in_chunks),
        )
    )
    assert cache.enable_prefix_caching == keeps_cache
    assert cache.mamba_block_size == (32 if keeps_cache else 128)
