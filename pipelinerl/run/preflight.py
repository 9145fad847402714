"""Checks of what a run needs before any file is written or process started. Called by the launcher.

Waits for the hub, where the model is neither a folder nor in the hub's cache, and for the check of the user's code,
which is imported in a child process only: the launcher stays free of it (and of torch).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipelinerl.config import RunConfig
from pipelinerl.config.load import save_config
from pipelinerl.config.rules_run import missing_task
from pipelinerl.config.rules_sampling import vllm_number, vllm_option
from pipelinerl.config.stages import has_stage
from pipelinerl.errors import EXIT_USER_ERROR, ConfigError, DomainError, StreamError, UserError
from pipelinerl.inference.arguments import check_options
from pipelinerl.inference.option_names import check_names
from pipelinerl.role import NODE_SECRET_KEY
from pipelinerl.run.adapter_checks import check_adapter
from pipelinerl.run.commands import entrypoint_of
from pipelinerl.run.last_error import LogPart, last_error, user_error
from pipelinerl.run.model_folder import check_model_folder
from pipelinerl.run.model_limits import check_context
from pipelinerl.streams.hub import REDIS_URL_KEY
from pipelinerl.world import Cluster, WorldMap

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
# What the check of the user's code prints when it is through.
_PROBLEMS_FOUND = re.compile(r"\d+ training problems, \d+ test problems")
DOMAIN_CHECK_TIMEOUT_S = 300.0
_HUB_TIMEOUT_S = 10.0


def check_supported(config: RunConfig, cluster: Cluster, environ: Mapping[str, str]) -> None:
    """Refuse what can be planned (`dry_run=true`) but not run, instead of running something else."""
    is_named = bool(config.streams.url or environ.get(REDIS_URL_KEY))
    if cluster.world_size > 1 and config.streams.backend == "redis" and not is_named:
        raise ConfigError(
            "streams.url",
            None,
            "the address of a Redis server that all nodes reach (WORLD_SIZE is above 1)",
            f"Start one and set streams.url (or, with a password, {REDIS_URL_KEY} in the environment of every node), "
            "or use streams=files with output_dir on a shared file system.",
        )
    if config.debug.use_existing_llms:
        raise ConfigError("debug.use_existing_llms", True, "false: a run starts its own servers", "Remove the key.")
    if config.debug.mode and cluster.world_size > 1:
        raise ConfigError(
            "debug.mode", config.debug.mode, "'' with several nodes (WORLD_SIZE)", "Run the stage on one node."
        )
    if config.supervise.max_restarts and cluster.world_size > 1:
        raise ConfigError(
            "supervise.max_restarts",
            config.supervise.max_restarts,
            "0 with several nodes (WORLD_SIZE)",
            "Start the command again on all nodes: the run goes on.",
        )


def check_entrypoints(world: WorldMap) -> None:
    """Refuse a plan with a kind of job that has no program."""
    for job in world.jobs:
        if importlib.util.find_spec(entrypoint_of(job.kind)) is None:
            raise ConfigError(
                f"world ({job.kind} jobs)",
                job.name,
                f"kinds of jobs that this installation can run, {entrypoint_of(job.kind)} is missing",
                "Set world.env_replicas=0 and world.verifier_replicas=0: your code then runs inside the rollouts.",
            )


def check_task(config: RunConfig) -> None:
    """Refuse a configuration that others start from: a dry run plans it, but there is nothing to roll out."""
    if (fault := missing_task(config)) is not None:
        raise fault


def check_device(config: RunConfig, cluster: Cluster, gpu_lister: Callable[[], Sequence[str]]) -> None:
    """Refuse GPUs that are named in the environment but not there."""
    if config.world.device == "cpu" or not cluster.gpus:
        return
    found = len(gpu_lister())
    if found == 0:
        raise ConfigError(
            "CUDA_VISIBLE_DEVICES",
            ",".join(cluster.gpus),
            "GPUs of this machine; it has no NVIDIA driver or no GPU",
            "Unset CUDA_VISIBLE_DEVICES, or use world.device=cpu.",
        )
    too_high = [gpu for gpu in cluster.gpus if gpu.isdecimal() and int(gpu) >= found]
    if too_high:
        raise ConfigError(
            "CUDA_VISIBLE_DEVICES",
            ",".join(cluster.gpus),
            f"indices below {found}, the number of GPUs of this machine",
            f"Remove {', '.join(too_high)}.",
        )


def check_model(config: RunConfig) -> None:
    """Refuse a model that is neither a Hugging Face folder nor a model on the hub (or in its cache).

    Weights are asked for where a process loads them: not for servers with `load-format: dummy` and no trainer beside.
    """
    model_path, readers = config.model_path, weight_readers(config)
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                "model_path", model_path, f"a folder with a model; {folder / 'config.json'} is missing", _model_help()
            )
        check_model_folder(folder, model_path, readers)
        return
    expected = "a folder with a Hugging Face model, or the name of one on the hub"
    if folder.exists() or not _HUB_NAME.fullmatch(model_path):
        raise ConfigError("model_path", model_path, f"{expected}; there is no such folder", _model_help())
    reason = _missing_on_hub(model_path, readers)
    if reason is not None:
        raise ConfigError(
            "model_path", model_path, f"{expected}; no such folder, and the hub says: {reason}", _model_help()
        )


def weight_readers(config: RunConfig) -> str:
    """Who loads the weights of the model folder, in words; empty: nobody."""
    load_format = vllm_option(config, "load-format")[1]
    servers = has_stage(config, "actor_llm") or (has_stage(config, "preprocessor_llm") and config.has_reference_pool)
    readers = ["servers"] if servers and load_format != "dummy" else []
    if has_stage(config, "finetune"):
        readers.append("a trainer whatever their load-format" if servers and load_format == "dummy" else "a trainer")
    return " and ".join(readers)


def is_hub_name(model_path: str) -> bool:
    """Whether this may name a model on the hub; it may name a folder, too."""
    return _HUB_NAME.fullmatch(model_path) is not None


def check_vllm(config: RunConfig) -> None:
    """Refuse to start servers where vLLM is not installed. It is looked for, not imported."""
    if not (has_stage(config, "actor_llm") or has_stage(config, "preprocessor_llm")):
        return
    spec = importlib.util.find_spec("vllm")
    # A folder of that name in the working directory is no installation; it has no origin.
    if spec is None or spec.origin is None:
        raise UserError(
            f"vLLM is not installed in the Python environment {sys.prefix}, and the servers of a run are vLLM servers. "
            "Install pipelinerl with the extra that brings it: pip install -e '.[gpu]' where there are NVIDIA GPUs, "
            "pip install -e '.[cpu]' where there are none."
        )


def check_servers(config: RunConfig) -> None:
    """Refuse options of the servers that they would refuse themselves, half a minute after their start.

    A run without servers (`debug.mode=finetune`) may have those of the run that it reads.
    """
    if not (has_stage(config, "actor_llm") or has_stage(config, "preprocessor_llm")):
        return
    check_names(check_options(config.vllm_config.vllm_kwargs)[0])
    check_parallel_size(config)
    check_context(config, _config_file(config.model_path), os.environ)


def check_adapter_servers(config: RunConfig, cluster: Cluster) -> None:
    """Refuse servers that cannot serve the adapter that the trainer would send."""
    if has_stage(config, "actor_llm"):
        has_gpus = config.world.device != "cpu" and bool(cluster.gpus)
        check_adapter(config, has_gpus, _config_file(config.model_path))


def check_tracking(config: RunConfig) -> None:
    """Refuse a tracker whose package is not installed: in mid run it would only be a warning."""
    # A mere folder of that name beside the user's files counts as a package, but has no file of its own.
    if config.tensorboard.enabled and getattr(importlib.util.find_spec("tensorboard"), "origin", None) is None:
        raise ConfigError(
            "tensorboard.enabled", True, "the package tensorboard", "Install it: pip install pipelinerl[tensorboard]."
        )


def check_parallel_size(config: RunConfig) -> None:
    """Refuse servers whose workers cannot share the model's attention heads evenly: vLLM would say so a minute later.

    Of a model that is neither a local folder nor in the hub's cache (`check_model` puts it there) nothing is known.
    """
    size = vllm_number(config, "tensor-parallel-size") or 1
    file = _config_file(config.model_path)
    if size == 1 or file is None:
        return
    try:
        model = json.loads(file.read_text())
    except json.JSONDecodeError:
        return  # vLLM and transformers say what is wrong with it
    model = model.get("text_config") or model
    heads = model.get("num_attention_heads")
    if not isinstance(heads, int):
        return
    shared = model.get("num_key_value_heads") or heads
    # With more workers than heads of keys and values, several workers hold the same one.
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and max(n, shared) % min(n, shared) == 0]
    if size not in fitting:
        also = "" if shared == heads else f", that fits its {shared} heads of keys and values"
        raise ConfigError(
            "vllm_config.vllm_kwargs.tensor-parallel-size",
            size,
            f"a divisor of {heads}, the number of attention heads of {config.model_path}{also}",
            f"Use one of {', '.join(map(str, fitting))}, or more servers (world.num_actor_llms).",
        )


def _config_file(model_path: str) -> Path | None:
    """The model's `config.json`, if it is on this machine."""
    file = Path(model_path).expanduser() / "config.json"
    if file.is_file() or not _HUB_NAME.fullmatch(model_path):
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model_path, "config.json")
    return Path(cached) if isinstance(cached, str) else None


