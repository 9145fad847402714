"""One trainer rank beside servers in bf16: trains, and compares itself with a model of the weights that it sends.

Usage: `python served_process.py BACKEND COMPUTED FOLDER`, started by `fakes/rank_group.py`.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from fakes.finetune_kit import Kit

from pipelinerl.config import RunConfig
from pipelinerl.finetune.main import end_process
from pipelinerl.finetune.model_check import token_batch
from pipelinerl.finetune.step import StepRunner
from pipelinerl.finetune.tensor_files import write_tensors

CHOICES = {
    "plain": {},
    "fsdp": {"backend": {"type": "fsdp"}},
    "fsdp_bf16": {"backend": {"type": "fsdp", "param_dtype": "bf16"}},
    "zero2": {"backend": {"type": "deepspeed", "config": "deepspeed_stage2_bf16"}},
}
IDS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]


def rank_process():
    spec = importlib.util.spec_from_file_location("rank_process", Path(__file__).with_name("rank_process.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def logprobs(policy, forward):
    batch = token_batch([IDS], torch.device("cpu"))
    return forward(batch, policy.layout_of(batch), 1.0).logprobs.float()


def all_weights(backend, dtype):
    """What rank 0 sends, on every rank."""
    source = backend.weight_source(dtype)
    if source.announce is None:
        weights = {name: tensor.clone() for bucket in source.buckets() for name, tensor in bucket}
    elif backend._ranks.is_first:
        weights = {name: tensor.clone() for bucket in source.buckets() for name, tensor in bucket}
        source.done()
    else:
        source.follow()
        weights = {meta.name: torch.empty(meta.shape, dtype=meta.dtype) for meta in source.metadata()}
    for tensor in weights.values():
        torch.distributed.broadcast(tensor, src=0)
    return weights


def main(name, computed, folder):
    torch.set_num_threads(1)
    tools = rank_process()
    kit = Kit()
    ranks = tools.join("cpu")
    config = RunConfig(
        output_dir=str(folder),
        finetune=dict(seq_length=128, learning_rate=1e-3, num_warmup_steps=0, max_train_steps=9),
        **CHOICES[name],
    )

    def started():
        policy = kit.policy(compute_dtype=getattr(torch, computed), served_dtype=torch.bfloat16)
        if name == "plain" and ranks.rank:
            # Other weights than the first rank's, which all get: they have to have its masters then, too.
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(0.001)
        backend = tools.make_backend(policy, config, ranks)
        return backend, StepRunner(backend, config.finetune, ranks)

    def train(runner, step):
        samples = kit.samples(16, seed=step)
        runner.run(kit.batch(samples, step=step, plan=[[[k] for k in range(8)], [[k] for k in range(8, 16)]]))

    backend, runner = started()
    differences = []
    for step in range(1, 4):
        train(runner, step)
        server = kit.policy(compute_dtype=getattr(torch, computed))
        server.language_model.load_state_dict(all_weights(backend, torch.bfloat16), strict=False)
        ours, theirs = logprobs(backend.policy, backend.forward), logprobs(server, server)
        differences.append(float((ours - theirs).abs().max()))
    # A state and an export hold the masters, and training goes on from a state as without it.
    folder.joinpath("state").mkdir(exist_ok=True)
    backend.save(folder / "state")
    masters = all_weights(backend, torch.float32)
    resumed, resumed_runner = started()
    resumed.load(folder / "state")
    train(runner, 4)
    train(resumed_runner, 4)
    own, again = (all_weights(each, torch.float32) for each in (backend, resumed))
    if name == "plain":
        own_here = {n: t.clone() for bucket in backend.weight_source(torch.float32).buckets() for n, t in bucket}
        write_tensors(folder / f"masters_{ranks.rank}.safetensors", own_here)
    norm = masters["model.norm.weight"]
    (folder / f"result_{ranks.rank}.json").write_text(
        json.dumps(
            {
                "differences": differences,
                "has_masters": not torch.equal(norm, norm.to(torch.bfloat16).float()),
                "resumes": all(torch.equal(own[key], again[key]) for key in own),
            }
        )
    )
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    end_process(0)
