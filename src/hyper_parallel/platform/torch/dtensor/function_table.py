"""The table of PyTorch's functions: which rule each of them follows.

One entry per function: an adaptor that has the function's own parameters and asks the rule. While it is called, a
`Spec` stands for each DTensor. Tensors are given to the rule in the order of the adaptor's parameters.

Example: `@of("mv")` over `def _mv(input, vec): return products.contraction("m k, k -> m", input, vec)` gives `torch.mv`
and `torch.Tensor.mv` a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.rule_answer import RuleAnswer
from hyper_parallel.core.shard.rules import indexing, layers, products, views
from hyper_parallel.core.shard.rules.elementwise import DIVIDE, LINEAR, MULTIPLY, elementwise
from hyper_parallel.core.shard.rules.reductions import reduction, whole_dims
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.table import Entry, entry_of

__all__ = ["TABLE", "names"]


TABLE: dict[Any, Entry] = {}
_OWNERS = (torch, torch.Tensor, F, torch.special, torch.linalg)


def names() -> set[str]:
    return {function.__name__ for function in TABLE}


def functions_named(name: str) -> list[Any]:
    """Find all public functions and methods of a name."""
    found = [getattr(owner, name) for owner in _OWNERS if callable(getattr(owner, name, None))]
    return list({id(function): function for function in found}.values())


def of(*functions: Any, is_sequence: bool = False, is_in_place: bool = False) -> Callable[[Any], Any]:
    """Register an adaptor for functions, or for all that have a name."""

    def register(adaptor: Callable[..., RuleAnswer]) -> Callable[..., RuleAnswer]:
        entry = entry_of(adaptor, is_sequence, is_in_place)
        for function in functions:
            for known in functions_named(function) if isinstance(function, str) else [function]:
                TABLE[known] = entry
        return adaptor

    return register


def as_shape(shape: Sequence[Any]) -> tuple[int, ...]:
    """Return a size that is given as one sequence or as numbers."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = shape[0]
    return tuple(int(length) for length in shape)


# -- elementwise
# --------------------------------------------------------------------------------------------------------

_NONLINEAR = """
abs absolute acos acosh asin asinh atan atan2 arctan2 atanh cos cosh sin sinh sinc tan tanh exp exp2 expm1 log log10
log1p log2 logit sigmoid expit erf erfc erfinv lgamma digamma floor ceil round trunc fix frac sign sgn signbit sqrt
rsqrt square reciprocal pow float_power clamp clamp_min clamp_max clip eq ne lt le gt ge equal_ less less_equal
greater greater_equal not_equal logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_xor
bitwise_not isnan isinf isfinite isposinf isneginf nan_to_num maximum minimum fmax fmin fmod remainder floor_divide
hypot copysign logaddexp logaddexp2 xlogy xlog1py nextafter heaviside where masked_fill addcmul addcdiv rsub gelu
softplus logsigmoid softsign tanhshrink hardshrink softshrink deg2rad rad2deg gcd lcm ldexp isclose bool byte char
short int long
"""
_ACTIVATIONS = (
    "relu relu6 silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid threshold"  # those with an `inplace`
)
_LINEAR = "neg negative positive clone contiguous real conj float double half bfloat16 cpu cuda detach alias lift_fresh"
_DUNDER_NONLINEAR = "pow rpow eq ne lt le gt ge and or xor invert floordiv rfloordiv mod rmod rsub rtruediv rdiv abs"


def _specs(values: Sequence[Any]) -> list[Spec]:
    return [value for value in values if isinstance(value, Spec)]


def _nonlinear(*args: Any, **kwargs: Any) -> RuleAnswer:
    return elementwise(*_specs([*args, *kwargs.values()]))


def _nonlinear_in_place(*args: Any, **kwargs: Any) -> RuleAnswer:
    return elementwise(*_specs([*args, *kwargs.values()]), in_place=True)


