"""From the configuration of a run to the settings and the command line of a server. Without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from pipelinerl.config import RunConfig
from pipelinerl.config.finetune import LoraConfig
from pipelinerl.errors import ConfigError
from pipelinerl.inference import arguments
from pipelinerl.inference import main as llm
from pipelinerl.inference.arguments import (
    ADAPTER_VARIABLE,
    AdapterRoom,
    ServerSettings,
    check_names,
    check_options,
    layers_of,
    server_arguments,
    serves_adapter,
)
from pipelinerl.inference.main import adapter_room, prepare_environment, settings_of_job, with_fp32_attention
from pipelinerl.world import Job, WorldMap
from pipelinerl.world.jobs import TRANSPORTS


def settings(**kwargs: object) -> ServerSettings:
    return ServerSettings(**{"model": "/m", "host": "127.0.0.1", "port": 8000, "on_cpu": True, **kwargs})


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
    assert value_of(argv, "--middleware") == "pipelinerl.inference.server.ServerMiddleware"
    assert "--enable-scale-out" in argv


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max-modellen", r"\bmax-model-len\b"),
        ("max-num-seq", r"\bmax-num-seqs\b"),
        ("no-enable-prefix-cache", r"\benable-prefix-caching\b"),
        ("compilation-confg.mode", r"\bcompilation-config\b"),
        ("qqq", "qqq"),
    ],
)
def test_a_misspelled_option_is_refused_with_the_nearest_one(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as error:
        check_names(["dtype", "no-enable-prefix-caching", "compilation-config.mode", name])
    assert error.value.key == f"vllm_config.vllm_kwargs.{name}"


@pytest.mark.parametrize("version", [None, "0.33.0"])
def test_nothing_is_refused_where_another_vllm_is_installed(monkeypatch: pytest.MonkeyPatch, version: object) -> None:
    monkeypatch.setattr(arguments, "_installed_version", lambda: version)
    check_names(["qqq"])


def test_no_option_is_given_twice() -> None:
    """vLLM warns of it at every start, also where it takes all values."""
    changes = dict(dtype="bfloat16", fp32_head=True, can_sleep=True, trust_remote_code=True)
    argv = options(**changes, vllm_kwargs={"dtype": "float16", "seed": 3, "hf_overrides": {"a": 1}})
    names = [word for word in argv if word.startswith("--")]
    assert len(names) == len(set(names)) > 10


GRAPHS = "compilation-config.cudagraph_mode"


@pytest.mark.parametrize(
    ("kwargs", "key"),
    [
        *(({name: "x"}, name) for name in ("port", "api-key", "scheduler-cls", "middleware", "model")),
        *(({name: "nccl"}, name) for name in ("weight_transfer_config", "weight-transfer-config.backend")),
        ({"logprobs-mode": "raw_logprobs"}, "logprobs-mode"),
        ({"max-model-len": 1, "max_model_len": 2}, "max_model_len"),
        # vLLM takes options with a dot last, so that the mapping with our fp32 head would be dropped.
        ({"hf_overrides.rope_theta": 5}, "hf_overrides.rope_theta"),
        # Seen on two H200: half of all log-probs off by a nat from the first step on, NaN from the ninth.
        ({"compilation-config": {"mode": 0, "cudagraph_mode": "FULL"}}, GRAPHS),
        ({"compilation_config": '{"cudagraph_mode": "full"}'}, GRAPHS),
        ({"compilation-config.cudagraph_mode": "FULL"}, GRAPHS),
        ({"compilation_config.cudagraph_mode": "full"}, GRAPHS),
        ({"--compilation-config": {"cudagraph_mode": 2}}, GRAPHS),
        ({"compilation-config": {"mode": 0}, "compilation-config.cudagraph_mode": "FULL"}, GRAPHS),
        ({"compilation-config": {"cudagraph_mode": "NONE"}, "compilation-config.cudagraph_mode": "FULL"}, GRAPHS),
        # vLLM would refuse them half a minute later.
        *(({"hf-overrides": given}, "hf-overrides") for given in ("{", "xx", "3", "[1]", 5, True)),
    ],
)
@pytest.mark.parametrize("fp32_head", [True, False])
def test_options_that_break_the_protocol_are_refused(kwargs: dict[str, object], key: str, fp32_head: bool) -> None:
    with pytest.raises(ConfigError) as error:
        options(vllm_kwargs=kwargs, fp32_head=fp32_head)
    assert error.value.key == f"vllm_config.vllm_kwargs.{key}"


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


@pytest.mark.parametrize("given", [None, {"rope_theta": 5}, '{"rope_theta": 5}'])
def test_the_fp32_head_joins_other_overrides(given: object) -> None:
    argv = options(fp32_head=True, vllm_kwargs={} if given is None else {"hf-overrides": given})
    expected = {"head_dtype": "float32"} | ({} if given is None else {"rope_theta": 5})
    assert json.loads(value_of(argv, "--hf-overrides")) == expected


def test_o5_no_option_holds_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINERL_SERVER_TOKEN", "very-secret-token-of-the-run")
    assert not any("very-secret" in word for word in options())


def test_cpu_servers_do_not_cut_prompts_into_chunks() -> None:
    """A seeded request in chunks ends vLLM's engine on a CPU."""
    assert "--no-enable-chunked-prefill" in options() and "--no-enable-chunked-prefill" not in options(on_cpu=False)


