"""Names for things of a framework that the core hands on and never looks into.

They are `object`, so that the type checker lets nobody look. Example: the planner takes a `Module` from the user and
gives it to its backend; what a parameter of it is, only the backend knows.
"""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["Device", "Dtype", "Group", "Module", "Stream", "Tensor"]

Tensor: TypeAlias = object
Module: TypeAlias = object  # `nn.Module`, `nn.Cell`
Device: TypeAlias = object  # `torch.device`, a name on MindSpore
Dtype: TypeAlias = object
Stream: TypeAlias = object
Group: TypeAlias = object  # a group of ranks that communicate