def _activation(*args: Any, **kwargs: Any) -> RuleAnswer:
    # `inplace` is the one bool that these functions take, named or as the last of their arguments.
    in_place = any(value is True for value in (*args, *kwargs.values()))
    answer = elementwise(*_specs([*args, *kwargs.values()]), in_place=in_place)
    return answer._replace(facts={"in_place": in_place})


def _linear_unary(x: Any, *args: Any, **kwargs: Any) -> RuleAnswer:
    return elementwise(x, kind=LINEAR)


for _name in _NONLINEAR.split():
    of(_name)(_nonlinear)
    of(_name + "_", is_in_place=True)(_nonlinear_in_place)
for _name in _ACTIVATIONS.split():
    of(_name)(_activation)
    of(_name + "_", is_in_place=True)(_nonlinear_in_place)
for _name in _DUNDER_NONLINEAR.split():
    of(f"__{_name}__")(_nonlinear)
for _name in _LINEAR.split():
    of(_name)(_linear_unary)


@of("to", "type")
def _to(x: Spec, *args: Any, **kwargs: Any) -> RuleAnswer:
    given = [*args, *kwargs.values()]
    like = _specs(given)
    if like:
        return _cast_like(x, like[0])
    # Cutting off the fraction of every part is not cutting off that of their sum.
    kinds = [value for value in given if isinstance(value, (torch.dtype, str))]
    is_linear = all(not isinstance(kind, torch.dtype) or kind.is_floating_point or kind.is_complex for kind in kinds)
    is_named = any(isinstance(kind, str) and kind.endswith("Tensor") for kind in kinds)
    return elementwise(x, kind=LINEAR if is_linear and not is_named else "")


@of("type_as")
def _cast_like(x: Spec, other: Spec) -> RuleAnswer:
    answer = elementwise(x)  # not linear: the dtype, which no rule knows, may be one of integers
    return answer._replace(inputs=(*answer.inputs, other.layout))


def _sum_kind(*values: Any) -> str:
    # A number would be added on every rank of a partial sum.
    return LINEAR if all(isinstance(value, Spec) for value in values) else ""


@of("add", "sub", "subtract", "__add__", "__radd__", "__sub__")
def _add(input: object, other: object, *, alpha: object = 1) -> RuleAnswer:
    return elementwise(*_specs([input, other]), kind=_sum_kind(input, other))


@of("add_", "sub_", "__iadd__", "__isub__", is_in_place=True)
def _add_in_place(input: object, other: object, *, alpha: object = 1) -> RuleAnswer:
    return elementwise(*_specs([input, other]), kind=_sum_kind(input, other), in_place=True)


@of("mul", "multiply", "__mul__", "__rmul__")
def _mul(input: object, other: object) -> RuleAnswer:
    specs = _specs([input, other])
    return elementwise(*specs, kind=MULTIPLY if len(specs) > 1 else LINEAR)


@of("div", "divide", "true_divide", "__truediv__", "__div__")
def _div(input: object, other: object, *, rounding_mode: object = None) -> RuleAnswer:
    specs = _specs([input, other])
    kind = DIVIDE if len(specs) > 1 else LINEAR
    is_linear = rounding_mode is None and isinstance(input, Spec)
    return elementwise(*specs, kind=kind if is_linear else "")


@of("mul_", "multiply_", "__imul__", is_in_place=True)
def _mul_in_place(input: object, other: object) -> RuleAnswer:
    specs = _specs([input, other])
    return elementwise(*specs, kind=MULTIPLY if len(specs) > 1 else LINEAR, in_place=True)


@of("div_", "divide_", "true_divide_", "__itruediv__", is_in_place=True)
def _div_in_place(input: object, other: object, *, rounding_mode: object = None) -> RuleAnswer:
    specs = _specs([input, other])
    kind = "" if rounding_mode is not None else DIVIDE if len(specs) > 1 else LINEAR
    return elementwise(*specs, kind=kind, in_place=True)