@pytest.mark.parametrize(("rank", "room"), [(1, "1"), (2, "8"), (16, "16"), (17, "32"), (512, "512")])
def test_the_room_is_the_next_size_that_vllm_has(rank, room) -> None:
    text = " ".join(options(adapter=AdapterRoom(rank, ("q_proj", "v_proj"))))
    assert text.endswith(f" --enable-lora --max-loras 1 --max-lora-rank {room} --lora-target-modules q_proj v_proj")


@pytest.mark.parametrize("rank", [0, -4, 513])
def test_a_rank_without_room_is_refused_by_a_server_of_its_own(rank, capsys) -> None:
    with pytest.raises(ConfigError) as error:
        options(adapter=AdapterRoom(rank, ("q_proj",)))
    assert error.value.got == rank
    assert llm.main(["--model", "model", "--port", "1", "--adapter-rank", str(rank)]) == 2
    assert str(rank) in capsys.readouterr().err


def test_servers_of_merged_weights_have_none() -> None:
    assert not any("lora" in word for word in options())
    # A variable that was left in the shell does not make a server of another kind.
    environ = {ADAPTER_VARIABLE: "1"}
    prepare_environment(environ, settings(), 1.0)
    assert not serves_adapter(environ)
    prepare_environment(environ, settings(adapter=AdapterRoom(4)), 1.0)
    assert serves_adapter(environ)


@pytest.mark.parametrize("option", ["enable-lora", "no-enable-lora", "max-loras", "lora-modules", "lora-dtype"])
def test_options_about_other_adapters_are_refused(option) -> None:
    with pytest.raises(ConfigError) as error:
        options(adapter=AdapterRoom(4), vllm_kwargs={option: True})
    assert error.value.key == f"vllm_config.vllm_kwargs.{option}"


