"""What one run of `benchmark_splits.py` measured: its metrics as one row, the GPUs' memory, and the Markdown table."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

#: Every process of a split has this variable, so that memory on a GPU can be given to it.
SPLIT_KEY = "PIPELINERL_BENCHMARK_SPLIT"
PHASES = ("pause", "start", "transfer", "load", "resume")
_SAMPLE_S = 0.5
_COMMAND_LIMIT_S = 20.0


class GPUSampler:
    """Asks `nvidia-smi` twice a second while it is open; nothing where there is none. A context manager.

    Attributes:
        cards: most memory in use on each GPU, MiB, by index. Other splits on the same cards count as well.
        processes: most memory of each of this split's processes, MiB, by job, process id and GPU.
        usage: when, and how busy each GPU was in percent, by index.
    """

    def __init__(self, split: str) -> None:
        self._split = split
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._jobs: dict[int, str | None] = {}
        self.cards: dict[int, float] = {}
        self.processes: dict[str, float] = {}
        self.usage: list[tuple[float, dict[int, float]]] = []

    def __enter__(self) -> GPUSampler:
        if shutil.which("nvidia-smi"):
            self._thread = threading.Thread(target=self._run, name="nvidia-smi", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * _COMMAND_LIMIT_S)

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            # A sample that is not there costs nothing but itself.
            with contextlib.suppress(subprocess.SubprocessError, OSError, ValueError):
                self.take(
                    ask("--query-gpu=index,uuid,memory.used,utilization.gpu"),
                    ask("--query-compute-apps=gpu_uuid,pid,used_memory"),
                    time.time(),
                )

    def take(self, cards: str, processes: str, now: float) -> None:
        """Add one sample, as `nvidia-smi` prints it (CSV without header and units)."""
        rows = [[word.strip() for word in line.split(",")] for line in cards.splitlines() if line.strip()]
        index_of = {uuid: int(index) for index, uuid, _, _ in rows}
        for index, _, memory, _ in rows:
            self.cards[int(index)] = max(self.cards.get(int(index), 0.0), float(memory))
        self.usage.append((now, {int(index): float(busy) for index, _, _, busy in rows if _is_number(busy)}))
        for line in processes.splitlines():
            words = [word.strip() for word in line.split(",")]
            if len(words) != 3 or not _is_number(words[2]) or words[0] not in index_of:
                continue
            job = self._job_of(int(words[1]))
            if job is not None:
                key = f"{job} (pid {words[1]}) on GPU {index_of[words[0]]}"
                self.processes[key] = max(self.processes.get(key, 0.0), float(words[2]))

    def idle_s(self, begin: float) -> dict[int, float]:
        """Seconds that each GPU did nothing from `begin` (as of time.time()) on."""
        idle: dict[int, float] = {}
        times = [item for item in self.usage if item[0] >= begin]
        for (before, _), (now, busy) in itertools.pairwise(times):
            for index, percent in busy.items():
                idle[index] = idle.get(index, 0.0) + (now - before) * (1.0 - percent / 100.0)
        return idle

    def _job_of(self, pid: int) -> str | None:
        """The job of this split that a process belongs to; None: it is none of ours, or cannot be looked at."""
        if pid not in self._jobs:
            environ: Mapping[str, str] = {}
            with contextlib.suppress(psutil.Error):
                environ = psutil.Process(pid).environ()
            own = environ.get(SPLIT_KEY) == self._split
            self._jobs[pid] = environ.get("PIPELINERL_JOB", "other") if own else None
        return self._jobs[pid]


def ask(query: str) -> str:
    """One table of `nvidia-smi`."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=True).stdout


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, also of a run that was cut short in the middle of a line."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for line in (run_dir / "metrics.jsonl").read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def figures(
    rows: Sequence[Mapping[str, Any]],
    ranks: int,
    server_gpus: int,
    parameters: int | None,
    settings: Mapping[str, float],
) -> dict[str, Any]:
    """The figures of one run, from its rows; None where there is nothing to tell.

    The first step is left out of rates if there are others: everything is warmed up in it. Update times are medians
    over the updates behind the first one (version 0), in seconds, each phase on its slowest server.

    Args:
        ranks, server_gpus: GPUs that train, and those of all servers.
        parameters: of the model, None if they are not known.
        settings: `bytes_per_weight` on the wire, and `peak_tflops` of a card (0: no MFU).
    """
    steps = [row for row in rows if "finetune/step_s" in row]
    steady = steps[1:] or steps
    updates = [row for row in rows if row.get("source") == "weight_update"]
    later = [row for row in updates if row.get("step", 0) > 0] or updates

    def total(name: str) -> float:
        return sum(float(row.get(name, 0.0)) for row in steady)

    def largest(name: str) -> float | None:
        return max((float(row[name]) for row in rows if name in row), default=None)

    trained_s, whole_s, tokens = total("finetune/train_s"), total("finetune/step_s"), total("finetune/tokens")
    phases = {name: median(row.get(f"weight_update/{name}_s") for row in later) for name in (*PHASES, "total")}
    paused = [sum(float(row.get(f"weight_update/{name}_s", 0.0)) for name in PHASES) for row in later]
    sent_s = phases["transfer"]
    rate = tokens / trained_s if trained_s else None
    found: dict[str, Any] = {
        "steps": len(steps),
        "updates": len(updates),
        "samples_per_s": total("finetune/samples") / whole_s if whole_s else None,
        "trainer_tokens_per_s_in_training": rate,
        "trainer_tokens_per_s": tokens / whole_s if whole_s else None,
        "step_s": median(row["finetune/step_s"] for row in steady),
        "train_s": median(row.get("finetune/train_s") for row in steady),
        "update_s": phases,
        "paused_ms": None if not paused else 1000 * statistics.median(paused),
        "trainer_idle_gpu_s": ranks * total("finetune/idle_s") if steady else None,
        "servers_paused_gpu_s": server_gpus * sum(paused),
        "waiting_for_data_s": total("finetune/wait_data_s") if steady else None,
        "changing_turns_s": total("finetune/switch_s") if steady else None,
        "trainer_peak_gib": largest("finetune/gpu_memory_peak_gib"),
        "trainer_reserved_peak_gib": largest("finetune/gpu_memory_reserved_peak_gib"),
        "probe_abs_diff_max": largest("weight_update/logprob_abs_diff_mean"),
        "lag_max_versions": largest("finetune/lag_max_versions"),
        "parameters": parameters,
    }
    if parameters and sent_s:
        found["transfer_gb_per_s"] = parameters * settings["bytes_per_weight"] / sent_s / 1e9
    if parameters and rate and settings["peak_tflops"]:
        found["mfu"] = 6 * parameters * rate / (ranks * settings["peak_tflops"] * 1e12)
    return found


