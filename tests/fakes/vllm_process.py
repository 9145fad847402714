"""A real vLLM server in a process group of its own, started by our entry point. For fixtures and slow tests."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from fakes.ports import free_port

# About 11 s alone; a busy machine takes several times as long.
START_TIMEOUT_S = 600.0
REPOSITORY = Path(__file__).resolve().parents[2]
KWARGS = {"enforce-eager": "", "max_model_len": 512, "block_size": 32, "max_num_seqs": 64}


class VLLMProcess:
    """Context manager. `url`, `token` and `model` (folder) say how to reach it and what it was started with."""

    def __init__(
        self,
        model: Path,
        log: Path,
        vllm_kwargs: Mapping[str, object] | None = None,
        transport: str = "gloo",
        environ: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.token = secrets.token_urlsafe(24)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._kwargs = {**KWARGS, **(vllm_kwargs or {})}
        self._transport = transport
        self._arguments = arguments
        self._environ = dict(os.environ if environ is None else environ)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VLLMProcess:
        command = [sys.executable, "-m", "pipelinerl.inference.main", "--model", str(self.model)]
        command += ["--port", str(self.port), "--vllm-kwargs", json.dumps(self._kwargs)]
        command += ["--transport", self._transport, "--fp32-head", *self._arguments]
        python_path = os.pathsep.join(filter(None, [str(REPOSITORY), self._environ.get("PYTHONPATH")]))
        environ = {**self._environ, "PIPELINERL_SERVER_TOKEN": self.token, "PYTHONPATH": python_path}
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=self.log.parent,
                start_new_session=True,
            )
        try:
            self._wait_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL to the whole group at once."""
        os.killpg(self.pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait(60)

    def wait_end(self, limit_s: float) -> int:
        """Exit code of the server's own process, once it has ended by itself."""
        assert self._process is not None
        return self._process.wait(limit_s)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for whatever of the group is left."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)

    def tail(self, characters: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-characters:]

    def _wait_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}:\n{self.tail()}")
            try:
                with opener.open(f"{self.url}/health", timeout=10):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise RuntimeError(f"the server did not come up in {START_TIMEOUT_S:g} s:\n{self.tail()}")
