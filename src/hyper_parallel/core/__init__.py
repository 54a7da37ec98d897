"""Framework-neutral parts: swapping, regions, planning, distributed tensors and functions."""
