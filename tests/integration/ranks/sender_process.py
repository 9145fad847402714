"""One of two trainer ranks that send a sharded model of 200 MB; writes the memory that a pass over the weights takes.

Usage: `python sender_process.py BACKEND FOLDER`, started by `fakes/rank_group.py`.
"""

import json
import sys
from pathlib import Path

import torch
from rank_process import CHOICES, join
from transformers import Qwen2Config, Qwen2ForCausalLM

from pipelinerl.config import RunConfig
from pipelinerl.finetune.backends import create_backend
from pipelinerl.finetune.main import end_process
from pipelinerl.finetune.policy import PolicyModel

MIB = 2**20


def model():
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def status_mib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def pass_mib(backend, ranks, bucket_bytes):
    """Peak memory of one pass above what was in use before it; the bytes that it sent; the largest bucket."""
    backend.bucket_bytes = bucket_bytes
    source = backend.weight_source(torch.float32)
    ranks.barrier()
    # Linux: the peak so far is forgotten.
    Path("/proc/self/clear_refs").write_text("5")
    before = status_mib("VmRSS")
    sent = largest = 0
    if ranks.is_first:
        for bucket in source.buckets():
            size = sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
            sent, largest = sent + size, max(largest, size)
        source.done()
    else:
        source.follow()
    ranks.barrier()
    return {"peak": status_mib("VmHWM") - before, "sent": sent / MIB, "largest": largest / MIB}


def main(name, folder):
    torch.set_num_threads(1)
    ranks = join("cpu")
    config = RunConfig(output_dir=str(folder), **CHOICES[name])
    backend = create_backend(PolicyModel(model()), config, ranks)
    found = {"buckets": pass_mib(backend, ranks, 8 * MIB), "at_once": pass_mib(backend, ranks, 2**40)}
    (folder / f"memory_{ranks.rank}.json").write_text(json.dumps(found))
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    end_process(0)
