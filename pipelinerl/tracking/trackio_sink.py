"""Numbers of a run in Trackio, a tracker with W&B's interface that stores everything locally.

Imported only where it is asked for: it needs the extra `trackio`. Raises freely.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trackio

from pipelinerl.config.secrets import redact
from pipelinerl.records import MetricRecord
from pipelinerl.rundir.layout import read_identity
from pipelinerl.tracking.rollout_table import RolloutTable
from pipelinerl.tracking.sinks import OnwardValues, SinkInputs


class TrackioSink:
    """One run of the project `tracking.trackio_project`, named after the run's id, so that a resumed run continues it.

    The step is the policy version. The configuration is stored without secrets. By default nothing leaves this machine;
    `TRACKIO_DIR` and `TRACKIO_SPACE_ID` are Trackio's own settings for where it stores and sends data.
    """

    def __init__(self, inputs: SinkInputs) -> None:
        project = inputs.config.tracking.trackio_project
        assert project is not None
        self._onward = OnwardValues(inputs)
        self._step = 0
        self._run = trackio.init(
            project=project,
            name=read_identity(inputs.run_dir.identity_file).run_id,
            config=redact(inputs.config.model_dump(mode="json")),
            resume="allow",
            embed=False,
        )

    def log(self, record: MetricRecord) -> None:
        self._step = max(self._step, record.step)
        if values := self._onward.take(record):
            self._run.log(dict(values), step=record.step)

    def log_rollouts(self, table: RolloutTable) -> None:
        cells = trackio.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._run.log({table.name: cells}, step=table.version)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Trackio has no summaries, so their numbers become metrics of the last step."""
        best = {f"best/{name}": value for name, value in self._onward.best.items()}
        numbers = {f"run/{key}": value for key, value in summary.items() if isinstance(value, int | float)}
        self._run.log(best | numbers, step=self._step)
        self._run.finish()