@of("zero_", "neg_", "negative_", is_in_place=True)
def _linear_in_place(x: Spec) -> RuleAnswer:
    return elementwise(x, kind=LINEAR, in_place=True)


@of("fill_", is_in_place=True)
def _fill_in_place(x: Spec, value: object) -> RuleAnswer:
    return elementwise(x, in_place=True)


@of("copy_", is_in_place=True)
def _copy_in_place(x: Spec, src: object, non_blocking: bool = False) -> RuleAnswer:
    return elementwise(*_specs([x, src]), kind=_sum_kind(x, src), in_place=True)


@of("lerp")
def _lerp(input: object, end: object, weight: object) -> RuleAnswer:
    return elementwise(*_specs([input, end, weight]))


@of("lerp_", is_in_place=True)
def _lerp_in_place(input: object, end: object, weight: object) -> RuleAnswer:
    return elementwise(*_specs([input, end, weight]), in_place=True)


@of("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like")
def _like(x: Spec, *args: Any, **kwargs: Any) -> RuleAnswer:
    # The value filled in is the value itself, not a summand: the result is whole where the original is partial.
    whole = Spec(x.layout.without_partial(), x.shape)
    return RuleAnswer((x.layout,), (whole,), "like")


@of("dropout", "feature_dropout", "alpha_dropout")
def _dropout(input: Spec, p: float = 0.5, training: bool = True, inplace: bool = False) -> RuleAnswer:
    if inplace:
        raise ArgumentError("`dropout` in place is not there for distributed tensors.", do="Leave `inplace` out.")
    return elementwise(input, kind="" if training else LINEAR, how="random" if training else None)


@of("bernoulli")
def _bernoulli(input: Spec) -> RuleAnswer:
    return elementwise(input, how="random")


@of(
    *["bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"],
    is_in_place=True,
)
def _drawn_in_place(x: Spec, *args: Any, **kwargs: Any) -> RuleAnswer:
    if _specs([*args, *kwargs.values()]):
        raise ArgumentError(
            "Numbers are drawn into a distributed tensor with parameters that are numbers.", do="Pass numbers."
        )
    return elementwise(x, in_place=True, how="random")


# -- products
# -----------------------------------------------------------------------------------------------------------


@of("matmul", "__matmul__")
def _matmul(input: Spec, other: Spec) -> RuleAnswer:
    return products.matmul(input, other)


@of("mm")
def _mm(input: Spec, mat2: Spec) -> RuleAnswer:
    return products.contraction("m k, k n -> m n", input, mat2)


@of("bmm")
def _bmm(input: Spec, mat2: Spec) -> RuleAnswer:
    return products.contraction("b m k, b k n -> b m n", input, mat2)


@of("mv")
def _mv(input: Spec, vec: Spec) -> RuleAnswer:
    return products.contraction("m k, k -> m", input, vec)


@of("dot", "vdot")
def _dot(input: Spec, other: Spec) -> RuleAnswer:
    return products.contraction("k, k ->", input, other)


@of("outer", "ger")
def _outer(input: Spec, vec2: Spec) -> RuleAnswer:
    return products.contraction("m, n -> m n", input, vec2)


@of("addmm")
def _addmm(input: Spec, mat1: Spec, mat2: Spec, *, beta: object = 1, alpha: object = 1) -> RuleAnswer:
    return products.summand_and_product("m k, k n -> m n", input, mat1, mat2)


@of("baddbmm")
def _baddbmm(input: Spec, batch1: Spec, batch2: Spec, *, beta: object = 1, alpha: object = 1) -> RuleAnswer:
    return products.summand_and_product("b m k, b k n -> b m n", input, batch1, batch2)


@of(F.linear)
def _linear(input: Spec, weight: Spec, bias: Spec | None = None) -> RuleAnswer:
    return products.linear(input, weight, bias)


