"""Processes of a run: their plan of ports and commands, life, death and shared run directory. No torch."""
