"""Sharded data parallel on MindSpore: the memory of a unit, and the hooks that tell it what runs."""
