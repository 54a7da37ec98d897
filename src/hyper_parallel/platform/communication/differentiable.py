"""Collectives with gradient: their arguments. The rules of forward and backward are in `functions.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.platform.arguments import check_same_shape
from hyper_parallel.platform.communication.functions import Functions
from hyper_parallel.platform.communication.reductions import EXTREMES, Reduction, check_can_average, to_reduction
from hyper_parallel.platform.communication.splits import (
    check_dim,
    check_divisible,
    check_num_ranks,
    check_output_shape,
    check_splits,
)
from hyper_parallel.platform.communication.sync_hook import Coordinator, check_hook
from hyper_parallel.platform.communication.transport import Transport, check_rank
from hyper_parallel.platform.interface import Platform
from hyper_parallel.platform.opaque import Group, Tensor

_SCATTERED = (Reduction.SUM, Reduction.AVG, *EXTREMES)


class Differentiable(Platform):
    transport: ClassVar[Transport]
    functions: ClassVar[Functions]

    @classmethod
    def differentiable_all_gather_concat(cls, data: Any, group: Group, concat_size: int, concat_dim: int) -> Any:
        """Concatenate over ranks along `concat_dim`; `concat_size` is their number.

        Backward: reduce-scatter (sum).
        """
        call = "differentiable_all_gather_concat"
        group, num_ranks = cls._enter(data, group, call)
        check_num_ranks(concat_size, num_ranks, "concat_size", call)
        dim = check_dim(concat_dim, data.ndim, "concat_dim", call)
        return cls.functions.all_gather.apply(data, dim, group, call)

    @classmethod
    def differentiable_all_reduce(cls, data: object, op: object, group: Group) -> Any:
        """Reduce over ranks by `sum`, `avg`, `max`, `min` or `prod`, into a new tensor.

        Backward sums the gradient over ranks. For `avg` it is divided; for `max` and `min` it goes where this rank
        holds the extreme value (ties share it equally); for `prod` it is multiplied by the product of the other ranks'
        values.
        """
        call = "differentiable_all_reduce"
        group, _ = cls._enter(data, group, call)
        reduction = to_reduction(op, cls.transport.reductions)
        check_can_average(reduction, cls.transport.is_floating(data), call, data)
        linear = reduction in (Reduction.SUM, Reduction.AVG)
        function = cls.functions.all_reduce if linear else cls.functions.all_reduce_other
        return function.apply(data, reduction, group, call)

    @classmethod
    def differentiable_reduce_scatter(cls, data: Any, dev_num: int, axis: int, op: Any, group: Any) -> Any:
        """Reduce over ranks by `sum`, `avg`, `max` or `min`; each keeps its part of `axis`.

        `dev_num` is the number of ranks. Backward of `sum`: all-gather, divided for `avg`; for `max` and `min` the
        gradient goes where this rank holds the extreme value.
        """
        call = "differentiable_reduce_scatter"
        group, num_ranks = cls._enter(data, group, call)
        check_num_ranks(dev_num, num_ranks, "dev_num", call)
        dim = check_dim(axis, data.ndim, "axis", call)
        check_divisible(data.shape, dim, num_ranks, call)
        reduction = to_reduction(op, cls.transport.reductions, _SCATTERED)
        check_can_average(reduction, cls.transport.is_floating(data), call, data)
        is_extreme = reduction in EXTREMES
        function = cls.functions.reduce_scatter_extreme if is_extreme else cls.functions.reduce_scatter
        return function.apply(data, dim, reduction, group, call)

    @classmethod
    def differentiable_all_to_all(cls, input_data: Any, output_shape: Sequence[int], group: Group) -> Any:
        """Exchange equal splits of dim 0; backward: the reverse exchange."""
        call = "differentiable_all_to_all"
        group, num_ranks = cls._enter(input_data, group, call)
        shape = check_output_shape(input_data.shape, output_shape, num_ranks, call)
        check_divisible(shape, 0, num_ranks, call)
        return cls.functions.exchange.apply(input_data, shape, group, call)

    @classmethod
    def differentiable_all_to_all_single(
        cls,
        input_tensor: object,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Group = None,
    ) -> Any:
        """Exchange rows, so many to and from each rank, zeros allowed; with both splits None, equal parts.

        Backward swaps the splits.
        """
        return cls._exchange_rows(
            input_tensor, input_splits, output_splits, group, False, "differentiable_all_to_all_single"
        )

    @classmethod
    def differentiable_all_to_all_single_async(
        cls,
        input_tensor: object,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        group: Group = None,
    ) -> Any:
        """Exchange rows, returning once it is launched: the first use of the result waits, in backward too.

        MindSpore on the CPU runs everything in one order, so there it returns when the exchange is done.
        """
        return cls._exchange_rows(
            input_tensor, input_splits, output_splits, group, True, "differentiable_all_to_all_single_async"
        )

    @classmethod
    def p2p_exchange(cls, tensor: Tensor, peer_rank: int, group: Group = None) -> Any:
        """Exchange a tensor with the world rank `peer_rank`, which does the same.

        With itself as the peer it is a copy. Backward exchanges the gradients.
        """
        group, _ = cls._enter(tensor, group, "p2p_exchange")
        peer = check_rank(peer_rank, cls.transport.ranks_of(group), "peer_rank", "p2p_exchange")
        return cls.functions.pair.apply(tensor, peer, group)

    @classmethod
    def differentiable_async_a2a_wait(
        cls,
        x: Any,
        work: Any,
        out_perm: Any,
        group: Any,
        world_size: int,
        concat_dim: int,
        split_dim: int,
        handle_box: list[Any] | None = None,
    ) -> Any:
        """Finish an exchange that was launched before.

        It waits for `work`, and builds the tensor with `concat_dim` gathered and `split_dim` split from `out_perm`
        (leading dim: the ranks), tied into the graph of `x`.

        Backward launches the reverse exchange and waits for it. With a `handle_box` it does not wait: it appends
        `(work, buffer)` there and gives `x` zeros. The caller waits just before its matrix product, joins the buffer's
        pieces along `split_dim`, and puts that in the zeros' place. An entry that is left in the box at the end of
        backward is an error.
        """
        call = "differentiable_async_a2a_wait"
        group, num_ranks = cls._enter(x, group, call)
        cls.transport.check_tensor(out_perm, call)
        check_num_ranks(world_size, num_ranks, "world_size", call)
        gathered = check_dim(concat_dim, x.ndim, "concat_dim", call)
        split = check_dim(split_dim, x.ndim, "split_dim", call)
        if gathered == split:
            raise ArgumentError(
                f"`{call}` splits one dim and gathers another.", expected="two dims", got=f"{split} twice"
            )
        check_divisible(x.shape, split, num_ranks, call)
        piece = [length // num_ranks if dim == split else length for dim, length in enumerate(x.shape)]
        check_same_shape([num_ranks, *piece], out_perm.shape, call)
        if handle_box is not None and not isinstance(handle_box, list):
            raise ArgumentTypeError(
                f"`handle_box` of `{call}` is a list.", expected="a list or None", got=describe(handle_box)
            )
        if work is not None:
            work.wait()
        return cls.functions.finish_exchange.apply(x, out_perm, gathered, split, group, handle_box)

    @classmethod
    def differentiable_sync_hook(cls, x: Any, hook_name: str, coordinator: Coordinator) -> Any:
        """Return `x` itself; on the way, forward and backward meet at `coordinator`.

        That is a `hyper_parallel.HookCoordinator`, or what has its methods. `A` stands before a dispatch, `B` after it,
        `C` before a combine, `D` after it. While the coordinator is disabled nobody waits. The gradient is handed on as
        it is.
        """
        call = "differentiable_sync_hook"
        cls.transport.check_tensor(x, call)
        check_hook(hook_name, coordinator, call)
        return cls.functions.sync_hook.apply(x, hook_name, coordinator)

    @classmethod
    def _exchange_rows(cls, data: Any, sent: Any, received: Any, group: Group, is_lazy: bool, call: str) -> Any:
        group, num_ranks = cls._enter(data, group, call)
        sent, received = check_splits(data.shape, sent, received, num_ranks, call)
        return cls.functions.exchange_rows.apply(data, sent, received, group, is_lazy, call)

    @classmethod
    def _enter(cls, data: object, group: Group, call: str) -> tuple[Any, int]:
        """Return the framework's group, and its size."""
        cls.transport.check_tensor(data, call)
        own = cls.transport.group(group, call)
        return own, len(cls.transport.ranks_of(own))
