"""Numbers of a run in Weights & Biases. Starting may wait for the network. Raises freely."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from pipelinerl.config import RunConfig
from pipelinerl.config.resources import WandbConfig
from pipelinerl.config.secrets import redact
from pipelinerl.records import MetricRecord
from pipelinerl.rundir.layout import RunDir, RunIdentity, read_identity
from pipelinerl.tracking.rollout_table import RolloutTable
from pipelinerl.tracking.sinks import OnwardValues, SinkInputs

INIT_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
LOGIN_TIMEOUT_S = 5
FINISH_TIMEOUT_S = 12.0
STEP_NAME = "version"
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9_-]")
_MAX_ID_CHARACTERS = 100


class WandbSink:
    """One W&B run. The x axis of every chart is the policy version, since processes log at their own pace.

    Prints to standard error where the numbers can be seen, or why not. The configuration is uploaded without secrets. A
    resumed run continues its W&B run (`OnwardValues`). W&B's summary has the last value of every metric, plus
    `best/<metric>` and at the end `run/<entry of summary.json>`.

    Raises:
        OSError: mode `online` and the server cannot be connected to.
        Exception: whatever wandb raises, for instance when there is no API key.
    """

    def __init__(self, inputs: SinkInputs) -> None:
        config = inputs.config
        self._onward = OnwardValues(inputs)
        self._best: dict[str, float] = {}
        try:
            self._run, self._wandb = _start(config, inputs.run_dir.root)
        except Exception as error:
            hint = "" if config.wandb.mode == "offline" else "; wandb.mode=offline keeps them in files for later"
            _say(f"W&B is off: {type(error).__name__}: {error}. The numbers are in metrics.jsonl{hint}")
            raise
        if config.wandb.mode == "online":
            _say(f"W&B: {self._run.url}")
        self._run.define_metric(STEP_NAME)
        self._run.define_metric("*", step_metric=STEP_NAME)

    def log(self, record: MetricRecord) -> None:
        if values := self._onward.take(record):
            self._run.log({**values, STEP_NAME: record.step})
            if self._best != self._onward.best:
                self._best = dict(self._onward.best)
                self._run.summary.update({f"best/{name}": value for name, value in self._best.items()})

    def log_rollouts(self, table: RolloutTable) -> None:
        cells = self._wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._run.log({table.name: cells, STEP_NAME: table.version})

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({f"run/{key}": value for key, value in summary.items() if value is not None})
        self._run.finish(exit_code=0 if summary.get("status") == "completed" else 1)
        self._wandb.teardown()


def first_line(config: RunConfig, run_dir: Path) -> str | None:
    """The line about W&B at the start of a run; None if its address or failure will be printed."""
    section = config.wandb
    if section.mode == "disabled":
        return "W&B: off (wandb.mode=disabled); the numbers are in metrics.jsonl"
    if section.mode == "online":
        return None
    run_id = tracked_run(section, _identity(run_dir))
    runs = f"offline-run-*-{run_id}" if run_id else "offline-run-*"
    # Without the option W&B skips runs that were uploaded once, even if they have grown.
    return f"W&B: offline; to upload, even during the run: wandb sync --include-synced {run_dir / 'wandb' / runs}"


def tracked_run(section: WandbConfig, identity: RunIdentity | None) -> str | None:
    """Return the id of the W&B run; None: W&B picks a new one.

    Without `wandb.wandb_id` the id follows from the run's, so a resumed run continues its W&B run.
    """
    if section.wandb_id or identity is None:
        return section.wandb_id
    return _NOT_IN_IDS.sub("-", identity.run_id)[-_MAX_ID_CHARACTERS:]


def _start(config: RunConfig, run_dir: Path) -> tuple[Any, Any]:
    """Start W&B's run; return it and the package."""
    import wandb  # late: only where it is asked for, as it is slow to load

    section = config.wandb
    if section.mode == "online":
        try:
            _check_reachable(wandb.setup().settings.base_url)
        except OSError:
            wandb.teardown()
            raise
    run = wandb.init(
        project=section.wandb_project_name,
        entity=section.wandb_entity_name,
        name=section.wandb_name or run_dir.name,
        id=tracked_run(section, _identity(run_dir)),
        group=section.wandb_group,
        tags=list(section.tags),
        dir=str(run_dir),
        mode=section.mode,
        resume="allow",
        config=redact(config.model_dump(mode="json")),
        # A run may continue with other values.
        allow_val_change=True,
        settings=wandb.Settings(
            console="off",
            silent=True,
            # Commit and address of the repository, but no code.
            disable_code=True,
            init_timeout=INIT_TIMEOUT_S,
            login_timeout=LOGIN_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
        ),
    )
    return run, wandb


def _identity(run_dir: Path) -> RunIdentity | None:
    file = RunDir(run_dir).identity_file
    return read_identity(file) if file.exists() else None


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _check_reachable(url: str) -> None:
    """Checked here because wandb retries for long, and then delays the end of this process."""
    parts = urlsplit(url)
    if getproxies() or not parts.hostname:
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    socket.create_connection((parts.hostname, port), timeout=CONNECT_TIMEOUT_S).close()
