"""The ninety-five operations that mean the same on every framework, as data.

One row per operation: its name, its arguments, how it is called, one line of what it does, and, while its part of the package is not
there yet on every framework, what it comes with. `Platform` builds its "not there" answers, signatures and missing docstrings from these rows,
`hyper-parallel doctor --platform` its table, and the tests check that the rows and the two backends agree.
"""

from __future__ import annotations

import ast
from enum import Enum
from inspect import Parameter, Signature
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
    arguments: str = "()"

    def signature(self, *, with_self: bool = False) -> Signature:
        """Return the arguments as `inspect.signature` shows those of a function."""
        given = ast.parse(f"def call{self.arguments}: ...").body[0].args  # type: ignore[attr-defined]
        found = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)] if with_self else []
        optional = len(given.args) - len(given.defaults)
        for index, argument in enumerate(given.args):
            default = Parameter.empty if index < optional else ast.literal_eval(given.defaults[index - optional])
            found.append(Parameter(argument.arg, Parameter.POSITIONAL_OR_KEYWORD, default=default))
        for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
            found.append(Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=ast.literal_eval(default)))
        if given.kwarg is not None:
            found.append(Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD))
        return Signature(found)


def _rows(section: Section, text: str, comes_with: str | None = None) -> list[Operation]:
    """Read rows of the table: `name(arguments): summary`. `name*` is called on the instance, `name!` is a property."""
    rows = []
    for line in text.strip().splitlines():
        call, _, summary = line.strip().partition(": ")
        name, opening, arguments = call.partition("(")
        how = {"*": How.INSTANCE, "!": How.PROPERTY}.get(name[-1], How.ANYWHERE)
        rows.append(Operation(name.rstrip("*!"), section, summary, how, comes_with, opening + arguments or "()"))
    return rows


