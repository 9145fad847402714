"""The trainer: fetch a batch, take an optimizer step, hand the weights to the servers, report, save.

`loop.py` is the whole process in one page; every other file is one part of it. Started by `main.py`,
one process per rank. No other role imports this package.
"""
