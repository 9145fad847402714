"""The trainer: fetch a batch, take an optimizer step, send the weights to the servers, report, save.

Start reading at `loop.py`. Started by `main.py`, one process per rank. No other role imports this package.
"""
