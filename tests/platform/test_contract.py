"""The rows of the contract, the two backends and a user's own subclass agree."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import hyper_parallel.platform
from hyper_parallel.platform import Platform
from hyper_parallel.platform.contract import BY_NAME, OPERATIONS, How
from hyper_parallel.platform.host_streams import HostStream, current_host_stream, host_stream_context
from hyper_parallel.platform.interface import EXISTING_COMM_GROUPS, _NotThere
from support.backends import Backend

SIGNATURES = """
tensor_type_cast(input_data, cast_type)
get_element_size(tensor)
get_tensor_storage_size(tensor)
tensor_to_numpy(tensor)
set_tensor_requires_grad(input_tensor)
full_like(tensor, fill_value, dtype=None)
arange(start, end=None, step=1, dtype=None, device=None)
zeros(size, dtype=None, device=None)
empty_like(tensor, *, dtype=None, device=None, pin_memory=False)
new_tensor(tensor_shape, tensor_type, device)
new_zero_parameter(param_shape, param_type, requires_grad, device)
cat(tensors, dim=0)
chunk(data, split_dim, split_size, index)
construct_strided_slice(x, begin, end, stride)
search_parameter_by_name(cell, param_name)
update_parameter_by_name(cell, result, new_param)
init_parameters(module, stage_index)
init_on_device(device, include_buffers=False)
register_forward_pre_hook(module, hook, prepend=False, with_kwargs=False)
register_full_backward_hook(module, hook, prepend=False)
register_full_backward_pre_hook(module, hook, prepend=False)
micro_batch(micro_batch_num, args_batch_dim=None, kwargs_batch_dim=None)
get_model_state_dict(model, *, options=None)
save_checkpoint(cell, file_path, ckpt_format='safetensors')
load_checkpoint(file_path, ckpt_format='safetensors')
clip_grad_norm_(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None)
str_to_dtype(dtype_str)
list_to_size(size_list)
cast_fp_tensor(dtype, x)
apply_to_tensors(fn, container)
tree_map(fn, tree)
isend(tensor, dst=None, group=None, tag=0)
irecv(tensor, src=None, group=None, tag=0)
p2p_exchange(tensor, peer_rank, group=None)
send_object_list(obj_list, dst=None, group=None)
recv_object_list(obj_list, src=None, group=None)
all_gather_object(object_list, obj, group=None)
barrier(group=None, async_op=False, device_ids=None)
init_process_group(backend=None, *, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, pg_options=None, device_id=None)
split_group(parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None)
mark_created_groups(process_group)
all_gather_into_tensor(data, group_info, async_op=False)
all_reduce(data, group_info, async_op=False)
reduce_scatter_tensor(data, group_info, async_op=False)
differentiable_all_gather_concat(data, group, concat_size, concat_dim)
differentiable_all_reduce(data, op, group)
differentiable_reduce_scatter(data, dev_num, axis, op, group)
differentiable_all_to_all(input_data, output_shape, group)
differentiable_async_a2a_wait(x, work, out_perm, group, world_size, concat_dim, split_dim, handle_box=None)
differentiable_sync_hook(x, hook_name, coordinator)
set_grad_reduce_handle(handle, post_process=None)
wait_grad_handle()
""".strip().splitlines()

ON_THE_INSTANCE = [
    "_create_group",
    "create_group",
    "new_stream",
    "get_stream_context",
    "set_grad_reduce_handle",
    "wait_grad_handle",
    "get_current_stream",
    "new_event",
    "tree_map",
    "cast_fp_tensor",
    "apply_to_tensors",
    "init_on_device",
    "str_to_dtype",
    "list_to_size",
]


def test_there_are_ninety_five_operations_each_once() -> None:
    assert len(OPERATIONS) == len(BY_NAME) == 95


def test_the_way_each_is_called_is_that_of_the_specification() -> None:
    assert {o.name for o in OPERATIONS if o.how is How.INSTANCE} == set(ON_THE_INSTANCE)
    assert {o.name for o in OPERATIONS if o.how is How.PROPERTY} == {"checkpoint", "noop_context_fn", "meta_device"}


@pytest.mark.parametrize("line", SIGNATURES, ids=lambda line: line.partition("(")[0])
def test_signatures_are_those_of_the_specification(platform: Any, line: str) -> None:
    name, _, wanted = line.partition("(")
    assert str(bare(inspect.signature(getattr(platform, name)))) == "(" + wanted


def test_the_base_class_shows_the_signature_of_every_operation(platform: Any) -> None:
    for operation in OPERATIONS:
        if operation.how is How.PROPERTY:
            continue
        of_base, of_backend = (
            bare(inspect.signature(getattr(each, operation.name))) for each in (Platform(), platform)
        )
        assert of_base == of_backend, operation.name
    assert str(bare(inspect.signature(Platform.isend))) == "(tensor, dst=None, group=None, tag=0)"
    assert str(bare(inspect.signature(Platform.tree_map))) == "(self, fn, tree)"


def bare(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(
        parameters=[each.replace(annotation=each.empty) for each in signature.parameters.values()],
        return_annotation=signature.empty,
    )


def test_what_can_be_called_on_the_class_needs_no_instance(platform: Any) -> None:
    for operation in OPERATIONS:
        found = inspect.getattr_static(type(platform), operation.name)
        is_there = operation.comes_with is None or not isinstance(found, _NotThere)
        if operation.how is How.ANYWHERE and is_there:
            assert isinstance(found, (staticmethod, classmethod)), operation.name


def test_every_operation_says_what_it_does(platform: Any) -> None:
    for operation in OPERATIONS:
        if operation.how is not How.PROPERTY:
            assert getattr(type(platform), operation.name).__doc__, operation.name


def test_every_platform_has_its_types(backend: Backend, platform: Any) -> None:
    assert isinstance(backend.tensor([1.0]), platform.Tensor)
    assert isinstance(backend.model(), platform.Module)
    parameter = platform.new_zero_parameter((1,), "float32", True, None)
    assert isinstance(parameter, platform.Parameter)
    assert isinstance(parameter, platform.Tensor)
    assert hasattr(platform.Function, "apply")
    assert isinstance(platform, Platform)


def test_a_method_that_a_users_platform_lacks_is_named() -> None:
    class Mine(Platform):
        @staticmethod
        def get_rank() -> int:
            return 3

    assert Mine.get_rank() == 3
    with pytest.raises(NotImplementedError, match="(?s)Mine.*`cat`"):
        Mine.cat([])
    with pytest.raises(NotImplementedError, match="`new_stream`"):
        Mine().new_stream()
    with pytest.raises(NotImplementedError, match="`meta_device`"):
        _ = Mine().meta_device
    with pytest.raises(AttributeError):
        _ = Mine().no_such_thing


class Mine(Platform):
    """A user's own platform: what others are made from, and nothing else."""

    made: ClassVar[list[list[int]]] = []

    def _create_group(self, rank_list: Sequence[int]) -> Any:
        self.made.append(list(rank_list))
        return None if 7 in rank_list else ("group", *rank_list)

    @staticmethod
    def get_process_group_ranks(group: Any = None) -> list[int]:
        return list(group[1:])

    def new_stream(self) -> HostStream:
        return HostStream()

    def get_stream_context(self) -> Any:
        return host_stream_context


