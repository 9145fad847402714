"""One trainer rank that takes the gradient of one batch in every way it can be packed and split, with one backend.

Usage: `python matrix_process.py BACKEND FOLDER DEVICE`, started by `fakes/rank_group.py`. Writes
`<packing>-<split>_<rank>.safetensors` for every case.
"""

import sys
from pathlib import Path

import torch
from fakes.finetune_kit import Kit
from rank_process import CHOICES, gradients, join, make_backend, without_step

from pipelinerl.config import RunConfig
from pipelinerl.finetune.main import end_process
from pipelinerl.finetune.step import StepRunner
from pipelinerl.finetune.tensor_files import write_tensors
from pipelinerl.rl.packing import make_plan

SAMPLES = 64


def plans(lengths, world_size, packed):
    """Micro-batches of all ranks by name: all samples at once, 16 at once, and as many as the token budget takes."""
    quarters = [list(range(k, k + 16)) for k in range(0, SAMPLES, 16)]
    return {
        "1x64": [[list(range(SAMPLES))], *([[]] * (world_size - 1))],
        "4x16": [quarters[rank::world_size] for rank in range(world_size)],
        "token_budget": make_plan(lengths, world_size, 128, packed, rows_per_micro_batch=8),
    }


def main(name, folder, device):
    torch.set_num_threads(1)
    kit = Kit()
    ranks = join(device)
    samples = kit.samples(SAMPLES, masked_every=9)
    lengths = [len(sample.input_ids) for sample in samples]
    for packed in (True, False):
        config = RunConfig(
            output_dir=str(folder),
            finetune=dict(seq_length=128, seq_packing=packed, train_batch_size=8, num_warmup_steps=0),
            **CHOICES[name],
        )
        for split, plan in plans(lengths, ranks.world_size, packed).items():
            # A backend of its own for every case: gradients of sharded backends are not meant to be cleared by hand.
            backend = make_backend(kit.policy().to(ranks.device), config, ranks)
            runner = StepRunner(backend, config.finetune, ranks)
            with without_step(backend):
                runner.accumulate(kit.batch(samples, plan=plan))
            case = f"{'packed' if packed else 'padded'}-{split}"
            write_tensors(folder / f"{case}_{ranks.rank}.safetensors", gradients(name, backend))
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    end_process(0)
