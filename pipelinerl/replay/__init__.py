"""Trains a run once more from its recorded streams, without servers.

Used by the command `replay`; sits above the roles.
"""
