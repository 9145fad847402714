"""One of two trainer ranks that try a model in parts, of which the second cannot go on at one place or another.

Usage: `python trial_process.py MODEL FOLDER`, started by `fakes/rank_group.py`. Each writes down the verdicts.
"""

import json
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from rank_process import join

from pipelinerl.finetune import model
from pipelinerl.finetune.main import end_process
from pipelinerl.finetune.policy import PolicyModel, decoder_layers
from pipelinerl.finetune.ranks import RankFault
from pipelinerl.finetune.sharded_model import loaded_in_parts, whole_for_trial

NO_ROOM = torch.OutOfMemoryError("no room")


@contextmanager
def fails_in(layer):
    """Its outputs have no room: the next layer is not gathered here."""

    def fail(*_):
        raise NO_ROOM

    handle = layer.register_forward_hook(fail)
    yield
    handle.remove()


def main(path, folder):
    torch.set_num_threads(1)
    ranks = join("cpu", timeout_s=60)
    with loaded_in_parts(ranks):
        policy = PolicyModel(model.load_language_model(path, "sdpa"))

    def verdict(fault=None):
        with fault if fault is not None and not ranks.is_first else nullcontext():
            try:
                with whole_for_trial(policy, ranks):
                    return model.find_fault(policy, True, 1, ranks)
            except RankFault as error:
                return str(error)

    verdicts = {
        "none": verdict(),
        "layer": verdict(fails_in(decoder_layers(policy)[0])),
        "tolerance": verdict(mock.patch.dict(model._TOLERANCE, {torch.float32: -1.0})),
        "room": verdict(mock.patch.object(torch, "empty_like", side_effect=NO_ROOM)),
        "afterwards": verdict(),
    }
    (folder / f"verdicts_{ranks.rank}.json").write_text(json.dumps(verdicts))
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    end_process(0)
