"""One trainer rank that holds a share of a mixture of experts, and sends the whole of it.

Usage: `python expert_process.py BACKEND FAMILY FOLDER`, started by `fakes/rank_group.py`.
"""

import sys
from pathlib import Path

import torch
from fakes.families import random_model
from rank_process import CHOICES, full_weights, join, make_backend

from pipelinerl.config import RunConfig
from pipelinerl.finetune.main import end_process
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.tensor_files import write_tensors


def main(name, family, folder):
    torch.set_num_threads(1)
    ranks = join("cpu")
    config = RunConfig(output_dir=str(folder), finetune=dict(max_train_steps=4), **CHOICES[name])
    backend = make_backend(PolicyModel(random_model(family)), config, ranks)
    weights = full_weights(backend)
    if ranks.is_first:
        write_tensors(folder / "sent.safetensors", weights)
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    end_process(0)
