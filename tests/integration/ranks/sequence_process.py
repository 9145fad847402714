"""One trainer rank that trains, scores, sends, exports, saves and restores in every order of two acts.

Usage: `python sequence_process.py BACKEND FOLDER`, started by `fakes/rank_group.py`. The model is large against the
buckets of its ZeRO-3 configuration, as one of billions of parameters is against the usual ones: parameters are
fetched ahead of their use and let go behind it, so what one act leaves behind shows in the next.
"""

import itertools
import json
import sys
from pathlib import Path

import torch
from fakes.finetune_kit import Kit
from rank_process import CHOICES, full_weights, join, make_backend
from transformers import Qwen2Config, Qwen2ForCausalLM

from pipelinerl.config import RunConfig
from pipelinerl.config.finetune import LoraConfig
from pipelinerl.finetune.attention import SEGMENTED_ATTENTION, register_own_attention
from pipelinerl.finetune.checkpoint import CheckpointStore, TrainerState
from pipelinerl.finetune.lora import add_adapters
from pipelinerl.finetune.main import end_process
from pipelinerl.finetune.model import ReferenceModel
from pipelinerl.finetune.model_check import token_batch
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.policy import PolicyModel
from pipelinerl.finetune.step import StepRunner
from pipelinerl.finetune.tensor_files import read_tensors, write_tensors
from pipelinerl.rl.packing import make_plan

#: A layer of the model has about 37,000 elements: less than one of them is fetched ahead at once.
SMALL_BUCKETS = {
    "stage": 3,
    "stage3_prefetch_bucket_size": 5000,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
}


def model():
    register_own_attention()
    config = Qwen2Config(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        attn_implementation=SEGMENTED_ATTENTION,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        found = Qwen2ForCausalLM(config).train()
    found.gradient_checkpointing_enable({"use_reentrant": False})
    return found


class Trainer:
    """One rank. Every act is one of all ranks, and notes on the first rank what it came to."""

    def __init__(self, name, kit, folder, ranks):
        self._kit, self._folder, self._ranks = kit, folder, ranks
        self._steps = self._saves = self._exports = 0
        self.notes = {}
        # Adam divides tiny gradients by themselves; a large epsilon keeps rounding small.
        settings = dict(seq_length=128, learning_rate=1e-2, num_warmup_steps=0, max_train_steps=100, adam_epsilon=1e-2)
        kl = 0.1 if name.endswith("_lora") else 0.0
        choice = dict(CHOICES[name.removesuffix("_lora")])
        if "zero3" in name:
            file = folder / f"deepspeed_{ranks.rank}.json"
            file.write_text(json.dumps({"zero_optimization": SMALL_BUCKETS}))
            choice["backend"] = {"type": "deepspeed", "config": str(file)}
        config = RunConfig(output_dir=str(folder), finetune={**settings, "rl": {"kl_coef": kl}}, **choice)
        policy = PolicyModel(model())
        reference = None
        if name.endswith("_lora"):
            # Another model runs through the same module before every step: the policy without its adapters.
            torch.manual_seed(5)
            add_adapters(policy, LoraConfig(enabled=True, r=4), "base", one_dtype="fsdp" in name)
            reference = ReferenceModel(policy, ranks.device)
        self.backend = make_backend(policy, config, ranks)
        finetune = config.finetune
        self._runner = StepRunner(self.backend, finetune, ranks, reference=reference)
        self._store = CheckpointStore(folder / "training_state", ranks)
        if ranks.is_first:
            kit.tokenizer(folder / "tokenizer")
        self._exporter = ModelExporter(folder, str(folder / "tokenizer"), ranks)

    def run(self):
        """Every act behind every other and behind itself, from a state that every act finds ready."""
        acts = (self.train, self.score, self.send, self.export, self.save, self.restore)
        for act in (self.train, self.train, self.save, *itertools.chain(*itertools.product(acts, acts))):
            act()

    def train(self):
        self._steps += 1
        samples = self._kit.samples(12, seed=self._steps)
        plan = make_plan([len(s.input_ids) for s in samples], self._ranks.world_size, 128, True)
        self._note("norm", torch.tensor(self._runner.run(self._kit.batch(samples, self._steps, plan)).grad_norm))

    @torch.no_grad()
    def score(self):
        batch = token_batch([[1, 2, 3, 4, 5], [9, 8, 7]], torch.device("cpu"))
        layout = self.backend.policy.layout_of(batch)
        self._note("logprobs", self.backend.forward(batch, layout, 1.0).logprobs.clone())

    def send(self):
        self._note_weights(full_weights(self.backend))

    def export(self):
        self._exports += 1
        source = self.backend.weight_source(torch.float32, with_value_head=True)
        folder = self._exporter.export(self._exports, self.backend.policy, source)
        if self._ranks.is_first:
            self._note_weights(read_tensors(folder / "model.safetensors"))

    def save(self):
        self._saves += 1
        self._store.save(TrainerState(step=self._saves), self.backend)

    def restore(self):
        self._store.restore(self.backend)

    def _note_weights(self, weights):
        if self._ranks.is_first:
            self._note("weights", torch.cat([tensor.flatten() for _, tensor in sorted(weights.items())]))

    def _note(self, what, value):
        self.notes[f"{len(self.notes):03d} {what}"] = value


def main(name, folder):
    torch.set_num_threads(1)
    ranks = join("cpu")
    trainer = Trainer(name, Kit(), folder, ranks)
    trainer.run()
    write_tensors(folder / f"notes_{ranks.rank}.safetensors", trainer.notes)
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    end_process(0)
