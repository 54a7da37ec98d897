"""`DistributedOp`: a rule as a class, registered under the operator's name when it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, NotProvidedError, describe
from hyper_parallel.core.shard.registry import register

__all__ = ["DistributedOp"]


class DistributedOp:
    """A rule as a class: says which layouts come out of an operator. Making an instance registers it.

    Args:
        op_name: the operator's name: `_op_name` of a `DFunction`, else what `platform.get_op_name` answers for the
            function.
        override: take the place of the rule that has the name.

    Raises:
        ValueError: the name is taken.

    Example:
        >>> class Scale(DistributedOp):
        ...     def infer_layout(self, layouts, extra_args=None):
        ...         return layouts[0]
        >>> rule = Scale("ScaleOfTheExample")
    """

    def __init__(self, op_name: str, *, override: bool = False) -> None:
        if not isinstance(op_name, str):
            raise ArgumentTypeError("A rule is registered by name.", expected="a str", got=describe(op_name))
        if not op_name:
            raise ArgumentError("A rule needs the name of its operator.", expected="a name", got="an empty one")
        self.op_name = op_name
        register(op_name, self, override=override)

    def infer_layout(self, layouts: Any, extra_args: Any = None) -> Any:
        """Return the output's layout, or a tuple of them (None leaves an output as it is).

        `layouts` has one entry per tensor argument in order, None for a plain tensor; `extra_args` has the other
        arguments. With a `preprocess` of your own, `layouts` is what that returned as its third value, and the answer
        is `(layouts, extra)`.
        """
        raise NotProvidedError(
            f"The rule of {self.op_name!r} does not say which layout comes out.",
            where=type(self).__name__,
            do="Write `infer_layout(self, layouts, extra_args=None)`.",
        )

    # None of these is needed; one that a subclass defines is called.
    #   preprocess(args, kwargs) -> (local_args, local_kwargs, cache_values)
    #   get_expand_impl(func, result, layouts, extra_args) -> a replacement of the local operation, or None
    #   infer_shape(shapes, extra_args) -> the global shape(s) of the output(s)
    #   wrap_output(result, layouts) -> what the caller gets
    preprocess: Callable[..., tuple[Sequence[Any], dict[str, Any], Any]] | None = None
    get_expand_impl: Callable[..., Callable[..., Any] | None] | None = None
    infer_shape: Callable[..., Any] | None = None
    wrap_output: Callable[..., Any] | None = None
