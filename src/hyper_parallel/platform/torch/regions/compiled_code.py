"""Regions beside `torch.compile`: compiled code stays compiled, and is one op to a region."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from hyper_parallel._base.errors import StateError

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Newer versions of PyTorch keep the settings of the compiler per thread, in such a variable; so it is known per thread where they are made.
_is_done: ContextVar[bool] = ContextVar("hyper_parallel_is_prepared_for_compiled_code", default=False)
_is_left_alone = False
_TREES = "tree_manager_containers"  # the name under which PyTorch keeps the graphs of a thread
_COMPILED_CALL = "torch/_dynamo/eval_frame.py"
_COMPILED_CODE = ("torch/_inductor/output_code.py", "__call__")


def prepare_for_compiled_code(*, before_it_is_compiled: bool = False) -> None:
    """Once per thread, when a region runs in a process that compiles.

    Without this a dispatch mode turns the compiler off, or lets it look into the mode's own Python.

    Args:
        before_it_is_compiled: the model is being made: whether it will be compiled is not known yet. Blocks that are no regions
            may be compiled first, and blocks that are share their code.
    """
    global _is_left_alone
    if _is_done.get() or not (before_it_is_compiled or "torch._dynamo" in sys.modules):
        return
    _is_done.set(True)
    from torch._dynamo import trace_rules
    from torch._inductor import config

    if not _is_left_alone:
        _is_left_alone = True
        trace_rules.add("hyper_parallel")  # what the compiler need not look into
    if hasattr(config, "wrap_inductor_compiled_regions"):
        # Code that is compiled from now on is called through one operator, `inductor_compiled_code`, which modes see.
        config.wrap_inductor_compiled_regions = True


def compile_visibly(model: nn.Module) -> None:
    """Before a model is looked at: what was compiled of it while nobody prepared for it is compiled once more when it runs next."""
    if _is_done.get() or not any(is_compiled(module) for module in model.modules()):
        return
    prepare_for_compiled_code()
    torch._dynamo.reset()


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made it, or was told to compile it in place."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def is_in_compiled_call() -> bool:
    """Whether the caller runs inside of a call of what `torch.compile` gave, as Python that it left out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILED_CALL):
            return True
        frame = frame.f_back
    return False


def cuda_graph_now() -> Any:
    """What code compiled with CUDA graphs has run last in this step; None if there is none.

    Such code (`mode="reduce-overhead"`) keeps its results and residuals in memory that the graphs share, and must know who still
    uses it.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not torch.cuda.is_initialized() or not _has_trees(trees):
        return None
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return getattr(manager, "current_node", None)


def _has_trees(trees: Any) -> bool:
    """Whether this thread has what graphs are kept in: the thread that imported the module, and those of autograd that work for it.

    In any other thread no such code can have run; to ask there for the manager fails, or makes one, which depends on the version.
    """
    return hasattr(trees.local, _TREES) or torch._C._is_key_in_tls(_TREES)


def check_no_cuda_graph(before: object, what: str, where: str) -> None:
    """Refuse code that was compiled with CUDA graphs and has run since `before = cuda_graph_now()`."""
    now = cuda_graph_now()
    if now is not None and now is not before:
        raise StateError(
            f"{what} cannot hold code that was compiled with CUDA graphs.",
            expected='torch.compile in the default mode, or mode="max-autotune-no-cudagraphs"',
            got='a graph that ran inside: mode="reduce-overhead", mode="max-autotune" or triton.cudagraphs',
            where=where,
            do="Compile the module inside without graphs, or put the wrapper around other modules.",
        )


def not_compiled(function: _Function) -> _Function:
    """A decorator: the compiler ends its graph before this function, and says why where it may not (`fullgraph=True`).

    `torch.compiler.disable` would do so too, and turn the compiler off for everything that the function calls.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "save, recompute and swap of activations are decided in Python, so the graph ends here: compile without fullgraph=True, or "
        "compile the module inside the wrapper"
    )
    return function


def check_not_in_compiled_code(func: object, where: str) -> None:
    """Called for ops that write into a result they were given: few programs have them, and compiled code is full of them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _COMPILED_CODE[1] and frame.f_code.co_filename.endswith(_COMPILED_CODE[0]):
            raise _compiled_too_early(func, where)
        frame = frame.f_back


def _compiled_too_early(func: object, where: str) -> StateError:
    from torch._inductor import config

    if hasattr(config, "wrap_inductor_compiled_regions"):
        expected, do = (
            "code compiled after the first region or wrapper was made",
            "Call torch._dynamo.reset(), and run the step again.",
        )
    else:
        expected = "a version of PyTorch whose compiled code can be seen (torch._inductor.config.wrap_inductor_compiled_regions)"
        do = "Upgrade PyTorch, or compile with backend='aot_eager'."
    return StateError(
        "Compiled code runs in a region, and the region cannot see what it does.",
        expected=expected,
        got=f"{func} inside of code that was compiled before",
        where=where,
        do=do,
    )
