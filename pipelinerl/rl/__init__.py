"""The algorithm: advantages, packing, micro-batches, losses, diagnostics. No I/O, no processes.

`advantages` and `packing` use no torch. Nothing is imported here, so that a process without torch stays without it.
"""