OPERATIONS: tuple[Operation, ...] = (
    *_rows(
        Section.GROUPS,
        """
        get_rank(): World rank of this process; 0 in a single process.
        get_world_size(): Number of processes; 1 in a single process.
        get_global_rank(group, group_rank): World rank of a member of a group.
        get_group_local_rank(group=None): This process's rank inside a group.
        init_process_group(backend=None, *, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, pg_options=None, device_id=None): Start communication; repeating it does nothing.
        destroy_process_group(group=None): End a group, or everything; cached groups are forgotten.
        get_process_group_ranks(group=None): World ranks of a group, in group order.
        get_backend(group=None): Name of a group's backend.
        split_group(parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None): Split a group into disjoint ones; this rank's new group, or None.
        create_group*(rank_list): The group of these ranks; the same ranks give the same group.
        _create_group*(rank_list): The framework's own, uncached group creation.
        get_created_group(rank_list): The cached group of these ranks, or None.
        mark_created_groups(process_group): Put existing groups into the cache.
        """,
    ),
    *_rows(
        Section.COLLECTIVES,
        """
        all_gather_into_tensor(data, group_info, async_op=False): Concatenation over ranks along dim 0.
        all_reduce(data, group_info, async_op=False): Sum over ranks, in place when contiguous.
        reduce_scatter_tensor(data, group_info, async_op=False): Sum over ranks, each keeps its part of dim 0.
        broadcast(data, src, group=None, async_op=False): In place from one world rank.
        all_to_all_single(input_tensor, output_shape, group=None, async_op=False): Exchange of equal splits of dim 0.
        isend(tensor, dst=None, group=None, tag=0): Start sending to a world rank.
        irecv(tensor, src=None, group=None, tag=0): Start receiving from a world rank.
        send_object_list(obj_list, dst=None, group=None): Send picklable objects.
        recv_object_list(obj_list, src=None, group=None): Receive picklable objects into the list.
        all_gather_object(object_list, obj, group=None): Every rank's object, in rank order.
        barrier(group=None, async_op=False, device_ids=None): Wait until every rank is here.
        """,
    ),
    *_rows(
        Section.DIFFERENTIABLE,
        """
        differentiable_all_gather_concat(data, group, concat_size, concat_dim): Concatenation over ranks; backward: reduce-scatter.
        differentiable_all_reduce(data, op, group): Reduction over ranks into a new tensor, with its gradient.
        differentiable_reduce_scatter(data, dev_num, axis, op, group): Reduction of which each rank keeps a part; backward: all-gather.
        differentiable_all_to_all(input_data, output_shape, group): Exchange of equal splits; backward: the reverse exchange.
        differentiable_all_to_all_single(input_tensor, input_splits, output_splits, group=None): Exchange of uneven row splits; backward swaps the splits.
        differentiable_all_to_all_single_async(input_tensor, input_splits, output_splits, group=None): The same, returning once it is launched.
        p2p_exchange(tensor, peer_rank, group=None): Exchange with one peer; backward exchanges the gradients.
        differentiable_async_a2a_wait(x, work, out_perm, group, world_size, concat_dim, split_dim, handle_box=None): Finish an exchange that was launched before, inside the graph.
        differentiable_sync_hook(x, hook_name, coordinator): Identity at which forward and backward meet the coordinator.
        """,
    ),
    *_rows(
        Section.GRAD_REDUCTION,
        """
        set_grad_reduce_handle*(handle, post_process=None): Drain the pending gradient reduction, then keep this one.
        wait_grad_handle*(): Drain what is pending and make the current stream wait for it.
        _process_current_handle(): The drain itself.
        """,
    ),
    *_rows(
        Section.TENSORS,
        """
        is_tensor(obj): Whether an object is this framework's tensor.
        get_element_size(tensor): Bytes of one element.
        get_tensor_storage_size(tensor): Elements times the bytes of one.
        tensor_type_cast(input_data, cast_type): A tensor cast to a named dtype.
        cast_fp_tensor*(dtype, x): Floating tensors cast, everything else unchanged.
        apply_to_tensors*(fn, container): A function applied to every tensor in a container; types kept.
        tree_map*(fn, tree): A function applied to every leaf of a container; types kept.
        chunk(data, split_dim, split_size, index): The index-th of `split_size` chunks along a dim; past the last one, an empty tensor.
        cat(tensors, dim=0): Concatenation along a dim.
        construct_strided_slice(x, begin, end, stride): A strided slice by begin, end and stride per leading dim, as in Python.
        arange(start, end=None, step=1, dtype=None, device=None): A range of numbers, int64 unless told.
        zeros(size, dtype=None, device=None): Zeros of a size, float32 unless told.
        full_like(tensor, fill_value, dtype=None): A tensor like another, filled.
        empty_like(tensor, *, dtype=None, device=None, pin_memory=False): An uninitialised tensor like another.
        new_tensor(tensor_shape, tensor_type, device): An uninitialised tensor of a shape, dtype and device.
        new_zero_parameter(param_shape, param_type, requires_grad, device): A parameter of zeros.
        set_tensor_requires_grad(input_tensor): Turn gradient tracking on, in place.
        tensor_to_numpy(tensor): A NumPy array on the host, detached; bfloat16 arrives as float32.
        str_to_dtype*(dtype_str): The dtype of a name such as `torch.float32`, `mindspore.float32` or `float32`.
        list_to_size*(size_list): A list of ints as the framework's size type.
        get_op_name(func): The name under which rules for an operator are registered.
        get_tensor_transform(): The redistribution planner of this package.
        """,
    ),
    *_rows(
        Section.MODULES,
        """
        get_cell_construct(cell): A module's `forward` or `construct`.
        get_cells_and_names(cell): `(name, module)` pairs, itself first under the empty name.
        parameters_dict(cell): Parameters by name, in order.
        search_parameter_by_name(cell, param_name): `(owner, local name, parameter)` at a dotted path, or None.
        update_parameter_by_name(cell, result, new_param): Replace a parameter, wherever the module holds it.
        set_layout_into_parameter(param, layout): A parameter whose data is a DTensor with that layout.
        get_param_local_shape(param): Shape of the local part of a parameter.
        get_param_local_data(param): The local part of a parameter.
        get_param_type_size(param): Bytes of one element of a parameter.
        update_param_data(param, data): Bind a parameter to other data.
        load_into_param(param, data): Copy values into a parameter; one without data receives them.
        init_parameters(module, stage_index): Give data to parameters that were created without.
        meta_device!: The device of tensors without data.
        init_on_device*(device, include_buffers=False): Parameters created in the block land on a device.
        is_linear_module(module): Whether a module is the framework's linear layer.
        is_embedding_module(module): Whether a module is the framework's embedding.
        register_forward_pre_hook(module, hook, prepend=False, with_kwargs=False): A hook before forward; a removable handle.
        register_full_backward_hook(module, hook, prepend=False): A hook after backward; a removable handle.
        register_full_backward_pre_hook(module, hook, prepend=False): A hook before backward; a removable handle.
        micro_batch(micro_batch_num, args_batch_dim=None, kwargs_batch_dim=None): A splitter of arguments into micro batches.
        get_model_state_dict(model, *, options=None): Parameters and buffers by name.
        save_checkpoint(cell, file_path, ckpt_format='safetensors'): A module or tensors into a file, whole or not at all.
        load_checkpoint(file_path, ckpt_format='safetensors'): The tensors of a file, checked, without running code.
        clip_grad_norm_(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None): Scale gradients to a total norm; the norm before.
        """,
    ),
    *_rows(
        Section.EXECUTION,
        """
        new_stream*(): A new stream of the current device.
        get_current_stream*(): The stream that operations go to now.
        new_event*(): A new event.
        get_stream_context*(): A callable: `with ctx(stream):` sends operations there.
        no_grad(): A context without gradient tracking.
        profiler_record(name): A named range in the framework's profiler, as context or decorator.
        """,
    ),
    *_rows(
        Section.EXECUTION,
        """
        checkpoint!: Run a function as a region: save, recompute or swap per op.
        noop_context_fn!: A function that gives two null contexts.
        create_selective_checkpoint_contexts(policy_fn_or_list, allow_cache_entry_mutation=False): The forward and the recompute context of a policy.
        async_save_on_cpu(policy_fn=None): Saved-tensor hooks that swap what a block saves.
        ckpt_wrapper(module, checkpoint_fn=None, **checkpoint_fn_kwargs): A module whose forward is a region.
        swap_wrapper(module, policy_fn=None): A module whose residuals are swapped.
        """,
    ),
    *_rows(
        Section.EXECUTION,
        "get_symmetric_memory_handler(): The framework's symmetric memory.",
    ),
)

BY_NAME: dict[str, Operation] = {operation.name: operation for operation in OPERATIONS}
