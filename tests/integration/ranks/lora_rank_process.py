"""One of several trainer ranks with adapters.

Usage: `python lora_rank_process.py BACKEND FOLDER`, started by `fakes/rank_group.py`.
"""

import sys
from pathlib import Path

import torch
from fakes.finetune_kit import Kit
from rank_process import CHOICES, join, make_backend

from pipelinerl.config import RunConfig
from pipelinerl.config.finetune import LoraConfig
from pipelinerl.finetune.checkpoint import CheckpointStore, TrainerState
from pipelinerl.finetune.lora import add_adapters
from pipelinerl.finetune.main import end_process
from pipelinerl.finetune.model import ReferenceModel
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.step import StepRunner
from pipelinerl.finetune.tensor_files import write_tensors
from pipelinerl.rl.packing import make_plan


class Trainer:
    """A policy with adapters on one rank, and a KL term against the model without them."""

    def __init__(self, kit, ranks, name="plain"):
        torch.set_num_threads(1)
        # Adam divides tiny gradients by themselves; a large epsilon keeps rounding small.
        settings = dict(
            seq_length=128,
            learning_rate=1e-2,
            num_warmup_steps=0,
            max_train_steps=4,
            adam_epsilon=1e-2,
            lr_scheduler_type="linear",
            rl={"kl_coef": 0.1},
        )
        config = RunConfig(output_dir="unused", finetune=settings, **CHOICES[name])
        self.kit, self.ranks = kit, ranks
        policy = kit.policy()
        # Ranks begin with different adapters on purpose: the first rank's must win.
        torch.manual_seed(ranks.rank)
        add_adapters(policy, LoraConfig(enabled=True, r=4, sync="adapter"), "base", one_dtype=name == "fsdp")
        reference = ReferenceModel(policy, ranks.device)
        self.backend = make_backend(policy, config, ranks)
        finetune = config.finetune
        self.runner = StepRunner(self.backend, finetune, ranks, reference=reference)

    def step(self, step):
        samples = self.kit.samples(17, 1)
        plan = make_plan([len(sample.input_ids) for sample in samples], self.ranks.world_size, 128, True)
        return self.runner.run(self.kit.batch(samples, step=step, plan=plan)).metrics["rl/kl_reference"]

    def weights(self):
        """What servers get; empty on ranks that only take part in gathering it."""
        return self.received(self.backend.weight_source(torch.float32))

    def adapter(self):
        """The same for servers that hold the frozen model."""
        return self.received(self.backend.adapter_source(torch.float32))

    def received(self, source):
        if source.announce is not None and not self.ranks.is_first:
            source.follow()
            return {}
        found = {name: tensor.clone() for bucket in source.buckets() for name, tensor in bucket}
        if hasattr(source, "done"):
            source.done()
        return found


def train(kit, ranks):
    """Merged weights behind two steps, and the KL term of each."""
    trainer = Trainer(kit, ranks)
    kl = [trainer.step(step) for step in (1, 2)]
    return trainer.weights(), kl


def main(name, folder):
    kit = Kit()
    ranks = join("cpu")
    trainer = Trainer(kit, ranks, name)
    kl = [trainer.step(step) for step in (1, 2)]
    write_tensors(folder / f"weights_{ranks.rank}.safetensors", trainer.weights() | {"kl": torch.tensor(kl)})
    write_tensors(folder / f"adapter_{ranks.rank}.safetensors", trainer.adapter())
    tokenizer = folder / "tokenizer"
    if ranks.is_first:
        kit.tokenizer(tokenizer)
    exporter = ModelExporter(folder, str(tokenizer), ranks)
    backend = trainer.backend
    exporter.export(2, backend.policy, backend.weight_source(torch.float32, with_value_head=True))
    CheckpointStore(folder / "training_state", ranks).save(TrainerState(step=2), backend)
    trainer.step(3)
    write_tensors(folder / f"uninterrupted_{ranks.rank}.safetensors", trainer.weights())
    again = Trainer(kit, ranks, name)
    CheckpointStore(folder / "training_state", ranks).restore(again.backend)
    again.step(3)
    write_tensors(folder / f"resumed_{ranks.rank}.safetensors", again.weights())
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    end_process(0)
