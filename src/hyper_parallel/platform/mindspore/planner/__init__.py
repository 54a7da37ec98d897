"""The memory planner's MindSpore part.

What it counts is in the README of this folder. The core sees `backend.py`.
"""
