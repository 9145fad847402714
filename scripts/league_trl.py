"""TRL's side of `league.py`, in a process of its own: `python scripts/league_trl.py SETTINGS.json STEPS.jsonl`.

On one GPU GRPOTrainer and its vLLM engine share the card (`vllm_mode=colocate`), on two the experimental
AsyncGRPOTrainer has the second and a vLLM server the first. Without a GPU, for a rehearsal, transformers generates. The
log has one line for each optimizer step.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmark_common import free_port, serving, visible_gpus
from league_task import problems, reward

_SERVER_TIMEOUT_S = 600.0
#: With a fixed cache nothing is measured at the start. It holds all requests that TRL has in flight here.
_CACHE_BYTES, _SHARE = 24 * 2**30, 0.4


def rewards(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    return [reward(text[-1]["content"], right) for text, right in zip(completions, answer, strict=True)]


def step_of(logs: Mapping[str, Any], samples: int, seconds: float) -> dict[str, Any] | None:
    """A line of the log from what TRL logs after an optimizer step; None: it is not about a step.

    The names differ: "completions/..." has GRPOTrainer, where all samples come from the version in training, and
    "batch/..." and "sample/..." has AsyncGRPOTrainer, which does not count samples with tokens of several versions.
    """
    if "reward" not in logs:
        return None
    is_async = "batch/trained_tokens_per_step" in logs
    return {
        "seconds": seconds,
        "samples": logs["batch/samples_per_step"] if is_async else samples,
        "output_tokens": logs["batch/trained_tokens_per_step"]
        if is_async
        else logs["completions/mean_length"] * samples,
        "reward": logs["reward"],
        "lag": logs["sample/staleness_mean"] if is_async else 0.0,
        "multi_version_samples": None if is_async else 0,
    }


@contextlib.contextmanager
def vllm_server(model: str, max_model_len: int, log: Path, gpus: str | None) -> Iterator[str]:
    """The server of AsyncGRPOTrainer on the first GPU, as TRL starts one."""
    from trl.scripts.vllm_serve import ScriptArguments, build_command

    port = free_port()
    settings = {"dtype": "bfloat16", "max_model_len": max_model_len, "gpu_memory_utilization": _SHARE}
    command = build_command(
        ScriptArguments(model=model, host="127.0.0.1", port=port, **settings),
        ["--kv-cache-memory-bytes", str(_CACHE_BYTES)],
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": visible_gpus("0", gpus), "VLLM_SERVER_DEV_MODE": "1"}
    with serving(command, port, log, env, _SERVER_TIMEOUT_S) as url:
        yield url


def use_torch_attention() -> None:
    """Give AsyncGRPOTrainer PyTorch's flash attention instead of the kernel that it takes from the Hugging Face hub."""
    from torch.nn.attention.varlen import varlen_attn
    from trl.experimental.async_grpo import packing

    # Releases without this option do not need it.
    grouped: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def attend(*states_and_layout: Any, softmax_scale: float, causal: bool, window_size: tuple[int, int]) -> Any:
        return varlen_attn(*states_and_layout, scale=softmax_scale, window_size=(window_size[0], 0), **grouped)

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)


def train(settings: Mapping[str, Any], log: Path, server_url: str | None) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback

    samples, gpus = settings["samples"], settings["gpus"]
    rows = [{"prompt": row["messages"], "answer": row["answer"]} for row in problems(settings["task"])]
    micro = min(samples, settings["micro_batch"])
    words: dict[str, Any] = {
        "output_dir": str(log.parent / "trl"),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": samples // micro,
        "num_generations": settings["group"],
        "max_completion_length": settings["max_tokens"],
        "temperature": settings["temperature"],
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": settings["warmup_steps"],
        "adam_beta2": settings["adam_beta2"],
        "weight_decay": 0.0,
        "max_grad_norm": settings["clip"],
        "max_steps": settings["steps"],
        "seed": settings["seed"],
        "bf16": gpus > 0,
        "use_cpu": gpus == 0,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
    }

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.monotonic()

        def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **_: Any) -> None:
            step = step_of(logs, samples, time.monotonic() - self.begun)
            if step is not None:
                with log.open("a") as file:
                    file.write(json.dumps(step) + "\n")

    given = {"model": settings["model"], "reward_funcs": rewards, "train_dataset": Dataset.from_list(rows)}
    if server_url is not None:
        from transformers import AutoTokenizer
        from trl.chat_template_utils import qwen3_template
        from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

        # It reads answers by a list of known chat templates; this one is for all that mark turns as ChatML does.
        given["processing_class"] = AutoTokenizer.from_pretrained(settings["model"])
        given["processing_class"].response_template = qwen3_template
        if importlib.util.find_spec("kernels") is None:
            use_torch_attention()
        words |= {"vllm_server_base_url": server_url, "token_budget": 0, "max_staleness": settings["max_lag_versions"]}
        AsyncGRPOTrainer(args=AsyncGRPOConfig(**words), callbacks=[Clock()], **given).train()
        return
    from trl import GRPOConfig, GRPOTrainer

    # Our loss with one version: every sample counts the same, and the group mean is subtracted from rewards.
    words |= {"loss_type": "grpo", "scale_rewards": "none", "beta": 0.0, "use_vllm": gpus > 0}
    if gpus:
        words |= {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
        words["vllm_max_model_length"] = settings["max_model_len"]
    GRPOTrainer(args=GRPOConfig(**words), callbacks=[Clock()], **given).train()


def main() -> None:
    settings, log = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    if settings["gpus"] < 2:
        return train(settings, log, None)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Before torch starts CUDA.
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus("1", gpus)
    # The server ends with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with vllm_server(settings["model"], settings["max_model_len"], log.parent / "vllm.log", gpus) as url:
        train(settings, log, url)


if __name__ == "__main__":
    main()
