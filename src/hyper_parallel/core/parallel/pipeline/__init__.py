"""Pipelines: schedules as data, proved before they run; the coordinator of a forward beside a backward."""
