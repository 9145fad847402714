"""Placement of a run on a cluster: what there is, how it is shared, which job goes where. Pure; used by `world`."""
