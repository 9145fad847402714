"""One trainer rank of the tests with several processes: trains on fixed batches and writes down what it got.

Usage: `python rank_process.py BACKEND FOLDER DEVICE`, started by `fakes/rank_group.py`.
"""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from fakes.finetune_kit import Kit
from fakes.static_pool import StaticPool
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from pipelinerl.config import RunConfig
from pipelinerl.config.schedule import EvaluationSchedule
from pipelinerl.finetune.backends import create_backend
from pipelinerl.finetune.best_model import BestKeeper, BestModel
from pipelinerl.finetune.checkpoint import CheckpointStore, TrainerState
from pipelinerl.finetune.main import end_process
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.ranks import start_ranks
from pipelinerl.finetune.step import StepRunner, reduce_metrics
from pipelinerl.finetune.tensor_files import write_tensors
from pipelinerl.finetune.weight_sync import WeightSync
from pipelinerl.rl.packing import make_plan

CHOICES = {
    "plain": {},
    "zero1": {"backend": {"type": "deepspeed", "config": "deepspeed_stage1_bf16"}},
    "zero2": {"backend": {"type": "deepspeed", "config": "deepspeed_stage2_fp32"}},
    "zero3": {"backend": {"type": "deepspeed", "config": "deepspeed_stage3_fp32"}},
    "zero2_offload": {"backend": {"type": "deepspeed", "config": "deepspeed_stage2_bf16_offload"}},
    "zero3_offload": {"backend": {"type": "deepspeed", "config": "deepspeed_stage3_bf16_offload"}},
    "fsdp": {"backend": {"type": "fsdp"}},
}


def join(device, timeout_s=300):
    return start_ranks(os.environ, device, timeout_s, Path(os.environ["TEST_MEETING_FILE"]))


def gradients(name, backend):
    """The step's gradient of every parameter, whole, before the update."""
    named = list(backend.policy.named_parameters())
    if name.startswith("zero"):
        from deepspeed.utils import safe_get_full_grad

        return {key: safe_get_full_grad(parameter) for key, parameter in named}
    return {key: p.grad.full_tensor() if name == "fsdp" else p.grad for key, p in named}


def make_backend(policy, config, ranks):
    """A backend as in a process of its own: accelerate has one state in a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return create_backend(policy, config, ranks)


@contextmanager
def without_step(backend):
    """DeepSpeed's engine takes no step at the end of the last backward; yields what takes it."""
    engine = backend.module
    if not hasattr(engine, "zero_optimization_stage"):
        yield lambda: None
        return
    step, engine.step = engine.step, lambda: None
    try:
        yield step
    finally:
        engine.step = step


def main(name, folder, device):
    torch.set_num_threads(1)
    kit = Kit()
    ranks = join(device)
    config = RunConfig(
        output_dir=str(folder),
        finetune=dict(
            seq_length=128,
            learning_rate=1e-2,
            num_warmup_steps=0,
            max_train_steps=4,
            gradient_clipping_threshold=0.5,
        ),
        **CHOICES[name],
    )
    runner, feed, backend = build(kit, config, ranks)

    def batch(step):
        samples = kit.samples(64, seed=step, masked_every=9)
        micro_batches = make_plan([len(s.input_ids) for s in samples], 1, 128, True)[0]
        # Uneven on purpose: the second rank has to fill up with sentinels.
        return kit.batch(samples, step=step, plan=[micro_batches[:-2], micro_batches[-2:]])

    reduced = []
    if name == "plain":

        def count(state, bucket):
            reduced.append(bucket.buffer().numel())
            return allreduce_hook(state, bucket)

        backend.module.register_comm_hook(None, count)
    with without_step(backend) as take_step:
        metrics, _ = runner.accumulate(batch(1))
    write_tensors(folder / f"gradients_{ranks.rank}.safetensors", gradients(name, backend))
    take_step()
    norms, once = [backend.step()], sum(reduced)
    deliveries = [feed.send(1, [[1, 2, 3, 4, 5], [9, 8, 7]])]
    store = CheckpointStore(folder / "training_state", ranks)
    store.save(TrainerState(step=1, samples_processed=64), backend)
    norms.append(runner.run(batch(2)).grad_norm)
    write_tensors(folder / f"uninterrupted_{ranks.rank}.safetensors", full_weights(backend))

    tokenizer = folder / "tokenizer"
    if ranks.is_first:
        kit.tokenizer(tokenizer)

    def exported():
        return backend.weight_source(torch.float32, with_value_head=True)

    exporter = ModelExporter(folder, str(tokenizer), ranks)
    exporter.export(2, backend.policy, exported())
    results = kit.reader([]) if ranks.is_first else None
    best = BestModel(folder, "success_rate", 0.5)
    keeper = BestKeeper(ranks, EvaluationSchedule(1), backend, exporter, best, results, 0)
    keeper.begin(2)
    keeper.offer(2)

    # A fresh process in miniature: another model object takes the saved state and repeats step 2.
    runner, feed, backend = build(kit, config, ranks, scramble=True)
    state = store.restore(backend)
    norms.append(runner.run(batch(2)).grad_norm)
    write_tensors(folder / f"resumed_{ranks.rank}.safetensors", full_weights(backend))
    (folder / f"result_{ranks.rank}.json").write_text(
        json.dumps(
            {
                "grad_norms": norms,
                "loss": reduce_metrics(metrics, ranks)["finetune/loss"],
                "probe": deliveries[0].probe_abs_diff,
                "micro_batches": [len(m.indices) for m in runner.micro_batches(batch(1))],
                "restored_step": state.step,
                "reduced": once,
            }
        )
    )
    ranks.close()


def build(kit, config, ranks, scramble=False):
    policy = kit.policy().to(ranks.device)
    if scramble:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.1)
    backend = make_backend(policy, config, ranks)
    runner = StepRunner(backend, config.finetune, ranks)
    pool = StaticPool(kit.publisher()) if ranks.is_first else None
    return runner, WeightSync(backend, ranks, pool), backend


def full_weights(backend):
    source = backend.weight_source(torch.float32)
    if source.announce is None:
        return {name: tensor.clone() for bucket in source.buckets() for name, tensor in bucket}
    if backend._ranks.is_first:
        weights = {name: tensor.clone() for bucket in source.buckets() for name, tensor in bucket}
        source.done()
        return weights
    source.follow()
    return {}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    end_process(0)