def median(values: Iterable[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return statistics.median(known) if known else None


def begin_of_training(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """When the first weights were there, as of time.time(); None: they never were."""
    return min((float(row["time"]) for row in rows if row.get("source") == "weight_update"), default=None)


def parameters_of(model: Path) -> int | None:
    """Number of weights in the safetensors files of a model's folder; None if there are none."""
    from safetensors import safe_open

    count = 0
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                size = 1
                for length in tensors.get_slice(name).get_shape():
                    size *= length
                count += size
    return count or None


COLUMNS = (
    ("split", "split"),
    ("status", "status"),
    ("steps", "steps"),
    ("samples/s", "samples_per_s"),
    ("trainer tokens/s", "trainer_tokens_per_s"),
    ("the same while it trains", "trainer_tokens_per_s_in_training"),
    ("pause / start / transfer / load / resume, ms", "update_s"),
    ("paused, ms", "paused_ms"),
    ("GB/s", "transfer_gb_per_s"),
    ("trainer idle, GPU s", "trainer_idle_gpu_s"),
    ("changing turns, s", "changing_turns_s"),
    ("cards idle, s", "cards_idle_s"),
    ("rank 0 peak, GiB", "trainer_peak_gib"),
    ("cards' peak, GiB", "cards_peak_gib"),
    ("probe", "probe_abs_diff_max"),
    ("error", "error"),
)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each split."""
    lines = ["| " + " | ".join(title for title, _ in COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(cell(row.get(key)) for _, key in COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """A figure as a table shows it; the phases of an update in milliseconds, values by card in their order."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        if "pause" in value:
            return " / ".join("-" if value[name] is None else f"{1000 * value[name]:.1f}" for name in PHASES)
        return ", ".join(f"{amount:.1f}" for _, amount in sorted(value.items()))
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value).replace("|", "/").replace("\n", " ")
