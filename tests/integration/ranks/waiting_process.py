"""One of two ranks that tell each other things: the second waits while the first takes its time.

Usage: `python waiting_process.py FOLDER DEVICE`, started by `fakes/rank_group.py`. On `meta` tensors cannot be read:
whatever goes over the device fails. On `cuda` the first rank writes down how busy the waiting rank's GPU is.
"""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pipelinerl.finetune.main import end_process
from pipelinerl.finetune.ranks import Ranks, start_ranks


def join(device):
    meeting = Path(os.environ["TEST_MEETING_FILE"])
    if device == "cuda":
        return start_ranks(os.environ, device, 300, meeting)
    ranks = start_ranks(os.environ, "cpu", 300, meeting)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=300))
    return Ranks(ranks.rank, ranks.world_size, torch.device(device), group)


def busy_percent(card):
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", str(card)]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def main(folder, device):
    ranks = join(device)
    ranks.barrier()
    busy = None
    if device == "cuda" and ranks.is_first:
        # nvidia-smi looks back over up to a second.
        time.sleep(2.5)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
        busy = busy_percent(visible.split(",")[1])
    got = {
        "broadcast": ranks.broadcast(7 if ranks.is_first else -1),
        "sum": ranks.sum([1.0, 0.5 + ranks.rank]),
        "max": ranks.max([ranks.rank, -ranks.rank]),
        "min": ranks.min([ranks.rank, -ranks.rank]),
        "nothing": ranks.sum([]),
        "busy_percent": busy,
    }
    (folder / f"result_{ranks.rank}.json").write_text(json.dumps(got))
    ranks.barrier()
    ranks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    end_process(0)
