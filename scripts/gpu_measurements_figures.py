"""The figures of one measurement, from the files that it left in its folder; some may be missing. By kind."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmark_splits_figures import begin_of_training, rows_of

SUCCESS = "evaluation/test/success_rate"
#: What a curve has besides steps and seconds.
CURVE = (
    *(SUCCESS, "finetune/reward_mean", "rl/entropy", "rl/entropy_estimate"),
    *("rl/entropy_bonus", "finetune/samples_per_s"),
    *("finetune/grad_norm", "finetune/ess", "finetune/lag_mean_versions", "finetune/lag_max_versions"),
    *("finetune/step_s", "finetune/wait_data_s", "finetune/weight_update_s", "finetune/gpu_memory_reserved_peak_gib"),
)


def figures_of(kind: str, work: Path) -> dict[str, Any]:
    """Names as a table shows them, and values."""
    return _KINDS[kind](work)


def run_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of a training run, from its metrics; seconds count from the first weights."""
    begin = begin_of_training(rows)
    steps = [row for row in rows if "finetune/step_s" in row]
    if begin is None or not steps:
        return {"steps": len(steps)}
    evaluations = [(float(row["time"]) - begin, float(row[SUCCESS])) for row in rows if SUCCESS in row]

    def seconds_to(success: float) -> float | None:
        return min((seconds for seconds, value in evaluations if value >= success), default=None)

    samples = sum(float(row.get("finetune/samples", 0.0)) for row in steps)
    trained_s = float(steps[-1]["time"]) - begin
    lags = [float(row["finetune/lag_max_versions"]) for row in steps if "finetune/lag_max_versions" in row]
    reserved = [float(row["finetune/gpu_memory_reserved_peak_gib"]) for row in steps if _RESERVED in row]
    return {
        "steps": len(steps),
        "training s": trained_s,
        "samples/s": samples / trained_s if trained_s > 0 else None,
        "success first": evaluations[0][1] if evaluations else None,
        "best": max((value for _, value in evaluations), default=None),
        "last": evaluations[-1][1] if evaluations else None,
        "s to 0.35": seconds_to(0.35),
        "s to 0.6": seconds_to(0.6),
        "ESS": statistics.fmean([float(row["finetune/ess"]) for row in steps if "finetune/ess" in row] or [0.0]),
        "entropy": next((row[_ENTROPY] for row in reversed(steps) if _ENTROPY in row), None),
        "lag max": max(lags, default=None),
        "trainer GiB": max(reserved, default=None),
    }


def curve_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a training run learned, a row for each step; held-out success in those where it was measured, else None.

    Returns:
        Nothing before the first weights, from which the seconds count.
    """
    begin = begin_of_training(rows)
    found: dict[int, dict[str, Any]] = {}
    for row in rows if begin is not None else ():
        if "finetune/step_s" not in row and SUCCESS not in row:
            continue
        known = found.setdefault(int(row["step"]), {"step": int(row["step"]), "seconds": None})
        # An evaluation ends some steps after the one whose version it measures.
        if "finetune/step_s" in row or known["seconds"] is None:
            known["seconds"] = round(float(row["time"]) - float(begin or 0.0), 2)
        known |= {name: row[name] for name in CURVE if name in row}
    return [{**dict.fromkeys(CURVE), **found[step]} for step in sorted(found)]


def schedule_figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """Of `benchmark_schedules.py`: medians of the one schedule that it ran, or why it failed."""
    found: dict[str, Any] = {}
    for tables in result.get("results", {}).values():
        for table in tables.values():
            if failed := table.get("failed"):
                found["error"] = "; ".join(failed)[:300]
            medians = {name: value["median"] for name, value in table.items() if isinstance(value, Mapping)}
            found |= {title: medians[name] for title, name in _SCHEDULE_COLUMNS if medians.get(name) is not None}
    return found


def split_figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """Of `benchmark_splits.py` with one split."""
    found: dict[str, Any] = {}
    for row in result.get("splits", []):
        phases = row.get("update_s") or {}
        found |= {f"{name} ms": None if phases.get(name) is None else 1000 * phases[name] for name in _PHASES}
        found |= {title: row.get(name) for title, name in _SPLIT_COLUMNS}
        if row.get("error"):
            found["error"] = str(row["error"])[:300]
    return found


def server_figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """Of `benchmark_server.py`: tokens a second of every server, named by the settings in which they differ."""
    settings = result.get("settings", {})
    varied = [
        key
        for key in next(iter(settings.values()), {})
        if len({str(server.get(key)) for server in settings.values()}) > 1
    ]
    found = {}
    for name, server in settings.items():
        which = " ".join(f"{key} {server[key]}" for key in varied)
        for load, figures in result["results"].get(name, {}).items():
            found[f"{which} {load}: tokens/s".strip()] = figures["tokens/s"]["median"]
    return found


def test_figures(report: Path) -> dict[str, Any]:
    """Of a JUnit report: how many passed, which did not."""
    counts = {"passed": 0, "skipped": 0}
    bad = []
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            bad.append(str(case.get("name")))
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return {**counts, "failed": len(bad), **({"which": " ".join(bad)} if bad else {})}


def _json_of(file: Path) -> Mapping[str, Any]:
    try:
        content: Mapping[str, Any] = json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return content


_ENTROPY = "rl/entropy_estimate"
_RESERVED = "finetune/gpu_memory_reserved_peak_gib"
_PHASES = ("pause", "transfer", "load")
_SCHEDULE_COLUMNS = (
    ("samples/s", "samples_per_s"),
    ("tokens/s", "output_tokens_per_s"),
    ("trainer busy", "trainer_busy"),
    ("server load", "server_load"),
    ("idle GPU s", "idle_gpu_s"),
    ("ESS", "ess"),
    ("lag max", "lag_max_versions"),
    ("s to success", "seconds_to_success"),
    ("success after", "success_after"),
)
_SPLIT_COLUMNS = (
    ("paused ms", "paused_ms"),
    ("GB/s", "transfer_gb_per_s"),
    ("samples/s", "samples_per_s"),
    ("probe", "probe_abs_diff_max"),
    ("rank 0 GiB", "trainer_peak_gib"),
    ("reserved GiB", "trainer_reserved_peak_gib"),
    ("cards GiB", "cards_peak_gib"),
)
_KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "run": lambda work: run_figures(rows_of(work / "run")),
    "schedules": lambda work: schedule_figures(_json_of(work / "result.json")),
    "server": lambda work: server_figures(_json_of(work / "result.json")),
    "splits": lambda work: split_figures(_json_of(work / "result.json")),
    "tests": lambda work: test_figures(work / "tests.xml") if (work / "tests.xml").exists() else {},
}
