"""`view --export`: the page and some of its answers in one file, for readers without access to the run.

The file loads and sends nothing: its scripts and styles are inline and allowed by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from pipelinerl.analysis.view.answers import Answer, Answers, Query, inert
from pipelinerl.analysis.view.rollout_index import Hit, Order
from pipelinerl.analysis.view.view_app import PAGE_MODULES, json_of, page_file
from pipelinerl.analysis.view.watched_run import Source, WatchedRun
from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.rundir.durable import replace_file

MAX_BYTES = 5_000_000
#: Groups per run, kind of rollout and order, as far as they fit.
GROUPS = 12
_ORDERS: tuple[Order, ...] = ("newest", "best", "worst")
_SOURCES: tuple[Source, ...] = ("training", "evaluation")
RULE = (
    f"This file has the rollouts of the {GROUPS} newest groups of each run, of the {GROUPS} with the best and the "
    f"{GROUPS} with the worst rollout, and as many rollouts of evaluations, as far as they fit."
)
_IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
_METRIC = re.compile(r"'([a-z]+(?:/\w+\*?)?)'")
_EXPORT = re.compile(r"^export (?=(?:async )?function|class|const)", re.MULTILINE)
#: Samples whose tokens are included.
_TOKEN_SAMPLES_PER_ROLLOUT = 2
#: Bytes for what is between the parts that are counted.
_SPARE = 20_000
#: Points per curve, of all runs together; fewer if they do not fit, down to the second number per run.
_POINTS, _FEWEST_POINTS = 600, 50
#: Modules whose charts show the metrics that they name; others can be chosen.
_CHARTS = ("overview", "compare")


def write_export(runs: Sequence[WatchedRun], file: Path) -> int:
    """Write the page about `runs` into `file`; return its size in bytes.

    Raises:
        ConfigError: the file cannot be written, or would be too large.
        StreamError: a stream cannot be read.
    """
    for run in runs:
        run.read_all()
    html = _html(_chosen(Answers(runs), runs))
    if len(html) > MAX_BYTES:
        raise ConfigError(
            "--export", str(file), f"at most {MAX_BYTES} bytes, the curves alone take {len(html)}", "Export fewer runs."
        )
    try:
        replace_file(file, html)
    except OSError as error:
        expected = f"a file that can be written ({error.strerror})"
        raise ConfigError("--export", str(file), expected, "Name another.") from error
    return len(html)


def _chosen(found: Answers, runs: Sequence[WatchedRun]) -> dict[str, Any]:
    """The answers in the file, by address."""
    answers: dict[str, Any] = {"/api/runs": found.list_runs()}
    for number, run in enumerate(runs):
        answers[f"/api/runs/{number}/overview"] = found.overview(run)
    room = MAX_BYTES - len(_html(answers)) - _SPARE
    for number, run in enumerate(runs):
        # Half of the file is for rollouts.
        curves = _curves(found, run, _POINTS // len(runs), room // 2 // len(runs))
        answers[f"/api/runs/{number}/metrics"] = list(curves["series"])
        answers[f"/api/runs/{number}/curves"] = curves
    room = MAX_BYTES - len(_html(answers)) - _SPARE
    for number, run in enumerate(runs):
        share = room // (len(runs) - number)
        for source in _SOURCES:
            # Training gets what it needs of two thirds; evaluations may have the rest.
            most = share * 2 // 3 if source == "training" else share
            used = _add_rollouts(found, run, f"/api/runs/{number}", source, most, answers)
            room, share = room - used, share - used
    return answers


def _curves(found: Answers, run: WatchedRun, points: int, room: int) -> Answer:
    """The curves of a run in at most `room` bytes: with fewer points if needed, then of fewer metrics, those that the
    page shows first."""
    shown = set(_METRIC.findall("".join(page_file(f"{name}.js") for name in _CHARTS)))
    beginnings = tuple(name[:-1] for name in shown if name.endswith("*"))
    names = sorted(found.metric_names(run), key=lambda name: not (name in shown or name.startswith(beginnings)))
    while (size := len(_embedded(curves := found.curves(run, names, points)))) > room and names:
        if points > _FEWEST_POINTS:
            points = max(points // 2, _FEWEST_POINTS)
        else:
            names = names[: max(0, min(len(names) - 1, len(names) * room // size))]
    return curves


def _add_rollouts(
    found: Answers, run: WatchedRun, base: str, source: Source, room: int, answers: dict[str, Any]
) -> int:
    """Add groups as long as they take at most `room` bytes together; return how many they take."""
    chosen: list[tuple[Hit, Answer]] = []
    used = 0
    for offset in _offsets(run, source):
        try:
            own = _group(found, run, base, source, offset)
            places = [(offset, place) for place in range(len(own[_address(base, source, offset)]["rollouts"]))]
            lines = [
                (run.index[source].at(*place), preview)
                for place, preview in zip(places, found.previews(run, source, places), strict=True)
            ]
        except StreamError:  # one that cannot be read is left out
            continue
        size = len(_embedded([own, [[hit._asdict(), preview] for hit, preview in lines]]))
        if used + size <= room:
            used += size
            answers.update(own)
            chosen += lines
    chosen.sort(key=lambda line: (-line[0].offset, line[0].place))
    rows: Answer = {"rows": inert([hit._asdict() for hit, _ in chosen]), "total": len(chosen), "looked_at": len(chosen)}
    answers[f"{base}/rollouts?source={source}"] = {**rows, "next": None, "below": 0, "indexed": 1.0}
    answers[f"{base}/previews?source={source}"] = [preview for _, preview in chosen]
    return used


def _offsets(run: WatchedRun, source: Source) -> Iterator[int]:
    """Offsets of groups, alternating between the orders, each once."""
    wanted = Query(source).wanted
    end = run.index[source].span[1]
    lists = []
    for order in _ORDERS:
        hits, _ = run.index[source].find(wanted, order, end, 0, GROUPS * 64)
        lists.append(list(dict.fromkeys(hit.offset for hit in hits))[:GROUPS])
    turns = [each[turn] for turn in range(GROUPS) for each in lists if turn < len(each)]
    return iter(dict.fromkeys(turns))


def _group(found: Answers, run: WatchedRun, base: str, source: Source, offset: int) -> dict[str, Any]:
    group = found.group(run, source, offset)
    own: dict[str, Any] = {_address(base, source, offset): group}
    for place, rollout in enumerate(group["rollouts"]):
        for sample in range(min(len(rollout["samples"]), _TOKEN_SAMPLES_PER_ROLLOUT)):
            address = f"{base}/tokens?offset={offset}&place={place}&sample={sample}&source={source}"
            own[address] = found.tokens(run, source, offset, place, sample)
    return own


def _address(base: str, source: Source, offset: int) -> str:
    return f"{base}/group?offset={offset}&source={source}"


def _embedded(value: Any) -> str:
    """As JSON for a script element, which no text in it can end."""
    return json_of(value).decode().replace("<", "\\u003c")


def _html(answers: dict[str, Any]) -> bytes:
    style = page_file("uPlot.min.css") + page_file("style.css")
    chart, script = page_file("uPlot.iife.min.js"), _bundle()
    about = {"rule": RULE, "made": date.today().isoformat()}
    data = _embedded({"about": about, "answers": answers})
    policy = (
        f"default-src 'none'; img-src data:; script-src {_hash(chart)} {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>pipelinerl</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to content</a>
<header id="header"></header>
<main id="main" tabindex="-1"></main>
<script type="application/json" id="exported">{data}</script>
<script>{chart}</script>
<script>{script}</script>
</body>
</html>
""".encode()


def _bundle() -> str:
    """The modules of the page as one script: each uses only names of earlier ones, and no name is used twice."""
    parts = [_EXPORT.sub("", _IMPORT.sub("", page_file(f"{name}.js"))) for name in PAGE_MODULES]
    return "(() => {\n'use strict';\n" + "\n".join(parts) + "})();\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
