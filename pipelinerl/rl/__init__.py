"""The algorithm: packing, advantages, losses, log-probs, diagnostics. Pure functions; no I/O, no processes.

`packing`, `aggregation` and `advantages` use no torch (the preprocessor imports them); everything else is torch in,
torch out. Nothing is imported here, so that a torch-free process stays torch-free.
"""