@of(torch.einsum)
def _einsum(equation: str, *operands: Any) -> RuleAnswer:
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    return products.einsum(equation, *tensors)


# -- reductions
# ---------------------------------------------------------------------------------------------------------


@of("nansum")
def _nansum(input: Spec, dim: object = None, keepdim: bool = False, *, dtype: object = None) -> RuleAnswer:
    return reduction(input, dim, keepdim, "nansum")


@of("sum")
def _sum(input: Spec, dim: object = None, keepdim: bool = False, *, dtype: object = None) -> RuleAnswer:
    return reduction(input, dim, keepdim, "sum")


@of("mean")
def _mean(input: Spec, dim: object = None, keepdim: bool = False, *, dtype: object = None) -> RuleAnswer:
    return reduction(input, dim, keepdim, "mean")


@of("prod")
def _prod(input: Spec, dim: object = None, keepdim: bool = False, *, dtype: object = None) -> RuleAnswer:
    return reduction(input, dim, keepdim, "prod")


@of("amax")
def _amax(input: Spec, dim: object = (), keepdim: bool = False) -> RuleAnswer:
    return reduction(input, dim, keepdim, "max")


@of("amin")
def _amin(input: Spec, dim: object = (), keepdim: bool = False) -> RuleAnswer:
    return reduction(input, dim, keepdim, "min")


def _extreme(op: str) -> Callable[..., RuleAnswer]:
    def decide(input: Spec, dim: object = None, keepdim: bool = False) -> RuleAnswer:
        if isinstance(dim, Spec):
            return elementwise(input, dim)
        if dim is None:
            return reduction(input, None, False, op)
        values = reduction(input, dim, keepdim, None)  # with positions: the dim must be whole
        return values._replace(outputs=values.outputs * 2)

    return decide


of("max")(_extreme("max"))
of("min")(_extreme("min"))


@of("mode")
def _mode(input: Spec, dim: int = -1, keepdim: bool = False) -> RuleAnswer:
    values = reduction(input, dim, keepdim, None)
    return values._replace(outputs=values.outputs * 2)


@of("median")
def _median(input: Spec, dim: object = None, keepdim: bool = False) -> RuleAnswer:
    values = reduction(input, dim, keepdim, None)
    return values if dim is None else values._replace(outputs=values.outputs * 2)


@of("argmax", "argmin", "any", "all", "logsumexp", "count_nonzero")
def _whole_reduction(input: Spec, dim: object = None, keepdim: bool = False, **options: Any) -> RuleAnswer:
    return reduction(input, dim, keepdim, None)


@of("std", "var")
def _spread(
    input: Spec, dim: object = None, unbiased: object = True, keepdim: bool = False, **options: Any
) -> RuleAnswer:
    # `x.var(False)` is about the correction, not about a dim.
    return reduction(input, None if isinstance(dim, bool) else dim, keepdim, None)


@of("norm")
def _norm(
    input: Spec, p: object = "fro", dim: object = None, keepdim: bool = False, out: None = None, dtype: object = None
) -> RuleAnswer:
    return reduction(input, dim, keepdim, None)


@of(torch.linalg.vector_norm)
def _vector_norm(
    x: Spec, ord: object = 2, dim: object = None, keepdim: bool = False, *, dtype: object = None
) -> RuleAnswer:
    return reduction(x, dim, keepdim, None)


@of("softmax", "log_softmax", "softmin")
def _softmax(input: Spec, dim: object = None, _stacklevel: int = 3, dtype: object = None) -> RuleAnswer:
    if dim is None:
        raise ArgumentError("`softmax` of distributed tensors needs its dim.", expected="dim=...", got="None")
    return whole_dims(input, dim)


@of("cumsum")
def _cumsum(input: Spec, dim: int, *, dtype: object = None) -> RuleAnswer:
    return whole_dims(input, dim, is_linear=True)


@of("cumprod", "logcumsumexp")
def _cumprod(input: Spec, dim: int, *, dtype: object = None) -> RuleAnswer:
    return whole_dims(input, dim)


