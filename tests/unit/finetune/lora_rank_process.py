"""One of two trainer ranks with adapters: `python lora_rank_process.py FOLDER`, started by `fakes/rank_group.py`."""

import importlib.util
import os
import sys
from pathlib import Path

import torch

from pipelinerl.config.finetune import LoraConfig
from pipelinerl.finetune.backends.plain import PlainBackend
from pipelinerl.finetune.backends.tensor_files import write_tensors
from pipelinerl.finetune.lora import add_adapters
from pipelinerl.finetune.optimizer import schedule_of
from pipelinerl.finetune.ranks import start_ranks
from pipelinerl.finetune.reference import ReferenceModel
from pipelinerl.finetune.step import StepRunner
from pipelinerl.rl.packing import make_plan


def kit_module():
    spec = importlib.util.spec_from_file_location("finetune_kit", Path(__file__).with_name("conftest.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["finetune_kit"] = module
    spec.loader.exec_module(module)
    return module


def train(kit, ranks):
    """Two steps with adapters and a KL term against the model without them; the merged weights behind them."""
    torch.set_num_threads(1)
    # Adam divides tiny gradients by themselves; a large epsilon keeps rounding small.
    config = kit.config(rl={"kl_coef": 0.1}, adam_epsilon=1e-2)
    policy = kit.policy()
    # Ranks begin with different adapters on purpose: the first rank's must win.
    torch.manual_seed(ranks.rank)
    add_adapters(policy, LoraConfig(enabled=True, r=4), "base")
    reference = ReferenceModel(policy, ranks.device)
    backend = PlainBackend(policy, config, ranks)
    runner = StepRunner(backend, config, ranks, schedule_of(config), reference=reference)
    samples = kit.samples(17, 1)
    plan = make_plan([len(scored.sample.input_ids) for scored in samples], ranks.world_size, 128, True)
    for step in (1, 2):
        runner.run(kit.batch(samples, step=step, plan=plan))
    source = backend.weight_source(torch.float32)
    return {name: tensor.clone() for bucket in source.buckets() for name, tensor in bucket}


if __name__ == "__main__":
    ranks = start_ranks(os.environ, "cpu", 120, Path(os.environ["TEST_MEETING_FILE"]))
    write_tensors(Path(sys.argv[1]) / f"weights_{ranks.rank}.safetensors", train(kit_module().Kit(), ranks))
    ranks.close()
