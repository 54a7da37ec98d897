"""`Platform`: the one object through which neutral code reaches a framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from types import MethodType
from typing import TYPE_CHECKING, Any

from hyper_parallel._base.errors import ArgumentTypeError, ComesLaterError, NotProvidedError, describe
from hyper_parallel.platform import contract, grad_handle
from hyper_parallel.platform.arguments import cache_key, check_flag, check_module, check_ranks, check_stage_index
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
        takes_self = operation.how is How.INSTANCE and instance is None
        not_there.__signature__ = operation.signature(with_self=takes_self)  # type: ignore[attr-defined]
        return not_there


def _reason(operation: Operation, owner: type) -> Exception:
    is_ours = owner.__module__.split(".")[0] == __name__.split(".")[0]
    if is_ours and operation.comes_with is not None:
        return ComesLaterError(
            f"`{operation.name}` comes with {operation.comes_with} of hyper_parallel, "
            "which this version does not have.",
            where=owner.__name__,
            do="Upgrade hyper_parallel once the CHANGELOG lists it.",
        )
    return NotProvidedError(
        f"{owner.__name__} does not provide `{operation.name}`.",
        expected=f"a method that does this: {operation.summary.rstrip('.')}",
        do=f"Define `{operation.name}` in {owner.__name__}, or derive it from TorchPlatform or MindSporePlatform.",
    )


class _OnEither(classmethod):  # type: ignore[type-arg]
    """A method that can be called on the class too; called on an instance, it is given the instance."""

    def __get__(self, instance: object, owner: object = None) -> Any:
        return MethodType(self.__func__, owner if instance is None else instance)


class Platform:
    """What every framework offers under one name and one meaning: the operations of `contract.OPERATIONS`.

    `TorchPlatform` and `MindSporePlatform` are put together from small parts, one file each; an operation that a
    subclass lacks raises `NotImplementedError` and names it. What needs only other operations is done here, for a
    user's own platform as well.
    """

    platform_type: PlatformType
    Tensor: type
    Parameter: type
    Module: type
    Function: type

    # The gradient reduction in flight is one per process, whatever the instance: kept on the class (see `grad_handle`).
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

    # -- groups, kept by their ranks ----------------------------------------------------------------------------------

    def create_group(self, rank_list: Sequence[int]) -> Any:
        """Return the group of these ranks; the same ranks give the same group.

        Its members call it; another rank may, and gets None.
        """
        ranks = check_ranks(rank_list, None, "create_group")
        key = cache_key(ranks)
        if key not in EXISTING_COMM_GROUPS:
            group = self._create_group(list(ranks))
            if group is None:
                return None
            EXISTING_COMM_GROUPS[key] = group
        return EXISTING_COMM_GROUPS[key]

    @classmethod
    def get_created_group(cls, rank_list: Sequence[int]) -> Any:
        """Return the cached group of these ranks, or None."""
        return EXISTING_COMM_GROUPS.get(cache_key(check_ranks(rank_list, None, "get_created_group", or_none=True)))

    @classmethod
    def mark_created_groups(cls: Any, process_group: object) -> None:
        """Put existing groups, one or a list of them, into the cache."""
        groups = process_group if isinstance(process_group, (list, tuple)) else [process_group]
        for group in groups:
            EXISTING_COMM_GROUPS[cache_key(cls.get_process_group_ranks(group))] = group

    # -- gradient reduction in flight (grad_handle.py) ----------------------------------------------------------------

    def set_grad_reduce_handle(self, handle: object, post_process: Callable[[], object] | None = None) -> None:
        """Drain the pending reduction, then keep this one; None keeps nothing.

        `post_process()` runs once `handle` is done.
        """
        grad_handle.check_handle(handle, post_process)
        self._process_current_handle()
        Platform.current_grad_handle = handle
        Platform.post_grad_handle_process = post_process

    def wait_grad_handle(self) -> None:
        """Drain what is pending and make the current stream wait for it."""
        if Platform.current_grad_handle is None:
            return
        self._process_current_handle()
        grad_handle.order_after(Platform.grad_sync_stream, self)

    @_OnEither
    def _process_current_handle(self_or_class: Any) -> None:  # noqa: N805 - see _OnEither
        """Drain what is pending."""
        if Platform.current_grad_handle is None:
            return
        platform = self_or_class() if isinstance(self_or_class, type) else self_or_class
        grad_handle.drain(Platform, platform)

    # -- modules ------------------------------------------------------------------------------------------------------

    @classmethod
    def init_parameters(cls, module: Any, stage_index: int) -> None:
        """Check the arguments.

        A platform on which parameters can be created without data gives them some.
        """
        cls._check_module(module, "init_parameters", "parameters")
        check_stage_index(stage_index)

    @classmethod
    def register_forward_pre_hook(
        cls, module: Any, hook: Callable[..., Any], prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        """Register a hook before forward; returns a removable handle."""
        cls._check_hook(module, hook, "register_forward_pre_hook", prepend=prepend, with_kwargs=with_kwargs)
        return module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=with_kwargs)

    @classmethod
    def register_full_backward_hook(cls, module: Any, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Register a hook after backward; returns a removable handle."""
        cls._check_hook(module, hook, "register_full_backward_hook", prepend=prepend)
        return module.register_full_backward_hook(hook, prepend=prepend)

    @classmethod
    def register_full_backward_pre_hook(cls, module: Any, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Register a hook before backward; returns a removable handle."""
        cls._check_hook(module, hook, "register_full_backward_pre_hook", prepend=prepend)
        return module.register_full_backward_pre_hook(hook, prepend=prepend)

    @classmethod
    def _check_hook(cls, module: Any, hook: Any, call: str, **flags: Any) -> None:
        for name, value in flags.items():
            check_flag(value, name)
        cls._check_module(module, call, call)
        if not callable(hook):
            raise ArgumentTypeError("A hook is a function.", expected="a callable", got=describe(hook), where=call)

    @classmethod
    def _check_module(cls, module: Any, call: str, has: str) -> None:
        """Raise where this is no module.

        A module is of the platform's own class; on a platform that has none, it is an object with what is asked of it.
        """
        kind: Any = getattr(cls, "Module", object)
        check_module(module, kind, call)
        if kind is object and not hasattr(module, has):
            raise ArgumentTypeError(
                f"`{call}` needs a module.", expected=f"an object with `{has}`", got=describe(module)
            )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


for _operation in contract.OPERATIONS:
    if _operation.name not in vars(Platform):
        setattr(Platform, _operation.name, _NotThere(_operation))
del _operation
