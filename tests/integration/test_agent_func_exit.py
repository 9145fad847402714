"""A step that never returns does not keep its process alive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_step_that_never_returns_does_not_keep_its_process(tmp_path: Path) -> None:
    """A check of the file, or a rollout worker, ends all the same."""
    path = tmp_path / "agent_func.py"
    path.write_text("import threading\n\ndef step(state, action, label):\n    threading.Event().wait()\n")
    program = (
        "import asyncio, sys\n"
        "from pipelinerl.agents.agent_func import AgentFile\n\n"
        "async def main():\n"
        "    file = AgentFile(sys.argv[1])\n"
        "    with file.episode() as step:\n"
        "        await asyncio.wait_for(file.call(step, '', '', None), 0.01)\n\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1 and ended.stderr.rstrip().endswith("TimeoutError"), ended.stderr