@of("sort")
def _sort(input: Spec, dim: int = -1, descending: bool = False, stable: object = None) -> RuleAnswer:
    return whole_dims(input, dim, input.shape, input.shape)


@of("argsort")
def _argsort(input: Spec, dim: int = -1, descending: bool = False, stable: object = None) -> RuleAnswer:
    return whole_dims(input, dim)


@of("topk")
def _topk(input: Spec, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> RuleAnswer:
    shape = list(input.shape)
    if shape:
        shape[dim] = k
    return whole_dims(input, dim, shape, shape)


@of("flip")
def _flip(input: Spec, *dims: Any, **named: Any) -> RuleAnswer:
    return whole_dims(input, as_shape(named.get("dims", dims)), is_linear=True)


@of("roll")
def _roll(input: Spec, shifts: object, dims: object = None) -> RuleAnswer:
    return whole_dims(input, dims, is_linear=True)


@of("tril", "triu")
def _triangle(input: Spec, diagonal: int = 0) -> RuleAnswer:
    return whole_dims(input, (-2, -1), is_linear=True)


@of("normalize")
def _normalize(input: Spec, p: float = 2.0, dim: object = 1, eps: float = 1e-12, out: None = None) -> RuleAnswer:
    return whole_dims(input, dim)


# -- views
# --------------------------------------------------------------------------------------------------------------


@of("view", "reshape")
def _view(input: Spec, *shape: Any, **named: Any) -> RuleAnswer:
    shape = tuple(named.values()) or shape
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise ArgumentError("A distributed tensor cannot be viewed as another dtype.", do="Use `x.to(dtype)`.")
    return views.reshape(input, as_shape(shape))


@of("view_as", "reshape_as")
def _view_as(x: Spec, other: Spec) -> RuleAnswer:
    answer = views.reshape(x, other.shape)
    return answer._replace(inputs=(*answer.inputs, other.layout))


@of("flatten")
def _flatten(input: Spec, start_dim: int = 0, end_dim: int = -1) -> RuleAnswer:
    begin, end = start_dim % max(input.ndim, 1), end_dim % max(input.ndim, 1)
    return views.reshape(input, (*input.shape[:begin], -1, *input.shape[end + 1 :]))


@of("unflatten")
def _unflatten(input: Spec, dim: int, sizes: Sequence[int]) -> RuleAnswer:
    at = dim % input.ndim
    rest = 1
    for length in sizes:
        rest *= length if length != -1 else 1
    spelt = [length if length != -1 else input.shape[at] // rest for length in sizes]
    return views.reshape(input, (*input.shape[:at], *spelt, *input.shape[at + 1 :]))


@of("permute")
def _permute(input: Spec, *dims: Any, **named: Any) -> RuleAnswer:
    return views.permute(input, as_shape(named.get("dims", dims)))


@of("transpose", "swapaxes", "swapdims")
def _transpose(input: Spec, dim0: int, dim1: int) -> RuleAnswer:
    order = list(range(input.ndim))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return views.permute(input, order)


@of("movedim", "moveaxis")
def _movedim(input: Spec, source: Any, destination: Any) -> RuleAnswer:
    if not input.ndim:
        return views.permute(input, ())
    sources = [dim % input.ndim for dim in ((source,) if isinstance(source, int) else source)]
    targets = [dim % input.ndim for dim in ((destination,) if isinstance(destination, int) else destination)]
    order = [dim for dim in range(input.ndim) if dim not in sources]
    for target, dim in sorted(zip(targets, sources, strict=True)):
        order.insert(target, dim)
    return views.permute(input, order)


@of("t", torch.Tensor.T.__get__, torch.Tensor.mT.__get__, torch.Tensor.H.__get__, torch.Tensor.mH.__get__, "adjoint")
def _t(input: Spec) -> RuleAnswer:
    return views.permute(input, [*range(input.ndim - 2), *reversed(range(input.ndim)[-2:])])


@of("unsqueeze")
def _unsqueeze(input: Spec, dim: int) -> RuleAnswer:
    return views.unsqueeze(input, dim)


@of("squeeze")
def _squeeze(input: Spec, dim: object = None) -> RuleAnswer:
    return views.squeeze(input, dim)


@of("expand", "broadcast_to")
def _expand(input: Spec, *size: Any, **named: Any) -> RuleAnswer:
    return views.expand(input, as_shape(named.get("size", size)))


@of("expand_as")
def _expand_as(input: Spec, other: Spec) -> RuleAnswer:
    answer = views.expand(input, other.shape)
    return answer._replace(inputs=(*answer.inputs, other.layout))


@of("repeat", "tile")
def _repeat(input: Spec, *sizes: Any, **named: Any) -> RuleAnswer:
    counts = as_shape(tuple(named.values()) or sizes)
    return views.repeat(input, (*(1,) * (input.ndim - len(counts)), *counts))


@of("repeat_interleave")
def _repeat_interleave(input: Spec, repeats: int, dim: int | None = None, *, output_size: object = None) -> RuleAnswer:
    if not isinstance(repeats, int):
        raise ArgumentError(
            "`repeat_interleave` of distributed tensors takes one number of repetitions.", got=repr(repeats)
        )
    if dim is None or not input.ndim:
        return views.remap(input, {}, [input.num_elements * repeats])
    shape = list(input.shape)
    shape[dim] *= repeats
    return whole_dims(input, dim, shape, is_linear=True)


@of("cat", "concat", "concatenate")
def _cat(tensors: Sequence[Spec], dim: int = 0) -> RuleAnswer:
    return views.join(tensors, dim)


@of("stack")
def _stack(tensors: Sequence[Spec], dim: int = 0) -> RuleAnswer:
    return views.stack(tensors, dim)


# -- parts
# --------------------------------------------------------------------------------------------------------------


@of("split", is_sequence=True)
def _split(tensor: Spec, split_size_or_sections: Any, dim: int = 0) -> RuleAnswer:
    return indexing.split(tensor, split_size_or_sections, dim)


@of(torch.Tensor.split, "split_with_sizes", is_sequence=True)
def _split_method(x: Spec, split_size: Any, dim: int = 0) -> RuleAnswer:
    return indexing.split(x, split_size, dim)


@of("chunk", is_sequence=True)
def _chunk(input: Spec, chunks: int, dim: int = 0) -> RuleAnswer:
    return indexing.chunk(input, chunks, dim)


@of("unbind", is_sequence=True)
def _unbind(input: Spec, dim: int = 0) -> RuleAnswer:
    return indexing.unbind(input, dim)


@of("narrow")
def _narrow(input: Spec, dim: int, start: object, length: int) -> RuleAnswer:
    answer = indexing.narrow(input, dim, length)
    if not isinstance(start, Spec):
        return answer
    return answer._replace(inputs=(*answer.inputs, Layout(start.layout.mesh, ((),) * start.ndim)))


@of("select")
def _select(input: Spec, dim: int, index: int) -> RuleAnswer:
    return indexing.select(input, dim)


@of("__getitem__")
def _getitem(x: Spec, index: object) -> RuleAnswer:
    items = index if isinstance(index, tuple) else (index,)
    positions = [item for item in items if isinstance(item, Spec)]
    if any(isinstance(item, (list, range)) for item in items):
        return indexing.index_whole(x, positions, _indexed_shape(x, items))
    if not positions:
        return indexing.getitem(x, index)
    if len(positions) == len(items):
        return indexing.index_rows(x, positions) if len(positions) > 1 else indexing.index_by_tensor(x, positions[0])
    before = [item for item in items if not isinstance(item, Spec)]
    if len(positions) == 1 and all(isinstance(item, slice) and item == slice(None) for item in before):
        return indexing.index_by_tensor(x, positions[0], items.index(positions[0]))
    return indexing.index_whole(x, positions, _indexed_shape(x, items))


def _indexed_shape(x: Spec, items: Sequence[Any]) -> tuple[int, ...]:
    """Ask the framework itself for the shape of a part, with tensors without values."""

    def bare(item: object) -> Any:
        return torch.empty(item.shape, dtype=torch.int64, device="meta") if isinstance(item, Spec) else item

    try:
        return tuple(torch.empty(x.shape, device="meta")[tuple(map(bare, items))].shape)
    except (IndexError, NotImplementedError, RuntimeError, TypeError) as error:
        raise ArgumentError(
            "A distributed tensor cannot be indexed so.", expected="numbers, slices, and positions", got=str(error)
        ) from None


@of("index_select")
def _index_select(input: Spec, dim: int, index: Spec) -> RuleAnswer:
    return indexing.index_by_tensor(input, index, dim)


@of("gather")
def _gather(input: Spec, dim: int, index: Spec, *, sparse_grad: bool = False) -> RuleAnswer:
    return indexing.lines_by_index(input, dim, index)


@of("scatter", "scatter_add", "scatter_reduce")
def _scatter(input: Spec, dim: int, index: Spec, src: object, *args: Any, **options: Any) -> RuleAnswer:
    return indexing.scatter_lines(input, dim, index, src if isinstance(src, Spec) else None)


@of("pad")
def _pad(input: Spec, pad: Sequence[int], mode: str = "constant", value: object = None) -> RuleAnswer:
    return indexing.pad(input, pad, can_be_empty=mode == "constant")


# -- layers
# -------------------------------------------------------------------------------------------------------------


@of(F.one_hot)
def _one_hot(tensor: Spec, num_classes: int = -1) -> RuleAnswer:
    if num_classes < 0:
        raise ArgumentError(
            "`one_hot` of distributed tensors needs the number of classes.", expected="num_classes=...", got="none"
        )
    return whole_dims(tensor, (), [*tensor.shape, num_classes])


@of(F.embedding)
def _embedding(
    input: Spec,
    weight: Spec,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> RuleAnswer:
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise ArgumentError(
            "An embedding of distributed tensors has no `max_norm`, `scale_grad_by_freq` or `sparse`.",
            do="Leave them out.",
        )
    return layers.embedding(input, weight)


@of(F.layer_norm)
def _layer_norm(
    input: Spec,
    normalized_shape: Sequence[int],
    weight: Spec | None = None,
    bias: Spec | None = None,
    eps: float = 1e-5,
) -> RuleAnswer:
    return layers.norm_over_last(input, len(tuple(normalized_shape)), *_specs([weight, bias]))


@of("rms_norm")
def _rms_norm(
    input: Spec,
    normalized_shape: Sequence[int],
    weight: Spec | None = None,
    eps: float | None = None,
) -> RuleAnswer:
    return layers.norm_over_last(input, len(tuple(normalized_shape)), *_specs([weight]))


@of(F.scaled_dot_product_attention)
def _attention(
    query: Spec,
    key: Spec,
    value: Spec,
    attn_mask: Spec | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> RuleAnswer:
    # Whether it is given counts, not its value: ops are kept without numbers that have a fraction (rule D1).
    return layers.attention(query, key, value, attn_mask, is_causal, is_random=isinstance(dropout_p, float))


@of(F.cross_entropy)
def _cross_entropy(
    input: Spec,
    target: Spec,
    weight: Spec | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> RuleAnswer:
    if weight is not None:
        raise ArgumentError("`cross_entropy` of distributed tensors has no weights of classes.", do="Leave them out.")
    is_by_index = target.ndim == input.ndim - 1
    return layers.cross_entropy(
        input, target, reduction=reduction, is_by_index=is_by_index, can_split_classes=input.ndim <= 2
    )
