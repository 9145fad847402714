"""Our options as vLLM's own argument parser reads them."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models.config import HybridAttentionMambaModelConfig, MambaModelConfig
from vllm.platforms import current_platform
from vllm.utils.system_utils import get_mp_context

from pipelinerl.inference.arguments import VLLM_OPTIONS, ServerSettings, check_names, server_arguments
from pipelinerl.inference.server import (
    fork_engine,
    option_names,
    parser_of_vllm,
    rotate_by_torch,
    serve_hybrids_whole_prompts,
)


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


@pytest.mark.parametrize(
    ("kwargs", "environ", "expected"),
    [
        ({}, {"BIND": "nobind"}, "fork"),
        ({}, {"BIND": "0-1"}, "spawn"),
        ({}, {}, "spawn"),
        ({"numa-bind": ""}, {"BIND": "nobind"}, "spawn"),
        ({}, {"BIND": "nobind", "METHOD": "spawn"}, "spawn"),
        ({}, {"BIND": "0-1", "METHOD": "fork"}, "spawn"),
    ],
)
def test_the_engine_is_forked_where_it_can_be(
    kwargs: dict[str, str],
    environ: dict[str, str],
    expected: str,
    parser: argparse.ArgumentParser,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU. vLLM sets `spawn` and a worker's own process whenever it checks a configuration."""
    for short, name in (("BIND", "VLLM_CPU_OMP_THREADS_BIND"), ("METHOD", "VLLM_WORKER_MULTIPROC_METHOD")):
        monkeypatch.setenv(name, "")  # restored in the end, whatever is set between
        monkeypatch.delenv(name)
        if short in environ:
            monkeypatch.setenv(name, environ[short])
    kind = type(current_platform)
    monkeypatch.setattr(kind, "check_and_update_config", kind.check_and_update_config)
    fork_engine(parser.parse_args(options(vllm_kwargs=kwargs)))
    found = VllmConfig()
    assert get_mp_context().get_start_method() == expected
    assert found.parallel_config.distributed_executor_backend == ("uni" if expected == "fork" else "mp")


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


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    ("chosen", "is_right"), [(None, True), ("-rotary_embedding", True), ("+rotary_embedding", False)]
)
def test_queries_of_three_dimensions_get_their_positions(
    is_neox: bool, chosen: str | None, is_right: bool, parser: argparse.ArgumentParser
) -> None:
    """On a CPU, with two heads. If vLLM's own kernel is right one day, `rotate_by_torch` can go."""
    kwargs = {} if chosen is None else {"compilation-config": {"custom_ops": [chosen]}}
    config = parser.parse_args(options(vllm_kwargs=kwargs)).compilation_config
    rotate_by_torch(config.custom_ops)
    queries, keys = torch.randn(12, 2, 8), torch.randn(12, 1, 8)
    angles = torch.arange(12)[:, None] / 100.0 ** (torch.arange(0, 8, 2) / 8)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    # Pairs of values are complex numbers: those 4 apart, or neighbors.
    first, second = queries.chunk(2, -1) if is_neox else (queries[..., 0::2], queries[..., 1::2])
    turned = torch.view_as_real(torch.complex(first, second) * turns)
    expected = turned.transpose(-1, -2).flatten(-2) if is_neox else turned.flatten(-2)
    with set_current_vllm_config(VllmConfig(compilation_config=config)):
        rope = RotaryEmbedding(8, 8, 64, 100.0, is_neox, torch.float32)
    got, _ = rope(torch.arange(12), queries.clone(), keys)
    assert torch.allclose(got, expected, atol=1e-5) == is_right
