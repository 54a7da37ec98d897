"""Pipelines: so far the coordinator of a forward and a backward that run at the same time."""