def test_a_users_platform_keeps_groups_by_their_ranks() -> None:
    mine = Mine()
    Mine.made.clear()
    try:
        assert mine.create_group([1, 0]) is mine.create_group(np.arange(2))
        assert mine.get_created_group((0, 1)) == ("group", 0, 1)
        assert mine.get_created_group([0, 2]) is None
        assert mine.get_created_group([]) is None
        assert mine.create_group([7]) is mine.create_group([7]) is None
        assert Mine.made == [[0, 1], [7], [7]]
        Mine.mark_created_groups([("own", 4), ("own", 5, 3)])
        assert mine.create_group([3, 5]) == ("own", 5, 3)
        with pytest.raises(ValueError, match="none twice"):
            mine.create_group([1, 1])
    finally:
        EXISTING_COMM_GROUPS.clear()


def test_a_users_platform_has_the_gradient_reduction_in_flight() -> None:
    seen: list[Any] = []

    class Handle:
        def wait(self) -> None:
            seen.append(current_host_stream())

    mine = Mine()
    mine.set_grad_reduce_handle(Handle(), lambda: seen.append("post"))
    mine.wait_grad_handle()
    mine.wait_grad_handle()
    assert seen == [Platform.grad_sync_stream, "post"]
    mine.set_grad_reduce_handle(Handle())
    mine.set_grad_reduce_handle(None)
    assert len(seen) == 3


def test_a_users_platform_checks_modules_and_adds_their_hooks() -> None:
    mine, seen = Mine(), []

    class Module:
        def parameters(self) -> list[Any]:
            return []

        def register_forward_pre_hook(self, hook: Any, *, prepend: bool, with_kwargs: bool) -> str:
            seen.append((hook, prepend, with_kwargs))
            return "handle"

    assert mine.register_forward_pre_hook(Module(), print, with_kwargs=True) == "handle"
    assert seen == [(print, False, True)]
    mine.init_parameters(Module(), np.int64(0))
    for wrong in ((None, 0), (Module(), -1)):
        with pytest.raises(ValueError, match="module|Stages"):
            mine.init_parameters(*wrong)
    with pytest.raises(TypeError, match="register_full_backward_hook"):
        mine.register_full_backward_hook(Module(), print)
    with pytest.raises(TypeError, match="callable"):
        mine.register_forward_pre_hook(Module(), 3)


def test_numpy_integers_are_ranks_dims_and_indices(backend: Backend, platform: Any) -> None:
    x = backend.tensor(np.arange(8).reshape(4, 2))
    one = np.int64(1)
    assert backend.numbers(platform.chunk(x, np.int64(0), np.int32(2), one)).tolist() == [[4, 5], [6, 7]]
    picked = platform.construct_strided_slice(x, np.array([1]), [np.int64(4)], np.array([2]))
    assert backend.numbers(picked).tolist() == [[2, 3], [6, 7]]
    assert backend.numbers(platform.cat([x, x], np.int64(1))).shape == (4, 4)
    assert platform.get_global_rank(None, np.int64(0)) == 0
    assert platform.get_created_group(np.array([], np.int64)) is None
    args, _ = platform.micro_batch(np.int64(2), [np.int64(1)], None)([x])
    assert backend.numbers(args[1][0]).tolist() == [[1], [3], [5], [7]]
    with pytest.raises(ValueError, match="got 5 "):
        platform.chunk(x, np.int64(5), 2, one)
    with pytest.raises(ValueError, match="got 3 "):
        platform.get_global_rank(None, np.int64(3))


def test_the_two_backends_mirror_each_other_file_by_file() -> None:
    root = Path(hyper_parallel.platform.__file__).parent
    torch_files = {path.name for path in (root / "torch").glob("*.py")}
    mindspore_files = {path.name for path in (root / "mindspore").glob("*.py")}
    assert torch_files == mindspore_files - {"graph_mode.py"}  # PyTorch has one mode
