"""The token check, salts and environment of a server, without vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from pipelinerl.inference.arguments import ServerSettings
from pipelinerl.inference.auth import TokenMiddleware, read_token
from pipelinerl.inference.main import prepare_environment

TOKEN = "a-token-of-sixteen-or-more"


async def respond(kind: str, path: str, *authorization: str, method: str = "GET") -> tuple[bool, list[dict[str, Any]]]:
    """Whether the application was reached, and what was sent."""
    reached: list[str] = []
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    headers = [(b"authorization", value.encode("latin-1")) for value in authorization]
    scope = {"type": kind, "path": path, "method": method, "headers": headers}
    await TokenMiddleware(app, TOKEN)(scope, receive, send)
    return bool(reached), sent


@pytest.mark.parametrize("path", ["/pause", "/v1/models", "/metrics", "/docs", "/health/", "/HEALTH", "//health", "/"])
@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("",),
        ("Bearer",),
        (f"Bearer {TOKEN}x",),
        (TOKEN,),
        (f"bearer {TOKEN}",),
        (f"Bearer {TOKEN}", "Bearer x"),
        ("ü",),
    ],
)
async def test_nothing_but_the_token_opens_a_route(path: str, headers: tuple[str, ...]) -> None:
    reached, sent = await respond("http", path, *headers)
    assert not reached
    assert sent[0]["status"] == 401
    assert TOKEN.encode() not in sent[1]["body"]


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_the_token_opens_every_route(kind: str) -> None:
    assert await respond(kind, "/pause", f"Bearer {TOKEN}") == (True, [])


async def test_health_is_open_for_reading_only() -> None:
    assert (await respond("http", "/health"))[0]
    assert not (await respond("http", "/health", method="POST"))[0]


async def test_a_websocket_without_token_is_closed() -> None:
    reached, sent = await respond("websocket", "/health")
    assert not reached
    assert sent[0]["type"] == "websocket.close"


@pytest.mark.parametrize("environ", [{}, {"PIPELINERL_SERVER_TOKEN": ""}, {"PIPELINERL_SERVER_TOKEN": "short"}])
def test_a_missing_or_short_token_is_refused_without_quoting_it(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="PIPELINERL_SERVER_TOKEN") as caught:
        read_token(environ)
    assert "short" not in str(caught.value)


def test_environment_opens_control_routes_and_respects_the_users_choices() -> None:
    settings = ServerSettings("/m", "127.0.0.1", 1, on_cpu=True, vllm_kwargs={"enforce_eager": ""})
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_SERVER_DEV_MODE": "0"}
    prepare_environment(environ, settings, cpu_kv_cache_gib=0.25)
    assert environ["VLLM_SERVER_DEV_MODE"] == "1"
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert environ["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environ["TORCH_COMPILE_DISABLE"] == "1"


@pytest.mark.parametrize("on_cpu", [True, False])
def test_x5_servers_get_a_chosen_environment(on_cpu: bool) -> None:
    """What a Kubernetes service of that name sets, and what would move, open or change a server."""
    operators = {
        **{"PATH": "/bin", "VLLM_CACHE_ROOT": "/c", "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_NO_USAGE_STATS": "0"},
        **{"VLLM_USE_FLASHINFER_SAMPLER": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0"},
        **{"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_RPC_BASE_PATH": "/r", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
        **{"VLLM_DISABLED_KERNELS": "x", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_DEEPEP_BUFFER_SIZE_MB": "1"},
        **{"VLLM_PP_LAYER_PARTITION": "1,1", "VLLM_MQ_MAX_CHUNK_BYTES_MB": "8", "VLLM_LORA_DISABLE_PDL": "1"},
    }
    service = {"VLLM_PORT": "tcp://10.0.0.3:8000", "VLLM_SERVICE_HOST": "10.0.0.3", "VLLM_CPU_SERVICE_PORT_HTTP": "80"}
    service |= {"VLLM_PORT_8000_TCP_ADDR": "10.0.0.3", "VLLM_USE_PORT": "tcp://10.0.0.3:80"}
    others = {"VLLM_API_KEY": "abc", "VLLM_HOST_IP": "10.0.0.9", "VLLM_DP_SIZE": "2", "VLLM_MODEL_REDIRECT_PATH": "/m"}
    others |= {
        "VLLM_USE_MODELSCOPE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_LORA_RESOLVER_HF_REPO_LIST": "",
    }
    environ = operators | service | others
    prepare_environment(environ, ServerSettings("/m", "127.0.0.1", 1, on_cpu), cpu_kv_cache_gib=1)
    assert environ == operators | {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.mark.parametrize(
    ("on_cpu", "dtype", "kwargs", "given", "expected"),
    [
        (False, None, {"dtype": "float32"}, None, "ieee"),
        (False, "float32", {}, None, "ieee"),
        (False, None, {"dtype": "float32"}, "tf32x3", "tf32x3"),
        (False, "float32", {"dtype": "bfloat16"}, None, None),
        (False, None, {}, None, None),
        (True, "float32", {}, None, None),
    ],
)
def test_fp32_servers_on_gpus_multiply_in_fp32(
    on_cpu: bool, dtype: str | None, kwargs: dict[str, object], given: str | None, expected: str | None
) -> None:
    """In TF32, Triton's default, the log-probs of a float32 server were 0.0024 nats off."""
    environ = {} if given is None else {"TRITON_F32_DEFAULT": given}
    settings = ServerSettings("/m", "127.0.0.1", 1, on_cpu, vllm_kwargs=kwargs, dtype=dtype)
    prepare_environment(environ, settings, cpu_kv_cache_gib=0.25)
    assert environ.get("TRITON_F32_DEFAULT") == expected


async def test_lifespan_events_pass() -> None:
    assert (await respond("lifespan", ""))[0]
