"""No process of a run grows: 500 steps of launcher, actor, worker, preprocessor and trainer on a fake server."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import pytest
from fakes.random_model import save_random_model
from fakes.scoring_run import ScoringServer, end_run, logs_of, start_run

from pipelinerl.config.resources import FileStreams
from pipelinerl.records import StepDone, TrainerMessage
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.hub import StreamHub

STEPS = 500
# Buffers, caches of tokenized prompts and the allocator's arenas have found their size by then.
WARM_STEP = 150
# What a process may gain over the other 350 steps: 30 kB a step would show.
GROWTH_BYTES = 10 * 2**20


def _memory(launcher: int) -> dict[str, int]:
    """Private and shared bytes of the launcher and its descendants, by what they run."""
    found = {}
    parent = psutil.Process(launcher)
    for process in [parent, *parent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            name = next((word for word in words if word.startswith("pipelinerl.")), "launcher")
            found[f"{name} {process.pid}"] = process.memory_info().rss
    return found


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_o6_memory_of_every_process_is_flat_over_500_steps(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model")
    seen: dict[int, dict[str, int]] = {}
    with ScoringServer() as server:
        launcher = start_run(
            tmp_path,
            model,
            server,
            finetune={"max_train_steps": STEPS, "learning_rate": 1e-5},
        )
        step, deadline = 0, time.monotonic() + 2300
        try:
            reader = StreamHub(FileStreams(), RunDir(tmp_path / "run")).reader("trainer", "finetune_0", TrainerMessage)
            while step < STEPS and launcher.poll() is None and time.monotonic() < deadline:
                for entry in reader.read(10):
                    if isinstance(entry.record, StepDone):
                        step = entry.record.step
                if step >= WARM_STEP and step // 25 not in seen:
                    seen[step // 25] = _memory(launcher.pid)
        finally:
            code = end_run(launcher, max(1.0, deadline - time.monotonic()))
    assert code == 0, logs_of(tmp_path)
    assert step == STEPS
    first, last = seen[min(seen)], seen[max(key for key in seen if key < STEPS // 25)]
    growth = {name: last[name] - first[name] for name in first}
    assert len(growth) >= 5, f"launcher, actor, its worker, preprocessor, trainer: {sorted(first)}"
    assert max(growth.values()) < GROWTH_BYTES, {name: f"{grown / 2**20:.1f} MiB" for name, grown in growth.items()}
