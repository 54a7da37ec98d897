"""Tensors of the platform layer: one text, every framework."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
import pytest

from support.backends import Backend

covers = pytest.mark.covers


@covers("is_tensor")
def test_a_tensor_and_a_parameter_are_tensors_and_nothing_else_is(backend: Backend, platform: Any) -> None:
    assert platform.is_tensor(backend.tensor([1.0]))
    assert platform.is_tensor(platform.new_zero_parameter((2,), "float32", True, None))
    for other in (np.ones(2), [1.0], 1.0, None, "tensor", platform.Tensor):
        assert not platform.is_tensor(other)


@covers("get_element_size")
@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("float16", 2), ("bfloat16", 2), ("int64", 8), ("bool", 1)]
)
def test_the_element_size_is_in_bytes(backend: Backend, platform: Any, dtype: str, size: int) -> None:
    assert platform.get_element_size(backend.tensor([1, 0], dtype)) == size


@covers("get_tensor_storage_size")
def test_the_storage_size_is_elements_times_bytes(backend: Backend, platform: Any) -> None:
    assert platform.get_tensor_storage_size(backend.tensor(np.zeros((3, 5)))) == 60
    assert platform.get_tensor_storage_size(backend.tensor(np.zeros((0, 5)))) == 0
    assert platform.get_tensor_storage_size(backend.tensor(np.zeros((4, 4)))[1:3]) == 32


@covers("get_element_size", "get_tensor_storage_size")
@pytest.mark.parametrize("wrong", [None, 3, [1.0], np.ones(2)])
def test_sizes_of_something_else_than_a_tensor_are_a_type_error_that_shows_it(platform: Any, wrong: Any) -> None:
    with pytest.raises(TypeError, match="expected|Expected"):
        platform.get_element_size(wrong)
    with pytest.raises(TypeError, match="got"):
        platform.get_tensor_storage_size(tensor=wrong)


@covers("tensor_type_cast")
@pytest.mark.parametrize(
    "name", ["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "bool", "BFloat16"]
)
def test_casting_by_name_gives_that_dtype_and_the_values(backend: Backend, platform: Any, name: str) -> None:
    cast = platform.tensor_type_cast(input_data=backend.tensor([0.0, 1.0, 2.0]), cast_type=name)
    assert cast.dtype == platform.str_to_dtype(name)
    expected = [False, True, True] if name == "bool" else [0, 1, 2]
    assert backend.numbers(cast).astype(np.float64).tolist() == np.asarray(expected, np.float64).tolist()


@covers("tensor_type_cast")
def test_casting_accepts_a_dtype_object(backend: Backend, platform: Any) -> None:
    dtype = platform.str_to_dtype("float16")
    assert platform.tensor_type_cast(backend.tensor([1.0]), dtype).dtype == dtype


@covers("tensor_type_cast", "str_to_dtype")
@pytest.mark.parametrize("wrong", ["float33", "", "torch.", None, 3, "numpy.float32"])
def test_an_unknown_dtype_name_is_an_error_that_lists_the_accepted_names(
    backend: Backend, platform: Any, wrong: Any
) -> None:
    with pytest.raises(ValueError, match="bfloat16") as caught:
        platform.tensor_type_cast(backend.tensor([1.0]), wrong)
    assert repr(wrong) in str(caught.value) or "None" in str(caught.value)
    with pytest.raises(ValueError, match="float32"):
        platform.str_to_dtype(wrong)


@covers("str_to_dtype")
@pytest.mark.parametrize("name", ["float32", "int64", "bfloat16", "bool", "uint8"])
def test_a_dtype_name_means_the_same_with_either_prefix(backend: Backend, platform: Any, name: str) -> None:
    dtype = platform.str_to_dtype(name)
    assert platform.str_to_dtype(f"torch.{name}") == dtype
    assert platform.str_to_dtype(f"mindspore.{name}") == dtype
    assert backend.tensor([1, 0], name).dtype == dtype


@covers("cast_fp_tensor")
def test_only_floating_tensors_are_cast(backend: Backend, platform: Any) -> None:
    half = platform.str_to_dtype("float16")
    assert platform.cast_fp_tensor(half, backend.tensor([1.0])).dtype == half
    assert platform.cast_fp_tensor("float16", backend.tensor([1.0], "bfloat16")).dtype == half
    whole = backend.tensor([1], "int32")
    assert platform.cast_fp_tensor(half, whole) is whole
    for other in ("text", 3.5, None):
        assert platform.cast_fp_tensor(half, other) is other


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: Any
    number: int
    derived: int = dataclasses.field(default=7, init=False)


class Named(collections.OrderedDict):
    pass


@covers("apply_to_tensors", "tree_map")
def test_every_container_keeps_its_type_and_only_tensors_are_touched(backend: Backend, platform: Any) -> None:
    one = backend.tensor([1.0])
    default = collections.defaultdict(list, {"x": one})
    container = {
        "list": [one, 2, "text"],
        "tuple": (one, None),
        "pair": Pair(one, 5),
        "frozen": Frozen(one, 3),
        "ordered": Named([("b", one), ("a", 1)]),
        "default": default,
        "set": {4, 5},
        "deep": [({"k": [one]},)],
    }
    doubled = platform.apply_to_tensors(lambda tensor: tensor + tensor, container)
    assert type(doubled["tuple"]) is tuple
    assert doubled["tuple"][1] is None
    assert type(doubled["pair"]) is Pair
    assert doubled["pair"].second == 5
    assert type(doubled["frozen"]) is Frozen
    assert (doubled["frozen"].number, doubled["frozen"].derived) == (3, 7)
    assert type(doubled["ordered"]) is Named
    assert list(doubled["ordered"]) == ["b", "a"]
    assert type(doubled["default"]) is collections.defaultdict
    assert doubled["default"].default_factory is list
    assert doubled["set"] == {4, 5}
    assert doubled["list"][1:] == [2, "text"]
    for changed in (doubled["list"][0], doubled["tuple"][0], doubled["pair"].first, doubled["frozen"].tensor,
                    doubled["ordered"]["b"], doubled["default"]["x"], doubled["deep"][0][0]["k"][0]):  # fmt: skip
        assert backend.numbers(changed).tolist() == [2.0]
    assert backend.numbers(container["list"][0]).tolist() == [1.0], "the input is as it was"
    assert container["default"] is default


@covers("apply_to_tensors")
def test_a_set_of_tensors_stays_a_set(backend: Backend, platform: Any) -> None:
    result = platform.apply_to_tensors(lambda tensor: tensor + 1, {backend.tensor([1.0])})
    assert type(result) is set
    assert [backend.numbers(item).tolist() for item in result] == [[2.0]]


@covers("tree_map")
def test_tree_map_calls_the_function_on_every_leaf(backend: Backend, platform: Any) -> None:
    one = backend.tensor([1.0])
    seen: list[Any] = []
    result = platform.tree_map(lambda leaf: seen.append(leaf) or type(leaf).__name__, [one, (2, None), {"k": "s"}])
    assert [type(leaf) for leaf in seen] == [type(one), int, type(None), str]
    assert result[1:] == [("int", "NoneType"), {"k": "str"}]
    assert platform.tree_map(lambda leaf: leaf, 3) == 3


@covers("apply_to_tensors", "tree_map")
def test_a_function_that_is_none_is_refused(platform: Any) -> None:
    with pytest.raises(TypeError, match="callable"):
        platform.apply_to_tensors([1], len)
    with pytest.raises(TypeError, match="callable"):
        platform.tree_map(None, [1])


@covers("tree_map")
def test_a_set_whose_items_become_unhashable_is_refused(platform: Any) -> None:
    with pytest.raises(TypeError, match="hashable"):
        platform.tree_map(lambda leaf: [leaf], {1, 2})


@covers("chunk")
@pytest.mark.parametrize("length", [0, 1, 5, 6, 8])
@pytest.mark.parametrize("num_chunks", [1, 2, 4, 7])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_chunks_are_those_of_the_framework_and_empty_past_the_last(
    backend: Backend, platform: Any, length: int, num_chunks: int, dim: int
) -> None:
    shape = (length, 3) if dim == 0 else (3, length)
    values = np.arange(length * 3, dtype=np.float32).reshape(shape)
    size = -(-length // num_chunks)
    for index in range(num_chunks + 1):
        part = backend.numbers(platform.chunk(backend.tensor(values), dim, num_chunks, index))
        expected = np.take(values, range(min(index * size, length), min((index + 1) * size, length)), axis=dim)
        assert part.shape == expected.shape
        assert np.array_equal(part, expected)


@covers("chunk")
def test_gradients_flow_through_a_chunk(backend: Backend, platform: Any) -> None:
    (grad,) = backend.grad_of(lambda x: platform.chunk(x, 0, 2, 1) * 3, backend.tensor(np.ones((5, 2))))
    assert grad.tolist() == [[0, 0]] * 3 + [[3, 3]] * 2


@covers("chunk")
@pytest.mark.parametrize("wrong", [(2, 2, 0), (-3, 2, 0), (0, 0, 0), (0, 2, -1), (0, 1.5, 0)])
def test_a_chunk_that_cannot_be_is_an_error_with_both_numbers(backend: Backend, platform: Any, wrong: tuple) -> None:
    with pytest.raises(ValueError, match="(?s)xpected.*got"):
        platform.chunk(backend.tensor(np.ones((4, 4))), *wrong)


@covers("cat")
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_concatenation_along_a_dim_and_its_gradient(backend: Backend, platform: Any, dim: int) -> None:
    left, right = np.ones((2, 2), np.float32), np.full((2, 2), 2, np.float32)
    joined = platform.cat(tensors=[backend.tensor(left), backend.tensor(right)], dim=dim)
    assert np.array_equal(backend.numbers(joined), np.concatenate([left, right], axis=dim))
    grads = backend.grad_of(lambda a, b: platform.cat((a, b), dim) * 2, backend.tensor(left), backend.tensor(right))
    assert all(np.array_equal(grad, np.full((2, 2), 2)) for grad in grads)


@covers("cat")
def test_concatenating_one_and_an_empty_tensor(backend: Backend, platform: Any) -> None:
    assert backend.numbers(platform.cat([backend.tensor([1.0])])).tolist() == [1.0]
    empty = backend.tensor(np.zeros((0, 2)))
    assert backend.numbers(platform.cat([empty, backend.tensor(np.ones((1, 2)))])).tolist() == [[1.0, 1.0]]


@covers("cat")
def test_concatenating_the_wrong_container_says_what_was_expected(backend: Backend, platform: Any) -> None:
    with pytest.raises(TypeError, match="list or tuple"):
        platform.cat(backend.tensor([1.0]))
    with pytest.raises(ValueError, match="at least one"):
        platform.cat([])
    with pytest.raises(TypeError, match="position 1"):
        platform.cat([backend.tensor([1.0]), 2.0])


SLICES = [
    ((0,), (5,), (1,)),
    ((1,), (-1,), (2,)),
    ((-3,), (None,), (1,)),
    ((4,), (0,), (-2,)),
    ((None,), (None,), (-1,)),
    ((-1,), (-9,), (-1,)),
    ((3,), (3,), (1,)),
    ((4,), (1,), (1,)),
    ((0, 1), (5, 4), (2, 3)),
    ((None, -1), (None, 0), (1, -1)),
    ((99,), (100,), (1,)),
    ((), (), ()),
]


@covers("construct_strided_slice")
@pytest.mark.parametrize(("begin", "end", "stride"), SLICES)
def test_a_strided_slice_is_pythons(backend: Backend, platform: Any, begin: tuple, end: tuple, stride: tuple) -> None:
    values = np.arange(20, dtype=np.float32).reshape(5, 4)
    where = tuple(slice(b, e, s) for b, e, s in zip(begin, end, stride, strict=True))
    part = platform.construct_strided_slice(backend.tensor(values), begin, end, stride)
    assert np.array_equal(backend.numbers(part), values[where])
    if values[where].size:
        (grad,) = backend.grad_of(
            lambda x: platform.construct_strided_slice(x, list(begin), list(end), list(stride)) * 2,
            backend.tensor(values),
        )
        expected = np.zeros_like(values)
        expected[where] = 2
        assert np.array_equal(grad, expected)


@covers("construct_strided_slice")
@pytest.mark.parametrize("wrong", [((0,), (1, 2), (1,)), ((0,), (1,), (0,)), ((0,) * 3, (1,) * 3, (1,) * 3)])
def test_a_slice_that_does_not_fit_says_so(backend: Backend, platform: Any, wrong: tuple) -> None:
    with pytest.raises(ValueError, match="(?s)xpected.*got"):
        platform.construct_strided_slice(backend.tensor(np.ones((2, 2))), *wrong)


@covers("arange")
def test_a_range_starts_at_zero_and_is_int64_unless_told(backend: Backend, platform: Any) -> None:
    assert backend.numbers(platform.arange(4)).tolist() == [0, 1, 2, 3]
    assert platform.arange(4).dtype == platform.str_to_dtype("int64")
    assert backend.numbers(platform.arange(1, 8, 3)).tolist() == [1, 4, 7]
    assert backend.numbers(platform.arange(start=3, end=0, step=-1)).tolist() == [3, 2, 1]
    assert platform.arange(2, dtype="float32").dtype == platform.str_to_dtype("float32")
    assert tuple(platform.arange(0).shape) == (0,)


@covers("zeros")
def test_zeros_have_the_size_and_are_float32_unless_told(backend: Backend, platform: Any) -> None:
    assert backend.numbers(platform.zeros((2, 3))).tolist() == [[0.0] * 3] * 2
    assert platform.zeros([2]).dtype == platform.str_to_dtype("float32")
    assert platform.zeros(size=(2,), dtype="int64").dtype == platform.str_to_dtype("int64")
    assert tuple(platform.zeros(()).shape) == ()
    assert tuple(platform.zeros((0, 3), device="cpu").shape) == (0, 3)


@covers("zeros", "list_to_size", "new_tensor")
@pytest.mark.parametrize("wrong", [3, "34", None, (2, -1), (1.5,), ("2",), (True,)])
def test_a_size_that_is_none_is_an_error_that_shows_it(platform: Any, wrong: Any) -> None:
    for call in (platform.zeros, platform.ones, platform.empty, platform.list_to_size):
        with pytest.raises((TypeError, ValueError), match="(?s)xpected.*got"):
            call(wrong)
    with pytest.raises((TypeError, ValueError), match="tensor_shape"):
        platform.new_tensor(wrong, "float32", None)


def test_ones_full_and_empty_have_size_dtype_and_values(backend: Backend, platform: Any) -> None:
    assert backend.numbers(platform.ones((2,))).tolist() == [1.0, 1.0]
    assert backend.numbers(platform.full((2,), 3, dtype="int32")).tolist() == [3, 3]
    assert backend.numbers(platform.full((), 2.5)).tolist() == 2.5
    assert tuple(platform.empty((4, 2), dtype="float16").shape) == (4, 2)
    assert platform.empty((4, 2), dtype="float16").dtype == platform.str_to_dtype("float16")


@covers("full_like")
def test_full_like_keeps_shape_and_dtype(backend: Backend, platform: Any) -> None:
    like = backend.tensor(np.zeros((2, 3)), "float16")
    filled = platform.full_like(tensor=like, fill_value=1.5)
    assert filled.dtype == like.dtype
    assert backend.numbers(filled).tolist() == [[1.5] * 3] * 2
    assert platform.full_like(like, 2, dtype="int32").dtype == platform.str_to_dtype("int32")


@covers("empty_like")
def test_empty_like_keeps_shape_and_dtype_and_pins_only_where_something_can_be_pinned(
    backend: Backend, platform: Any
) -> None:
    like = backend.tensor(np.zeros((2, 3)), "bfloat16")
    made = platform.empty_like(like)
    assert (tuple(made.shape), made.dtype) == ((2, 3), like.dtype)
    host = platform.empty_like(like, dtype="float32", device="cpu", pin_memory=True)
    assert (tuple(host.shape), host.dtype) == ((2, 3), platform.str_to_dtype("float32"))
    assert host.is_pinned() == (backend.name == "torch-cuda")


@covers("new_tensor")
def test_a_new_tensor_has_shape_and_dtype(backend: Backend, platform: Any) -> None:
    made = platform.new_tensor(tensor_shape=(2, 0), tensor_type="int64", device="cpu")
    assert (tuple(made.shape), made.dtype) == ((2, 0), platform.str_to_dtype("int64"))


@covers("new_zero_parameter")
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_zero_parameter_is_a_parameter_of_zeros(backend: Backend, platform: Any, requires_grad: bool) -> None:
    made = platform.new_zero_parameter(
        param_shape=(2, 2), param_type="float32", requires_grad=requires_grad, device="cpu"
    )
    assert isinstance(made, platform.Parameter)
    assert made.requires_grad is requires_grad
    assert backend.numbers(made).tolist() == [[0.0, 0.0]] * 2


@covers("set_tensor_requires_grad")
def test_tracking_is_turned_on_in_place(backend: Backend, platform: Any) -> None:
    tensor = backend.tensor([2.0])
    assert platform.set_tensor_requires_grad(input_tensor=tensor) is tensor
    (grad,) = backend.grad_of(lambda x: x * x, platform.set_tensor_requires_grad(tensor))
    assert grad.tolist() == [4.0]


@covers("set_tensor_requires_grad")
def test_whole_numbers_have_no_gradient(backend: Backend, platform: Any) -> None:
    with pytest.raises(ValueError, match="floating"):
        platform.set_tensor_requires_grad(backend.tensor([1], "int64"))


@covers("tensor_to_numpy")
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"])
def test_numpy_gets_the_same_dtype_and_values(backend: Backend, platform: Any, dtype: str) -> None:
    array = platform.tensor_to_numpy(backend.tensor([[0, 1], [1, 0]], dtype))
    assert array.dtype == np.dtype(dtype)
    assert array.astype(int).tolist() == [[0, 1], [1, 0]]


@covers("tensor_to_numpy")
def test_bfloat16_arrives_as_float32(backend: Backend, platform: Any) -> None:
    array = platform.tensor_to_numpy(backend.tensor([1.5, -2.0], "bfloat16"))
    assert array.dtype == np.float32
    assert array.tolist() == [1.5, -2.0]


@covers("tensor_to_numpy")
def test_numpy_gets_scalars_empty_views_and_tracked_tensors(backend: Backend, platform: Any) -> None:
    assert platform.tensor_to_numpy(backend.tensor(np.float32(3))).shape == ()
    assert platform.tensor_to_numpy(backend.tensor(np.zeros((0, 2)))).shape == (0, 2)
    tracked = platform.set_tensor_requires_grad(backend.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert platform.tensor_to_numpy(tracked * 2).tolist() == [[2.0, 4.0], [6.0, 8.0]]
    assert platform.tensor_to_numpy(backend.tensor([[1.0, 2.0], [3.0, 4.0]]).T).tolist() == [[1.0, 3.0], [2.0, 4.0]]


@covers("list_to_size")
def test_a_list_becomes_the_frameworks_size(backend: Backend, platform: Any) -> None:
    size = platform.list_to_size(size_list=[2, 3])
    assert size == backend.tensor(np.zeros((2, 3))).shape
    assert type(size) is type(backend.tensor(np.zeros((2, 3))).shape)


class NamedCallable:
    name = "ScaleAdd"

    def __call__(self) -> None: ...


@covers("get_op_name")
def test_operators_functions_and_named_callables_have_a_name(backend: Backend, platform: Any) -> None:
    def my_op() -> None: ...

    assert platform.get_op_name(my_op) == "my_op"
    assert platform.get_op_name(functools.partial(my_op)) == "my_op"
    assert platform.get_op_name(NamedCallable()) == "ScaleAdd"
    assert isinstance(platform.get_op_name(backend.tensor([1.0]).sum), str)
    with pytest.raises(TypeError, match="(?s)xpected.*got"):
        platform.get_op_name(3)


@covers("get_op_name")
def test_the_name_of_the_frameworks_own_operators(backend: Backend, platform: Any) -> None:
    if backend.name.startswith("torch"):
        import torch

        for operator in (torch.add, torch.Tensor.add, torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.ones(1).add):
            assert platform.get_op_name(operator) == "add"
        assert platform.get_op_name(torch.nn.functional.linear) == "linear"
    else:
        import mindspore as ms

        assert platform.get_op_name(ms.ops.MatMul()) == "MatMul"
        assert platform.get_op_name(ms.ops.auto_generate.AddExt()) == "AddExt"
        assert platform.get_op_name(ms.ops.gelu) == "gelu"


@covers("get_tensor_transform")
def test_the_redistribution_planner_is_that_of_the_package(platform: Any) -> None:
    from hyper_parallel import init_device_mesh

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    plan = platform.get_tensor_transform().plan_redistribution(mesh.layout("tp", None), mesh.layout(None, "tp"), (8, 8))
    assert [step.kind.value for step in plan.steps] == ["all-to-all"]
