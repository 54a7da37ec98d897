"""The memory planner's MindSpore part. What it counts: README of this folder. The core sees `backend.py`."""
