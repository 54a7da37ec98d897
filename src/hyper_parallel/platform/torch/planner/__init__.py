"""The memory planner's PyTorch part: profiling a real model, and carrying a plan out on it.

The core sees `backend.py`.
"""