def test_layers_are_the_matrices_without_the_embeddings() -> None:
    tensors = {
        "model.embed_tokens.weight": (200, 64),
        # vLLM does not start with a target that it cannot wrap (OPT).
        "model.decoder.embed_positions.weight": (130, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.self_attn.q_proj.bias": (64,),
        "model.layers.0.input_layernorm.weight": (64,),
        "model.layers.0.mlp.up_proj.weight": (128, 64),
        "model.layers.1.mlp.up_proj.weight": (128, 64),
        "lm_head.weight": (200, 64),
    }
    assert layers_of(tensors) == ("q_proj", "up_proj")


def test_the_room_follows_from_the_configuration() -> None:
    assert adapter_room(LoraConfig(enabled=True)) is None
    assert adapter_room(LoraConfig(sync="adapter")) is None
    lora = LoraConfig(enabled=True, sync="adapter", r=4, target_modules=["self_attn.q_proj", "up_proj"])
    assert adapter_room(lora) == AdapterRoom(4, ("q_proj", "up_proj"))


def context(device: str, port: int | None = 8081, kind: str = "actor_llm", **config: Any) -> Any:
    run = RunConfig(output_dir="/run", model_path="/model", seed=10, **config)
    gpus, rank_gpus = [["1"], ["1" if run.world.placement == "colocated" else "0"]] if device == "cuda" else [[], []]
    job = Job(kind, f"{kind}_1", 1, 0, 0, "127.0.0.1", gpus, port, None, None, 1)
    rank = Job("finetune", "finetune_0", 0, 0, 0, "127.0.0.1", rank_gpus, None, None, None, 1)
    world = WorldMap([job, rank], device, 1, "127.0.0.1", 1)  # type: ignore[arg-type]
    return SimpleNamespace(config=run, job=job, world=world)


def test_a_cpu_server_is_fp32_over_gloo() -> None:
    settings = settings_of_job(context("cpu", vllm_config={"vllm_kwargs": {"max_model_len": 512}}))
    assert (settings.on_cpu, settings.dtype) == (True, "float32")
    assert (settings.model, settings.host, settings.port, settings.seed) == ("/model", "127.0.0.1", 8081, 11)
    assert settings.vllm_kwargs == {"max_model_len": 512}
    assert settings.fp32_head


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_a_gpu_server_can_sleep_if_it_shares_its_gpu(placement: str) -> None:
    settings = settings_of_job(context("cuda", world={"placement": placement}))
    assert (settings.on_cpu, settings.dtype) == (False, None)
    assert settings.can_sleep == (placement == "colocated")
    assert ("--enable-sleep-mode" in server_arguments(settings)[0]) == settings.can_sleep


@pytest.mark.parametrize(
    ("device", "placement", "share"),
    [("cuda", "disaggregated", 0.9), ("cuda", "colocated", 0.5), ("cpu", "disaggregated", None)],
)
def test_a_server_leaves_room_for_a_rank_on_its_gpu(device: str, placement: str, share: float | None) -> None:
    settings = settings_of_job(context(device, world={"placement": placement}))
    assert settings.vllm_kwargs.get("gpu-memory-utilization") == share


@pytest.mark.parametrize("text", ["0.6", "6e-1", 0.6])
def test_a_share_of_memory_may_be_text(text: object) -> None:
    given = context("cuda", vllm_config={"vllm_kwargs": {"gpu_memory_utilization": text}})
    assert settings_of_job(given).vllm_kwargs == {"gpu-memory-utilization": 0.6}


@pytest.mark.parametrize("value", [0, 1.5, "much", True, "nan"])
def test_another_share_of_memory_is_refused(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options({"gpu_memory_utilization": value})
    assert caught.value.got == value


@pytest.mark.parametrize("key", ["gpu-memory-utilization", "gpu_memory_utilization", "--gpu-memory-utilization"])
def test_a_server_that_shares_its_gpu_has_what_the_plan_gives_it(key: str) -> None:
    given = context("cuda", vllm_config={"vllm_kwargs": {key: 0.8, "max_model_len": 512}})
    assert settings_of_job(given).vllm_kwargs == {"gpu-memory-utilization": 0.8, "max_model_len": 512}
    given.job = replace(given.job, cache_bytes=2**30, memory_share=0.05)
    argv, _ = server_arguments(settings_of_job(given))
    assert [argv[argv.index(f"--{name}") + 1] for name in ("kv-cache-memory-bytes", "gpu-memory-utilization")] == [
        *(str(2**30), "0.05")
    ]
    assert not {"--gpu_memory_utilization", "0.8"} & set(argv)


@pytest.mark.parametrize(
    ("config", "changes", "added"),
    [
        ({"kv_lora_rank": 64}, {}, {"attention-backend": "CPU_MLA"}),
        ({"text_config": {"kv_lora_rank": 64}}, {}, {"attention-backend": "CPU_MLA"}),
        ({"kv_lora_rank": None}, {}, {}),
        ({}, {}, {}),
        (None, {}, {}),
        ({"kv_lora_rank": 64}, {"on_cpu": False}, {}),
        ({"kv_lora_rank": 64}, {"vllm_kwargs": {"dtype": "bfloat16"}}, {}),
        ({"kv_lora_rank": 64}, {"vllm_kwargs": {"attention_backend": "AMX_MLA"}}, {}),
        ({"kv_lora_rank": 64}, {"vllm_kwargs": {"attention-config.backend": "CPU_MLA"}}, {}),
    ],
)
def test_latent_attention_is_in_fp32_on_a_cpu(
    tmp_path: Path, config: dict[str, object] | None, changes: dict[str, object], added: dict[str, object]
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    given = settings(model=str(tmp_path), dtype="float32", **changes)
    assert with_fp32_attention(given).vllm_kwargs == {**given.vllm_kwargs, **added}


@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_the_model_is_trusted_by_servers_as_by_the_trainer(trusted: bool) -> None:
    settings = settings_of_job(context("cpu", finetune={"trust_remote_code": trusted}))
    assert ("--trust-remote-code" in server_arguments(settings)[0]) == trusted


@pytest.mark.parametrize(("transport", "on_cpu"), [(name, each.on_cpu) for name, each in TRANSPORTS.items()])
def test_a_server_of_its_own_computes_where_its_transport_delivers(transport, on_cpu, monkeypatch) -> None:
    started: list[ServerSettings] = []
    monkeypatch.setattr(llm, "serve", lambda settings, *_: started.append(settings))
    assert llm.main(["--model", "m", "--port", "8123", "--transport", transport]) == 0
    assert [(each.on_cpu, each.dtype) for each in started] == [(on_cpu, "float32" if on_cpu else None)]
