"""Pipelines: schedules as data, proved and simulated before they run; the coordinator of a forward and a backward at the same time."""
