"""`Platform`: the one object through which neutral code reaches a framework."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from hyper_parallel._base.errors import ComesLaterError, NotProvidedError
from hyper_parallel.platform import contract
from hyper_parallel.platform.contract import How, Operation


class PlatformType(Enum):
    """The two frameworks."""

    MINDSPORE = "mindspore"
    PYTORCH = "torch"

    @property
    def display_name(self) -> str:
        return "MindSpore" if self is PlatformType.MINDSPORE else "PyTorch"


# Groups by `str(tuple(sorted(ranks)))`.
EXISTING_COMM_GROUPS: dict[str, Any] = {}


class _NotThere:
    """Stands for an operation that a class lacks: reaching it raises, and says what to do.

    A descriptor rather than a method, so that a property of the contract raises on access and a method on the call.
    """

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.__doc__ = operation.summary

    def __get__(self, instance: object, owner: type) -> Any:
        operation = self.operation

        def not_there(*_args: object, **_kwargs: object) -> Any:
            raise _reason(operation, owner)

        if operation.how is How.PROPERTY and instance is not None:
            not_there()
        not_there.__name__ = not_there.__qualname__ = operation.name
        not_there.__doc__ = operation.summary
        return not_there


def _reason(operation: Operation, owner: type) -> Exception:
    is_ours = owner.__module__.split(".")[0] == __name__.split(".")[0]
    if is_ours and operation.comes_with is not None:
        return ComesLaterError(
            f"`{operation.name}` comes with {operation.comes_with} of hyper_parallel, which this version does not have.",
            where=owner.__name__,
            do="Upgrade hyper_parallel once the CHANGELOG lists it.",
        )
    return NotProvidedError(
        f"{owner.__name__} does not provide `{operation.name}`.",
        expected=f"a method that does this: {operation.summary.rstrip('.')}",
        do=f"Define `{operation.name}` in {owner.__name__}, or derive it from TorchPlatform or MindSporePlatform.",
    )


class Platform:
    """What every framework offers under one name and one meaning: the operations of `contract.OPERATIONS`.

    `TorchPlatform` and `MindSporePlatform` are put together from small parts, one file each; an operation that a subclass
    lacks raises `NotImplementedError` and names it.
    """

    platform_type: PlatformType
    Tensor: type
    Parameter: type
    Module: type
    Function: type

    # The gradient reduction in flight is one per process, whatever the instance: kept on the class (see grad_handle.py).
    current_grad_handle: Any = None
    post_grad_handle_process: Any = None
    grad_sync_stream: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # One place says what an operation does; a backend's method repeats it only if it has more to say.
        for name, operation in contract.BY_NAME.items():
            for base in cls.__mro__[:-1]:
                found = vars(base).get(name)
                function = getattr(found, "__func__", found)
                if callable(function) and not isinstance(found, _NotThere) and function.__doc__ is None:
                    function.__doc__ = operation.summary

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


for _operation in contract.OPERATIONS:
    setattr(Platform, _operation.name, _NotThere(_operation))
del _operation
