"""Regions beside `torch.compile`: compiled code stays compiled, and is one op to a region."""

from __future__ import annotations

import sys

_is_done = False


def prepare_for_compiled_code() -> None:
    """Once, when a region runs in a process that compiles.

    Without this a dispatch mode turns the compiler off, or lets it look into the mode's own Python.
    """
    global _is_done
    if _is_done or "torch._dynamo" not in sys.modules:
        return
    _is_done = True
    from torch._dynamo import trace_rules
    from torch._inductor import config

    trace_rules.add("hyper_parallel")  # what the compiler need not look into
    if hasattr(config, "wrap_inductor_compiled_regions"):
        # Code that is compiled from now on is called through one operator, `inductor_compiled_code`, which modes see.
        config.wrap_inductor_compiled_regions = True
