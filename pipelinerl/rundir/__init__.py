"""Runs over several nodes: the launchers of a run find each other, share one plan and end together."""
