"""`DFunction` as far as it is the same on every framework.

That is a name, a rule that is looked up by it, and arguments that are bound to the parameters of `forward`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.core.shard import registry
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER, NoRuleError
from hyper_parallel.platform.selection import framework_of

__all__ = ["FunctionOnShards", "_LocalCallable"]


class _LocalCallable:
    """Calls a function on local tensors, under the operator's name, which is both `__name__` and `.name`."""

    def __init__(self, fn: Callable[..., Any], op_name: str) -> None:
        self._fn = fn
        self.name = op_name
        self.__name__ = op_name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"_LocalCallable({self.name!r})"


class FunctionOnShards:
    """Mixed into each framework's class of autograd functions.

    Its `apply` decides; this has what it decides between.
    """

    _op_name: ClassVar[str | None] = None
    _dtensor_types: ClassVar[tuple[type, ...]] = ()
    _framework_function: ClassVar[type]
    _other_framework: ClassVar[str] = ""

    @staticmethod
    def forward(ctx: object, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("A DFunction has a static `forward(ctx, ...)` on local tensors.")

    @staticmethod
    def backward(ctx: object, *grads: Any) -> Any:
        raise NotImplementedError(
            "A DFunction has a static `backward(ctx, *grads)`, with a gradient for each argument of `forward`."
        )

    @classmethod
    def _has_dtensor(cls, value: Any) -> bool:
        if isinstance(value, cls._dtensor_types):
            return True
        if type(value) in (list, tuple):
            return any(cls._has_dtensor(item) for item in value)
        return type(value) is dict and any(cls._has_dtensor(item) for item in value.values())

    @classmethod
    def _check_own(cls, args: Sequence[Any]) -> None:
        """Raise at a tensor of the other framework.

        This one's autograd would pass it over, without a word and without a gradient.
        """
        for arg in args:
            framework = framework_of(arg)
            if framework is not None and framework.value == cls._other_framework:
                raise ArgumentTypeError(
                    f"`{cls.__name__}` works on one framework, and a tensor of the other one was given.",
                    expected=f"tensors of {cls._framework_function.__module__.partition('.')[0]}",
                    got=f"{describe(arg)} of {framework.value}",
                    do="One process works on one framework: set HYPER_PARALLEL_PLATFORM before `DFunction` is "
                    "imported.",
                )

    @classmethod
    def _apply_anything(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        bound = cls._bound(args, kwargs) if kwargs else args
        if not cls._has_dtensor(bound):
            return cls._apply_natively(*bound)
        if cls._op_name is None:
            raise ArgumentError(
                f"`{cls.__name__}` was called with a DTensor and has no name under which its rule could be found.",
                expected='a class attribute such as `_op_name = "ScaleAdd"`',
                got="None",
                do='Set it, and register a rule: `MyRule("ScaleAdd")`, with `MyRule` a subclass of `hp.DistributedOp`.',
            )
        if registry.by_name(cls._op_name) is None:
            raise NoRuleError(
                f"`{cls.__name__}` has no rule for distributed tensors.",
                expected=f"a rule with the name {cls._op_name!r}",
                got="none",
                do="Make one: a subclass of `hp.DistributedOp` with `infer_layout`, made with the name "
                f'"{cls._op_name}".',
            )
        return _OP_DISPATCHER.dispatch(cls._get_local_callable(), bound, None)

    @classmethod
    def _apply_natively(cls, *args: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def _get_local_callable(cls) -> _LocalCallable:
        """Return what re-enters `apply` with local tensors.

        It belongs to this very class: one that is inherited would run the parent's `forward`.
        """
        found = cls.__dict__.get("_local_callable")
        if found is None:
            # `apply`, not `forward`: a subclass may override it, and it binds keywords that a `preprocess` may answer.
            found = _LocalCallable(cls.apply, str(cls._op_name))  # type: ignore[attr-defined]
            cls._local_callable = found  # type: ignore[attr-defined]
        made: _LocalCallable = found
        return made

    @classmethod
    def _bound(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Put keywords in their places among `forward`'s parameters.

        The frameworks' own `apply` takes none, or loses their gradients.
        """
        signature = inspect.signature(cls.forward)
        try:
            # None stands for the context, which is the first parameter.
            bound = signature.bind(None, *args, **kwargs)
        except TypeError as error:
            raise ArgumentTypeError(
                f"`{cls.__name__}.apply` does not take these arguments.",
                expected=f"those of `forward{signature}`, without the context",
                got=str(error),
            ) from None
        bound.apply_defaults()
        if bound.kwargs:
            raise ArgumentTypeError(
                f"`{cls.__name__}.forward` has keyword-only parameters, which autograd functions cannot have.",
                got=", ".join(bound.kwargs),
                do="Make them positional.",
            )
        return tuple(bound.args[1:])
