"""What backward needs. The wrappers and regions come with activation memory on MindSpore; until then each says so."""

from __future__ import annotations


class Activations:
    """Nothing yet: the answers are those of `Platform`."""
