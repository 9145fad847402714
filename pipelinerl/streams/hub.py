"""Opens the streams of one run: the only place that knows which backend holds them.

Called by every role (through its context) and by the launcher. Waits for nothing.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from pipelinerl.config.sections import StreamsConfig
from pipelinerl.errors import StreamError
from pipelinerl.streams.base import StreamReader, StreamSpec, StreamWriter
from pipelinerl.streams.file_reader import FileReader
from pipelinerl.streams.file_writer import FileWriter
from pipelinerl.streams.layout import check_spec, partition_dir
from pipelinerl.supervise.run_dir import RunDir

OWNER_FILE = "run_id"


class StreamHub:
    """Typed readers and writers of the run `run_id`.

    Args:
        config: section `streams` of the configuration.
        run_dir: the run's directory; file streams lie in its folder `streams`.
        run_id: identity of the run. The first hub leaves it in the folder; a folder of another run is refused.

    Raises:
        StreamError: the folder holds another run's streams, or cannot be written.
    """

    def __init__(self, config: StreamsConfig, run_dir: RunDir, run_id: str) -> None:
        if config.backend != "files":
            raise StreamError(f"streams.backend={config.backend} is not built in. Set streams=files")
        self._config = config
        self._root = run_dir.streams
        self.run_id = run_id
        _claim(self._root, run_id)

    def writer(self, topic: str, instance: str, record_type: Any, partition: int = 0) -> StreamWriter[Any]:
        """Open a stream for appending; see `FileWriter`. One writer at a time per (topic, instance, partition)."""
        directory = self._directory(StreamSpec(topic, instance, partition))
        return FileWriter[Any](directory, record_type, self._config.shard_bytes, self._config.fsync)

    def reader(
        self, topic: str, instance: str, record_type: Any, offset: int = 0, partition: int = 0
    ) -> StreamReader[Any]:
        """Open a stream for reading from `offset`; see `FileReader`. It need not have been written yet."""
        return FileReader[Any](self._directory(StreamSpec(topic, instance, partition)), record_type, offset)

    def _directory(self, spec: StreamSpec) -> Path:
        check_spec(spec)
        return partition_dir(self._root, spec)


def _claim(root: Path, run_id: str) -> None:
    """Leave `run_id` in the folder if nobody did, else compare. Atomic: many processes start at once."""
    owner = root / OWNER_FILE
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not owner.exists():
            draft = root / f"{OWNER_FILE}.{os.getpid()}.{os.urandom(4).hex()}"
            draft.write_text(run_id, encoding="utf-8")
            with contextlib.suppress(FileExistsError):
                os.link(draft, owner)
            draft.unlink()
        found = owner.read_text(encoding="utf-8")
    except OSError as error:
        raise StreamError(f"{root}: cannot hold streams: {error}") from error
    if found != run_id:
        raise StreamError(
            f"{root} holds the streams of run {found!r}, this is run {run_id!r}. "
            "Choose another output_dir, or set force_restart=true to move the old run aside"
        )
