"""Tasks to train on, and the registry that finds the ones that a configuration names. No domain imports another."""
