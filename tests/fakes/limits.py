"""How long tests wait for real processes, which take many times as long on a machine with other work.

A test that passes waits for a condition and never for a time, so this only bounds one that fails.
"""

from __future__ import annotations

PROCESS_LIMIT_S = 600.0
