"""`view --export`: the page and a choice of its answers in one file, for whoever has no access to the run.

The file loads nothing and sends nothing: scripts and styles stand in it and are allowed by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
#: Of each run and kind of rollout, so many groups are chosen by each order, as long as they fit.
GROUPS = 12
_ORDERS: tuple[Order, ...] = ("newest", "best", "worst")
_SOURCES: tuple[Source, ...] = ("training", "evaluation")
RULE = (
    f"This file holds the rollouts of the {GROUPS} newest groups of each run, of the {GROUPS} with the best and the "
    f"{GROUPS} with the worst rollout, and as many rollouts of evaluations, in this order and as far as they fit."
)
_IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export (?=(?:async )?function|class|const)", re.MULTILINE)
#: Whose tokens are in the file.
_TOKEN_SAMPLES_PER_ROLLOUT = 2


def write_export(runs: Sequence[WatchedRun], file: Path) -> int:
    """Write the page about `runs` into `file`; return its size in bytes.

    Raises:
        ConfigError: the file cannot be written.
        StreamError: a stream cannot be read.
    """
    for run in runs:
        run.read_all()
    html = _html(_chosen(Answers(runs), runs))
    try:
        replace_file(file, html)
    except OSError as error:
        expected = f"a file that can be written ({error.strerror})"
        raise ConfigError("--export", str(file), expected, "Name another.") from error
    return len(html)


def _chosen(found: Answers, runs: Sequence[WatchedRun]) -> dict[str, Any]:
    """The answers that the file holds, by their addresses."""
    answers: dict[str, Any] = {"/api/runs": found.list_runs()}
    for number, run in enumerate(runs):
        base = f"/api/runs/{number}"
        names = found.metric_names(run)
        answers[f"{base}/overview"] = found.overview(run)
        answers[f"{base}/metrics"] = names
        answers[f"{base}/curves"] = found.curves(run, names)
    room = MAX_BYTES - len(_html(answers))
    for number, run in enumerate(runs):
        share = room // (len(runs) - number)
        for source in _SOURCES:
            # Training gets what it needs of two thirds; evaluations may have the rest.
            most = share * 2 // 3 if source == "training" else share
            used = _add_rollouts(found, run, f"/api/runs/{number}", source, most, answers)
            room, share = room - used, share - used
    return answers


def _add_rollouts(
    found: Answers, run: WatchedRun, base: str, source: Source, room: int, answers: dict[str, Any]
) -> int:
    """Add groups as long as they take at most `room` bytes together; return how many they take."""
    hits: list[Hit] = []
    used = 0
    for offset in _offsets(run, source):
        own: dict[str, Any] = {}
        with suppress(StreamError):  # one that cannot be read is left out
            own = _group(found, run, base, source, offset)
        size = len(json_of(own))
        if not own or used + size > room:
            continue
        used += size
        answers.update(own)
        places = len(own[f"{base}/group?offset={offset}&source={source}"]["rollouts"])
        hits += [run.index[source].at(offset, place) for place in range(places)]
    hits.sort(key=lambda hit: (-hit.offset, hit.place))
    rows: Answer = {"rows": inert([hit._asdict() for hit in hits]), "total": len(hits), "looked_at": len(hits)}
    answers[f"{base}/rollouts?source={source}"] = {**rows, "next": None, "below": 0, "indexed": 1.0}
    answers[f"{base}/previews?source={source}"] = found.previews(run, source, [(hit.offset, hit.place) for hit in hits])
    return used


def _offsets(run: WatchedRun, source: Source) -> Iterator[int]:
    """Groups of each order, in turns, each once."""
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
    own: dict[str, Any] = {f"{base}/group?offset={offset}&source={source}": group}
    for place, rollout in enumerate(group["rollouts"]):
        for sample in range(min(len(rollout["samples"]), _TOKEN_SAMPLES_PER_ROLLOUT)):
            address = f"{base}/tokens?offset={offset}&place={place}&sample={sample}&source={source}"
            own[address] = found.tokens(run, source, offset, place, sample)
    return own


def _html(answers: dict[str, Any]) -> bytes:
    style = page_file("uPlot.min.css") + page_file("style.css")
    chart, script = page_file("uPlot.iife.min.js"), _bundle()
    about = {"rule": RULE, "made": date.today().isoformat()}
    # Inside a script element only `</` and `<!--` could end it.
    data = json_of({"about": about, "answers": answers}).decode().replace("<", "\\u003c")
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
    """The modules of the page as one script: each uses only names of those before it, and no name stands twice."""
    parts = [_EXPORT.sub("", _IMPORT.sub("", page_file(f"{name}.js"))) for name in PAGE_MODULES]
    return "(() => {\n'use strict';\n" + "\n".join(parts) + "})();\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