def check_streams(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Refuse a Redis server of the user's that cannot be reached or would lose records."""
    url = environ.get(REDIS_URL_KEY) or config.streams.url
    if config.streams.backend != "redis" or not url:
        return
    from pipelinerl.streams.redis_client import check_server, connect

    try:
        with contextlib.closing(connect(url, retries=1)) as client:
            check_server(client, url)
    except StreamError as error:
        raise UserError(str(error)) from error


def check_domain(config: RunConfig, environ: Mapping[str, str], search_dirs: Sequence[Path]) -> str:
    """Import and try the user's dataset loader and rollout function in a child process; return what it found.

    Raises:
        UserError: with the message of the child.
    """
    with tempfile.TemporaryDirectory(prefix="pipelinerl-check-") as folder:
        file = save_config(config, Path(folder) / "exp_config.yaml")
        log = Path(folder) / "stderr.log"
        paths = [str(path) for path in search_dirs] + ([environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else [])
        env = {**environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        env.pop(NODE_SECRET_KEY, None)  # nothing for the user's code
        argv = [sys.executable, "-m", "pipelinerl.domains.check_main", "--run-config", str(file)]
        try:
            with log.open("wb") as stderr:
                done = subprocess.run(
                    argv,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    check=False,
                    timeout=DOMAIN_CHECK_TIMEOUT_S,
                )
        except subprocess.TimeoutExpired as error:
            raise DomainError(
                f"dataset_loader {config.dataset_loader} or actor.rollout_policy {config.actor.rollout_policy} took "
                f"over {DOMAIN_CHECK_TIMEOUT_S:.0f} s to import and load its problems. Make the module quick to import."
            ) from error
        if done.returncode == EXIT_USER_ERROR:
            raise UserError(user_error(LogPart(log)) or last_error(LogPart(log)))
        if done.returncode != 0:
            raise DomainError(
                f"the check of dataset_loader {config.dataset_loader} and actor.rollout_policy "
                f"{config.actor.rollout_policy} failed: {last_error(LogPart(log))}"
            )
        printed = done.stdout.decode("utf-8", errors="replace").splitlines()  # the user's code may print, too
        found = [line for line in printed if _PROBLEMS_FOUND.fullmatch(line)]
        if not found:
            raise DomainError(
                f"the process that checked dataset_loader {config.dataset_loader} and actor.rollout_policy "
                f"{config.actor.rollout_policy} was ended by the code that it loaded, with exit code 0 and without a "
                "result. Look there for a call of sys.exit() or os._exit()."
            )
        return found[-1]


def _model_help() -> str:
    return (
        "Correct model_path; `python -m pipelinerl tiny-model` makes a tiny one for CPUs, which needs a configuration "
        "that starts from base_cpu (or quickstart)."
    )


def _missing_on_hub(name: str, readers: str) -> str | None:
    """Why the model cannot be had from the hub; None if it can. Its `config.json` is in the cache then, if possible."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_OFFLINE

    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        if HF_HUB_OFFLINE:  # what is missing in the cache stays missing
            check_model_folder(Path(cached).parent, name, readers)
        return None
    if HF_HUB_OFFLINE:
        return "not in the local cache, and HF_HUB_OFFLINE is set"
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - any failure to reach the hub is the answer to the question
        lines = [line for line in str(error).splitlines() if line.strip()]
        return lines[0] if lines else type(error).__name__
    # The checks behind this one read it; the servers would fetch it next. Without it they say themselves what is wrong.
    with contextlib.suppress(Exception):
        hf_hub_download(name, "config.json", etag_timeout=_HUB_TIMEOUT_S)
    return None
