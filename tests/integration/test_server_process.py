"""What can be said of a server's process without starting vLLM."""

from __future__ import annotations

import subprocess
import sys


def test_the_module_loads_without_torch_and_vllm() -> None:
    code = (
        "import sys, pipelinerl.inference.arguments, pipelinerl.inference.auth, pipelinerl.inference.main;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


def test_w4_a_server_without_token_ends_with_a_message_and_exit_code_2() -> None:
    command = [sys.executable, "-m", "pipelinerl.inference.main", "--model", "/nowhere", "--port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={"PATH": ""}, check=False)
    assert done.returncode == 2
    assert "PIPELINERL_SERVER_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr
