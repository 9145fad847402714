"""One of two ranks of which the first fails while the second waits for it.

Usage: `python failing_process.py FOLDER DEVICE`, started by `fakes/rank_group.py`. Each writes down how long it took
to get out, and with which error.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

from pipelinerl.finetune.main import end_process
from pipelinerl.finetune.ranks import joined_ranks


def main(folder, device):
    meeting = Path(os.environ["TEST_MEETING_FILE"])
    started, error = time.monotonic(), None
    try:
        with joined_ranks(os.environ, device, 600, meeting) as ranks:
            # The default group has been used, as in a run.
            tensor = torch.ones(1, device=ranks.device)
            torch.distributed.all_reduce(tensor)
            assert float(tensor) == 2
            started = time.monotonic()
            if ranks.is_first:
                raise ValueError("the first rank fails")
            ranks.broadcast(0)
    except (ValueError, RuntimeError) as failure:
        error = type(failure).__name__
    result = {"error": error, "seconds": time.monotonic() - started}
    (folder / f"result_{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    end_process(0)
