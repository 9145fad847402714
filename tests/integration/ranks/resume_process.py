"""One trainer rank that trains and saves, or goes on from what another number of ranks has saved.

Usage: `python resume_process.py BACKEND FOLDER STEPS`, started by `fakes/rank_group.py`. A state is saved after step 2,
if there is none.
"""

import json
import sys
from pathlib import Path

import torch
from fakes.finetune_kit import Kit
from rank_process import CHOICES, full_weights, join, make_backend

from pipelinerl.config import RunConfig
from pipelinerl.finetune.checkpoint import CheckpointStore, TrainerState
from pipelinerl.finetune.main import end_process
from pipelinerl.finetune.step import StepRunner
from pipelinerl.finetune.tensor_files import write_tensors
from pipelinerl.rl.packing import make_plan


def main(name, folder, last_step):
    torch.set_num_threads(1)
    kit, ranks = Kit(), join("cpu")
    # A large epsilon: else Adam makes rounding of tiny gradients large.
    finetune = dict(
        seq_length=128, learning_rate=1e-2, adam_epsilon=1e-2, weight_decay=0.1, num_warmup_steps=0, max_train_steps=9
    )
    config = RunConfig(output_dir=str(folder), finetune=finetune, **CHOICES[name])
    policy = kit.policy(tied=True)
    store = CheckpointStore(folder / "training_state", ranks)
    is_new = not (folder / "training_state").exists()
    ranks.barrier()
    if not is_new:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.1)
    backend = make_backend(policy, config, ranks)
    runner = StepRunner(backend, config.finetune, ranks)
    state = store.restore(backend) or TrainerState()
    before = full_weights(backend)
    steps = {}
    for step in range(state.step + 1, last_step + 1):
        samples = kit.samples(24, seed=step)
        # Always as the ranks that saved would have planned it.
        plan = make_plan([len(sample.input_ids) for sample in samples], 2, 128, True)
        result = runner.run(kit.batch(samples, step=step, plan=plan))
        steps[step] = [result.metrics["finetune/loss"], result.grad_norm]
        if is_new and step == 2:
            store.save(TrainerState(step=step), backend)
            before = full_weights(backend)
    if ranks.is_first:
        write_tensors(folder / f"weights_{ranks.world_size}_{int(is_new)}.safetensors", before)
        (folder / f"steps_{ranks.world_size}_{int(is_new)}.json").write_text(json.dumps(steps))
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    end_process(0)
