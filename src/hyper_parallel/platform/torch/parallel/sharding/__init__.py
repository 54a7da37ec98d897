"""Sharded data parallel on PyTorch: the memory of a unit, and the hooks that tell it what runs."""
