"""The algorithm: advantages, micro-batches, losses, log-probs, diagnostics. No I/O, no processes.

`advantages`, `aggregation`, `coefficients` and `packing` use no torch. Nothing is imported here, so that
a process without torch stays without it.
"""
