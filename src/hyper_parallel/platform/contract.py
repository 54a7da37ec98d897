"""The ninety-five operations that mean the same on every framework, as data.

One row per operation: its name, how it is called, one line of what it does, and, while its part of the package is not
there yet on every framework, what it comes with. `Platform` builds its "not there" answers and missing docstrings from these rows,
`hyper-parallel doctor --platform` its table, and the tests check that the rows and the two backends agree.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class How(Enum):
    """How an operation is reached."""

    ANYWHERE = "on the class or the instance"
    INSTANCE = "on the instance"
    PROPERTY = "as a property of the instance"


class Section(Enum):
    GROUPS = "Identity and groups"
    COLLECTIVES = "Collectives without gradient"
    DIFFERENTIABLE = "Collectives with gradient"
    GRAD_REDUCTION = "Gradient reduction in flight"
    TENSORS = "Tensors"
    MODULES = "Modules and parameters"
    EXECUTION = "Execution"


class Operation(NamedTuple):
    name: str
    section: Section
    summary: str
    how: How = How.ANYWHERE
    comes_with: str | None = None


COORDINATOR = "dual-pipe overlap"


def _rows(section: Section, text: str, comes_with: str | None = None) -> list[Operation]:
    """One operation per line: `name: summary`; `name*` is called on the instance, `name!` is a property."""
    rows = []
    for line in text.strip().splitlines():
        name, _, summary = line.strip().partition(": ")
        how = {"*": How.INSTANCE, "!": How.PROPERTY}.get(name[-1], How.ANYWHERE)
        rows.append(Operation(name.rstrip("*!"), section, summary, how, comes_with))
    return rows


OPERATIONS: tuple[Operation, ...] = (
    *_rows(
        Section.GROUPS,
        """
        get_rank: World rank of this process; 0 in a single process.
        get_world_size: Number of processes; 1 in a single process.
        get_global_rank: World rank of a member of a group.
        get_group_local_rank: This process's rank inside a group.
        init_process_group: Start communication; repeating it does nothing.
        destroy_process_group: End a group, or everything; cached groups are forgotten.
        get_process_group_ranks: World ranks of a group, in group order.
        get_backend: Name of a group's backend.
        split_group: Split a group into disjoint ones; this rank's new group, or None.
        create_group*: The group of these ranks; the same ranks give the same group.
        _create_group*: The framework's own, uncached group creation.
        get_created_group: The cached group of these ranks, or None.
        mark_created_groups: Put existing groups into the cache.
        """,
    ),
    *_rows(
        Section.COLLECTIVES,
        """
        all_gather_into_tensor: Concatenation over ranks along dim 0.
        all_reduce: Sum over ranks, in place when contiguous.
        reduce_scatter_tensor: Sum over ranks, each keeps its part of dim 0.
        broadcast: In place from one world rank.
        all_to_all_single: Exchange of equal splits of dim 0.
        isend: Start sending to a world rank.
        irecv: Start receiving from a world rank.
        send_object_list: Send picklable objects.
        recv_object_list: Receive picklable objects into the list.
        all_gather_object: Every rank's object, in rank order.
        barrier: Wait until every rank is here.
        """,
    ),
    *_rows(
        Section.DIFFERENTIABLE,
        """
        differentiable_all_gather_concat: Concatenation over ranks; backward: reduce-scatter.
        differentiable_all_reduce: Reduction over ranks into a new tensor, with its gradient.
        differentiable_reduce_scatter: Reduction of which each rank keeps a part; backward: all-gather.
        differentiable_all_to_all: Exchange of equal splits; backward: the reverse exchange.
        differentiable_all_to_all_single: Exchange of uneven row splits; backward swaps the splits.
        differentiable_all_to_all_single_async: The same, returning once it is launched.
        p2p_exchange: Exchange with one peer; backward exchanges the gradients.
        differentiable_async_a2a_wait: Finish an exchange that was launched before, inside the graph.
        """,
    ),
    *_rows(
        Section.DIFFERENTIABLE,
        "differentiable_sync_hook: Identity at which forward and backward meet the coordinator.",
        COORDINATOR,
    ),
    *_rows(
        Section.GRAD_REDUCTION,
        """
        set_grad_reduce_handle*: Drain the pending gradient reduction, then keep this one.
        wait_grad_handle*: Drain what is pending and make the current stream wait for it.
        _process_current_handle: The drain itself.
        """,
    ),
    *_rows(
        Section.TENSORS,
        """
        is_tensor: Whether an object is this framework's tensor.
        get_element_size: Bytes of one element.
        get_tensor_storage_size: Elements times the bytes of one.
        tensor_type_cast: A tensor cast to a named dtype.
        cast_fp_tensor*: Floating tensors cast, everything else unchanged.
        apply_to_tensors*: A function applied to every tensor in a container; types kept.
        tree_map*: A function applied to every leaf of a container; types kept.
        chunk: The index-th of `split_size` chunks along a dim; past the last one, an empty tensor.
        cat: Concatenation along a dim.
        construct_strided_slice: A strided slice by begin, end and stride per leading dim, as in Python.
        arange: A range of numbers, int64 unless told.
        zeros: Zeros of a size, float32 unless told.
        full_like: A tensor like another, filled.
        empty_like: An uninitialised tensor like another.
        new_tensor: An uninitialised tensor of a shape, dtype and device.
        new_zero_parameter: A parameter of zeros.
        set_tensor_requires_grad: Turn gradient tracking on, in place.
        tensor_to_numpy: A NumPy array on the host, detached; bfloat16 arrives as float32.
        str_to_dtype*: The dtype of a name such as `torch.float32`, `mindspore.float32` or `float32`.
        list_to_size*: A list of ints as the framework's size type.
        get_op_name: The name under which rules for an operator are registered.
        get_tensor_transform: The redistribution planner of this package.
        """,
    ),
    *_rows(
        Section.MODULES,
        """
        get_cell_construct: A module's `forward` or `construct`.
        get_cells_and_names: `(name, module)` pairs, itself first under the empty name.
        parameters_dict: Parameters by name, in order.
        search_parameter_by_name: `(owner, local name, parameter)` at a dotted path, or None.
        update_parameter_by_name: Replace a parameter, wherever the module holds it.
        set_layout_into_parameter: A parameter whose data is a DTensor with that layout.
        get_param_local_shape: Shape of the local part of a parameter.
        get_param_local_data: The local part of a parameter.
        get_param_type_size: Bytes of one element of a parameter.
        update_param_data: Bind a parameter to other data.
        load_into_param: Copy values into a parameter; one without data receives them.
        init_parameters: Give data to parameters that were created without.
        meta_device!: The device of tensors without data.
        init_on_device*: Parameters created in the block land on a device.
        is_linear_module: Whether a module is the framework's linear layer.
        is_embedding_module: Whether a module is the framework's embedding.
        register_forward_pre_hook: A hook before forward; a removable handle.
        register_full_backward_hook: A hook after backward; a removable handle.
        register_full_backward_pre_hook: A hook before backward; a removable handle.
        micro_batch: A splitter of arguments into micro batches.
        get_model_state_dict: Parameters and buffers by name.
        save_checkpoint: A module or tensors into a file, whole or not at all.
        load_checkpoint: The tensors of a file, checked, without running code.
        clip_grad_norm_: Scale gradients to a total norm; the norm before.
        """,
    ),
    *_rows(
        Section.EXECUTION,
        """
        new_stream*: A new stream of the current device.
        get_current_stream*: The stream that operations go to now.
        new_event*: A new event.
        get_stream_context*: A callable: `with ctx(stream):` sends operations there.
        no_grad: A context without gradient tracking.
        profiler_record: A named range in the framework's profiler, as context or decorator.
        """,
    ),
    *_rows(
        Section.EXECUTION,
        """
        checkpoint!: Run a function as a region: save, recompute or swap per op.
        noop_context_fn!: A function that gives two null contexts.
        create_selective_checkpoint_contexts: The forward and the recompute context of a policy.
        async_save_on_cpu: Saved-tensor hooks that swap what a block saves.
        ckpt_wrapper: A module whose forward is a region.
        swap_wrapper: A module whose residuals are swapped.
        """,
    ),
    *_rows(
        Section.EXECUTION,
        "get_symmetric_memory_handler: The framework's symmetric memory.",
    ),
)

BY_NAME: dict[str, Operation] = {operation.name: operation for operation in OPERATIONS}
