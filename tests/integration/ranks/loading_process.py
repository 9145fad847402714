"""One trainer rank that loads models as a run does, and writes down what memory it took.

Usage: `python loading_process.py BACKEND MODELS FOLDER`, started by `fakes/rank_group.py`. MODELS are folders, divided
by commas; one whose name ends with `large` is not trained. BACKEND may end with `_lora`, or with `_start`: from the
adapter in the model's folder, which trains biases too; or with `_kl`: with a reference model, and `_kl16`: in bf16.
"""

import json
import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import torch
from fakes.finetune_kit import Kit
from rank_process import CHOICES, full_weights, join, make_backend
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from pipelinerl.config import RunConfig
from pipelinerl.finetune.main import end_process
from pipelinerl.finetune.model import load_policy, load_reference
from pipelinerl.finetune.step import StepRunner
from pipelinerl.finetune.tensor_files import write_tensors
from pipelinerl.rl.packing import make_plan


def anonymous_mib():
    """Memory of this process alone: pages of the files that it reads are everyone's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


@contextmanager
def sampled(found, key):
    """`found[key]`: the largest `anonymous_mib` within."""
    ended = threading.Event()
    found[key] = anonymous_mib()

    def sample():
        while not ended.wait(0.002):
            found[key] = max(found[key], anonymous_mib())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def load(name, model, folder, ranks, kit):
    """Backend and reference of a loaded model, and MiB of memory: before, at most while it loads, after it, at most
    while the reference loads, with the engine."""
    finetune = dict(
        seq_length=128,
        seq_packing=False,
        train_batch_size=1,
        learning_rate=1e-2,
        weight_decay=1.0,
        num_warmup_steps=0,
        max_train_steps=4,
        lora={"enabled": name.endswith(("_lora", "_start")), "r": 4},
    )
    if name.endswith("_start"):
        finetune["lora"] |= {"adapter_path": f"{model}/adapter", "bias": "lora_only"}
    if "_kl" in name:
        finetune |= {"rl": {"kl_coef": 0.1}, "dtype": "bf16" if name.endswith("16") else "fp32"}
    choice = CHOICES[re.sub("_(lora|start|kl|kl16)$", "", name)]
    config = RunConfig(output_dir=str(folder), model_path=str(model), finetune=finetune, **choice)
    # What is needed for any model: groups, and DeepSpeed's modules.
    make_backend(kit.policy(), config, ranks)
    # It stays set that there was an engine, and a trainer makes one.
    unset_hf_deepspeed_config()
    found = {"empty": anonymous_mib()}
    # Adapters are drawn.
    torch.manual_seed(3)
    with sampled(found, "loading"):
        policy = load_policy(config, ranks.device, ranks)
    found["loaded"] = anonymous_mib()
    with sampled(found, "reference"):
        reference = load_reference(config, policy, ranks.device, False, ranks)
    with sampled(found, "sharding"):
        backend = make_backend(policy, config, ranks)
    found["ready"] = anonymous_mib()
    return config, backend, reference, found


def train(config, backend, reference, ranks, kit):
    """Loss, norm of the gradient and KL of each of two steps."""
    samples = kit.samples(6, 1)
    plan = make_plan([len(sample.input_ids) for sample in samples], ranks.world_size, 64, False)
    runner = StepRunner(backend, config.finetune, ranks, reference=reference)
    results = [runner.run(kit.batch(samples, step=step, plan=plan)) for step in (1, 2)]
    names = "finetune/loss", "rl/kl_reference"
    found = [[result.metrics[name] for name in names if name in result.metrics] for result in results]
    return [[result.grad_norm, *values] for result, values in zip(results, found, strict=True)]


def reference_logprobs(config, backend, reference, ranks, kit):
    """Of a few samples, the same on all ranks."""
    runner = StepRunner(backend, config.finetune, ranks, reference=reference)
    batch = kit.batch(kit.samples(3, 2), plan=[[[0], [1], [2]]] * ranks.world_size)
    return {str(number): made.ref_logprobs for number, made in enumerate(runner.micro_batches(batch))}


def main(name, models, folder):
    torch.set_num_threads(1)
    kit, ranks = Kit(), join("cpu")
    for number, model in enumerate(models):
        config, backend, reference, found = load(name, model, folder, ranks, kit)
        if model.endswith("large"):
            (folder / f"loaded_{number}_{ranks.rank}.json").write_text(json.dumps(found))
            continue
        write_tensors(folder / f"buffers_{number}_{ranks.rank}.safetensors", dict(backend.policy.named_buffers()))
        if sent := full_weights(backend):
            write_tensors(folder / f"sent_{number}.safetensors", sent)
        found["steps"] = train(config, backend, reference, ranks, kit)
        if reference is not None:
            logprobs = reference_logprobs(config, backend, reference, ranks, kit)
            write_tensors(folder / f"reference_{number}_{ranks.rank}.safetensors", logprobs)
        (folder / f"loaded_{number}_{ranks.rank}.json").write_text(json.dumps(found))
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","), Path(sys.argv[3]))
    end_process(0)
