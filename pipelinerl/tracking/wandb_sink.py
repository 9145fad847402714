"""Numbers of a run in Weights & Biases.

Made by `make_sinks` and run by a `BackgroundSink`: its start may wait for the network. Raises freely.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from pipelinerl.config import RunConfig
from pipelinerl.records import MetricRecord
from pipelinerl.tracking.redact import redact

INIT_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
LOGIN_TIMEOUT_S = 5
FINISH_TIMEOUT_S = 12.0
STEP_NAME = "version"


class WandbSink:
    """One W&B run. The x axis of every chart is the policy version, since processes log at their own pace.

    Args:
        config: the whole configuration; it is uploaded without its secrets.
        run_dir: W&B's own files go here unless `wandb.wandb_dir` says otherwise.
        since: records older than this (epoch seconds) were logged before a resume and are left out.

    Raises:
        OSError: mode `online` and the server cannot be connected to.
        Exception: whatever wandb raises, for instance when there is no API key.
    """

    def __init__(self, config: RunConfig, run_dir: Path, since: float) -> None:
        import wandb

        section = config.wandb
        if section.mode == "online":
            try:
                _check_reachable(wandb.setup().settings.base_url)
            except OSError:
                wandb.teardown()
                raise
        folder = Path(section.wandb_dir) if section.wandb_dir else run_dir
        folder.mkdir(parents=True, exist_ok=True)
        resume: Any = section.wandb_resume if section.wandb_id else None
        self._since = since
        self._teardown = wandb.teardown
        self._run = wandb.init(
            project=section.wandb_project_name,
            entity=section.wandb_entity_name,
            name=section.wandb_name or self._default_name(config, run_dir),
            id=section.wandb_id,
            group=section.wandb_group,
            tags=list(section.tags),
            dir=str(folder),
            mode=section.mode,
            resume=resume,
            config=redact(config.model_dump(mode="json")),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                init_timeout=INIT_TIMEOUT_S,
                login_timeout=LOGIN_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
            ),
        )
        self._run.define_metric(STEP_NAME)
        self._run.define_metric("*", step_metric=STEP_NAME)

    def log(self, record: MetricRecord) -> None:
        if record.time >= self._since:
            self._run.log({**record.values, STEP_NAME: record.step})

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({f"run/{key}": value for key, value in summary.items() if value is not None})
        self._run.finish(exit_code=0 if summary.get("status") == "completed" else 1)
        self._teardown()

    @staticmethod
    def _default_name(config: RunConfig, run_dir: Path) -> str:
        root = Path(config.wandb.wandb_workspace_root).absolute()
        if config.wandb.wandb_use_basename or not run_dir.is_relative_to(root):
            return run_dir.name
        return str(run_dir.relative_to(root))


def _check_reachable(url: str) -> None:
    """Find out before wandb does: its own start retries for long, and then holds up the end of this process."""
    parts = urlsplit(url)
    if getproxies() or not parts.hostname:
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    socket.create_connection((parts.hostname, port), timeout=CONNECT_TIMEOUT_S).close()
