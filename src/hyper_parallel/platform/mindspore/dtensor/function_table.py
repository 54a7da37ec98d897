"""The table of MindSpore's primitives: which rule each of them follows, by name.

One function has several primitives (`x + y` is AddExt, `x + 1` AddScalar, `ops.add` Add), and a method comes with the
arguments it was called with, a function of `ops` with all of them. An adaptor takes both. While it is called, a `Spec`
stands for each DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore._c_expression.typing import type_to_type_id
from mindspore.common import dtype as mstype

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.shard.dims import dim_in, dims_in
from hyper_parallel.core.shard.rule_answer import RuleAnswer, answered
from hyper_parallel.core.shard.rules import indexing, layers, products, views
from hyper_parallel.core.shard.rules.elementwise import DIVIDE, LINEAR, MULTIPLY, elementwise
from hyper_parallel.core.shard.rules.reductions import reduction, whole_dims
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.strategies import P, R, S, Strategy
from hyper_parallel.core.shard.table import Entry, entry_of

__all__ = ["TABLE"]

TABLE: dict[str, Entry] = {}


def of(names: str, is_sequence: bool = False, is_in_place: bool = False) -> Callable[[Any], Any]:
    """Register an adaptor for primitives."""

    def register(adaptor: Callable[..., RuleAnswer]) -> Callable[..., RuleAnswer]:
        for name in names.split():
            TABLE[name] = entry_of(adaptor, is_sequence, is_in_place)
        return adaptor

    return register


def as_shape(shape: Sequence[Any]) -> tuple[int, ...]:
    """Return a size that is given as one sequence or as numbers."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = shape[0]
    return tuple(int(length) for length in shape)


def _specs(values: Sequence[Any]) -> list[Spec]:
    return [value for value in values if isinstance(value, Spec)]


# -- elementwise
# --------------------------------------------------------------------------------------------------------

_NONLINEAR = """
Abs Acos AcosExt Acosh AcoshExt Asin AsinExt Asinh AsinhExt Atan AtanExt Atan2 Atan2Ext Atanh Cos Cosh Sin Sinh Tan
Tanh Exp Exp2 Expm1 Log Log1p Log2 Log10 Sigmoid Erf Erfc Erfinv Floor Ceil Round Trunc Frac Sign Sqrt Rsqrt Square
Reciprocal Pow PowTensorScalar PowScalarTensor ClampScalar ClampTensor Equal EqualExt NotEqual NeScalar EqScalar Less
LessEqual Greater GreaterEqual GreaterEqualScalar LessEqualScalar GreaterScalar LessScalar LogicalAnd LogicalOr
LogicalNot LogicalXor BitwiseAnd BitwiseOr BitwiseXor BitwiseNot BitwiseAndTensor BitwiseOrTensor BitwiseXorTensor
BitwiseAndScalar BitwiseOrScalar BitwiseXorScalar Invert IsNan IsInf IsFinite IsClose NanToNum Maximum Minimum
FloorDiv FloorDivScalar FloorMod Mod FmodTensor FmodScalar RemainderTensorTensor RemainderTensorScalar
RemainderScalarTensor DivMod DivMods Xlogy Xdivy Select Where MaskedFill MaskedFillScalar Addcmul AddcmulExt Addcdiv
AddcdivExt Lerp LerpScalar LogAddExp ReLU ReLU6 GeLU GeluExt FastGeLU SiLU Mish Elu EluExt SeLU SeLUExt CeLU LeakyReLU
LeakyReLUExt HSwish HSigmoid HShrink SoftShrink Softplus SoftplusExt Softsign LogSigmoid Threshold Hardtanh Tanhshrink
"""


def _nonlinear(*args: Any, **kwargs: Any) -> RuleAnswer:
    return elementwise(*_specs([*args, *kwargs.values()]))


of(_NONLINEAR)(_nonlinear)


@of("Neg Identity StopGradient Contiguous Load")
def _linear_unary(x: Spec, *args: Any, **kwargs: Any) -> RuleAnswer:
    return elementwise(x, kind=LINEAR)


@of("Clone")
def _clone(x: Spec) -> RuleAnswer:
    return elementwise(x, kind=LINEAR, how="copy")


_FLOAT_IDS = {type_to_type_id(dtype) for dtype in mstype.float_type}


def _is_float(dtype: object) -> bool:
    return dtype in _FLOAT_IDS if isinstance(dtype, int) else dtype in mstype.float_type


@of("Cast ToDtype CastExt")
def _cast(x: Spec, dtype: object = None, *args: Any, **kwargs: Any) -> RuleAnswer:
    # A cast to integers would round each summand: only one to floating point goes through a sum.
    return elementwise(x, kind=LINEAR if _is_float(dtype) else "")


def _sum_kind(*values: Any) -> str:
    # A number would be added on every rank of a partial sum.
    return LINEAR if all(isinstance(value, Spec) for value in values) else ""


@of("Add AddExt AddScalar Sub SubExt SubScalar")
def _add(input: object, other: object, alpha: object = 1) -> RuleAnswer:
    return elementwise(*_specs([input, other]), kind=_sum_kind(input, other))


@of("Mul Muls")
def _mul(input: object, other: object) -> RuleAnswer:
    specs = _specs([input, other])
    return elementwise(*specs, kind=MULTIPLY if len(specs) > 1 else LINEAR)


@of("Div Divs RealDiv")
def _div(input: object, other: object) -> RuleAnswer:
    specs = _specs([input, other])
    kind = DIVIDE if len(specs) > 1 else LINEAR
    return elementwise(*specs, kind=kind if isinstance(input, Spec) else "")


@of("BiasAdd")
def _bias_add(x: Spec, bias: Spec, data_format: object = 0) -> RuleAnswer:
    """Add a bias that lies along dim 1."""
    if bias.shape != x.shape[1:2]:
        raise ArgumentError("The bias does not fit.", expected=str(x.shape[1:2]), got=str(bias.shape))
    strategies = [Strategy((R, R), (R,))]
    strategies += [Strategy((S(dim), S(0) if dim == 1 else R), (S(dim),)) for dim in range(x.ndim)]
    strategies.append(Strategy((P("sum"), P("sum")), (P("sum"),)))
    return answered([x, bias], strategies, x.shape)


@of("ZerosLike OnesLike ZerosLikeExt OnesLikeExt FullLike EmptyLike")
def _like(x: Spec, *args: Any, **kwargs: Any) -> RuleAnswer:
    # The value filled in is the value itself, not a summand: the result is whole where the original is partial.
    return RuleAnswer((x.layout,), (Spec(x.layout.without_partial(), x.shape),))


@of("Dropout", is_sequence=True)
def _dropout(x: Spec, keep_prob: float = 0.5, *seeds: Any) -> RuleAnswer:
    answer = elementwise(x, how="dropout")
    return answer._replace(outputs=answer.outputs * 2)


@of("Assign InplaceCopy", is_in_place=True)
def _assign(x: Spec, value: object, *args: Any) -> RuleAnswer:
    return elementwise(*_specs([x, value]), kind=_sum_kind(x, value), in_place=True)


@of("AssignAdd AssignSub", is_in_place=True)
def _assign_add(x: Spec, value: object) -> RuleAnswer:
    return elementwise(*_specs([x, value]), kind=_sum_kind(x, value), in_place=True)


# -- products
# -----------------------------------------------------------------------------------------------------------


@of("MatMulExt")
def _matmul(input: Spec, other: Spec) -> RuleAnswer:
    return products.matmul(input, other)


@of("Mm MmExt")
def _mm(input: Spec, mat2: Spec) -> RuleAnswer:
    return products.contraction("m k, k n -> m n", input, mat2)


@of("BatchMatMulExt BmmExt")
def _bmm(input: Spec, mat2: Spec) -> RuleAnswer:
    return products.contraction("b m k, b k n -> b m n", input, mat2)


@of("MatMul BatchMatMul")
def _transposed_matmul(x: Spec, y: Spec, transpose_a: bool = False, transpose_b: bool = False) -> RuleAnswer:
    left = "... k m" if transpose_a else "... m k"
    right = "... n k" if transpose_b else "... k n"
    return products.contraction(f"{left}, {right} -> ... m n", x, y)


@of("Mv")
def _mv(input: Spec, vec: Spec) -> RuleAnswer:
    return products.contraction("m k, k -> m", input, vec)


@of("Dot")
def _dot(input: Spec, other: Spec) -> RuleAnswer:
    return products.contraction("k, k ->", input, other)


@of("Ger Outer")
def _outer(input: Spec, vec2: Spec) -> RuleAnswer:
    return products.contraction("m, n -> m n", input, vec2)


@of("Addmm")
def _addmm(input: Spec, mat1: Spec, mat2: Spec, beta: object = 1, alpha: object = 1) -> RuleAnswer:
    return products.summand_and_product("m k, k n -> m n", input, mat1, mat2)


@of("Baddbmm")
def _baddbmm(input: Spec, batch1: Spec, batch2: Spec, beta: object = 1, alpha: object = 1) -> RuleAnswer:
    return products.summand_and_product("b m k, b k n -> b m n", input, batch1, batch2)


@of("Dense")
def _dense(input: Spec, weight: Spec, bias: Spec | None = None) -> RuleAnswer:
    return products.linear(input, weight, bias)


# -- reductions
# ---------------------------------------------------------------------------------------------------------


@of("SumExt")
def _sum(input: Spec, dim: object = None, keepdim: bool = False, dtype: object = None) -> RuleAnswer:
    return reduction(input, dim, keepdim, "sum")


@of("DeprecatedSum")
def _old_sum(
    input: Spec, axis: object = None, dtype: object = None, keepdims: bool = False, initial: object = None
) -> RuleAnswer:
    if initial is not None:
        raise ArgumentError(
            "`sum` of distributed tensors has no `initial`.", got=repr(initial), do="Add it afterwards."
        )
    return _sum(input, axis, keepdims)


@of("ReduceSum")
def _reduce_sum(input: Spec, axis: object = (), keep_dims: bool = False, skip_mode: bool = False) -> RuleAnswer:
    return _sum(input, axis, keep_dims)


@of("MeanExt")
def _mean(input: Spec, dim: object = None, keepdim: bool = False, dtype: object = None) -> RuleAnswer:
    answer = reduction(input, dim, keepdim, "mean")
    return answer._replace(facts={**answer.facts, "dims": dims_in(dim, input.ndim), "keepdim": keepdim, "dtype": dtype})


@of("ReduceMean")
def _reduce_mean(input: Spec, axis: object = (), keep_dims: bool = False) -> RuleAnswer:
    return _mean(input, axis, keep_dims)


@of("ProdExt")
def _prod(input: Spec, dim: object = None, keepdim: bool = False, dtype: object = None) -> RuleAnswer:
    return reduction(input, dim, keepdim, "prod")


@of("DeprecatedProd")
def _old_prod(input: Spec, axis: object = None, keep_dims: bool = False, dtype: object = None) -> RuleAnswer:
    return reduction(input, axis, keep_dims, "prod")


@of("ReduceProd")
def _reduce_prod(input: Spec, axis: object = (), keep_dims: bool = False) -> RuleAnswer:
    return reduction(input, axis, keep_dims, "prod")


@of("Max")
def _max(input: Spec) -> RuleAnswer:
    return reduction(input, None, False, "max")


@of("Min")
def _min(input: Spec) -> RuleAnswer:
    return reduction(input, None, False, "min")


@of("ReduceMax AMax")
def _reduce_max(input: Spec, axis: object = (), keep_dims: bool = False) -> RuleAnswer:
    return reduction(input, axis, keep_dims, "max")


@of("ReduceMin AMin")
def _reduce_min(input: Spec, axis: object = (), keep_dims: bool = False) -> RuleAnswer:
    return reduction(input, axis, keep_dims, "min")


@of("MaxDim MinDim ArgMaxWithValue ArgMinWithValue MedianDim")
def _extreme_of_dim(input: Spec, dim: object, keepdim: bool = False) -> RuleAnswer:
    values = reduction(input, dim, keepdim, None)  # with positions: the dim must be whole
    return values._replace(outputs=values.outputs * 2)


@of("DeprecatedMax DeprecatedMin")
def _old_extreme(input: Spec, axis: object = None, keepdims: bool = False, **options: Any) -> RuleAnswer:
    return reduction(input, axis, keepdims, None)


@of("Argmax Argmin")
def _arg(input: Spec, axis: object = -1, output_type: object = None) -> RuleAnswer:
    return reduction(input, axis, False, None)


@of("DeprecatedArgmax DeprecatedArgmin")
def _old_arg(input: Spec, axis: object = None, keepdims: bool = False) -> RuleAnswer:
    return reduction(input, axis, keepdims, None)


@of("ArgMaxExt ArgMinExt ReduceAll ReduceAny Any All AnyExt AllExt LogSumExp")
def _whole_reduction(input: Spec, dim: object = None, keepdim: bool = False) -> RuleAnswer:
    return reduction(input, dim, keepdim, None)


@of("Std Var")
def _std(input: Spec, dim: object = None, correction: object = 1, keepdim: bool = False, **options: Any) -> RuleAnswer:
    return reduction(input, dim, options.get("keepdims", keepdim), None)


@of("DeprecatedVar DeprecatedStd")
def _old_var(input: Spec, axis: object = None, ddof: object = 0, keepdims: bool = False) -> RuleAnswer:
    return reduction(input, axis, keepdims, None)


@of("ReduceStd")
def _reduce_std(input: Spec, axis: object = (), unbiased: bool = True, keep_dims: bool = False) -> RuleAnswer:
    values = reduction(input, axis, keep_dims, None)
    return values._replace(outputs=values.outputs * 2)


@of("Softmax LogSoftmax LogSoftmaxExt")
def _softmax(input: Spec, axis: object = -1, dtype: object = None) -> RuleAnswer:
    return whole_dims(input, axis)


@of("CumSum CumsumExt")
def _cumsum(input: Spec, axis: int, *options: Any, **named: Any) -> RuleAnswer:
    return whole_dims(input, axis, is_linear=True)


@of("CumProd CumprodExt")
def _cumprod(input: Spec, axis: int, *options: Any, **named: Any) -> RuleAnswer:
    return whole_dims(input, axis)


@of("Sort")
def _sort(input: Spec, attributes: Any = None) -> RuleAnswer:
    return whole_dims(input, (attributes or {}).get("axis", -1), input.shape, input.shape)


@of("SortExt")
def _sort_ext(input: Spec, dim: int = -1, descending: bool = False, stable: bool = False) -> RuleAnswer:
    return whole_dims(input, dim, input.shape, input.shape)


@of("ArgSort")
def _argsort(input: Spec, dim: int = -1, descending: bool = False, stable: bool = False) -> RuleAnswer:
    return whole_dims(input, dim)


@of("TopK TopkExt")
def _topk(input: Spec, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> RuleAnswer:
    shape = list(input.shape)
    shape[dim] = k
    return whole_dims(input, dim, shape, shape)


@of("ReverseV2")
def _flip(input: Spec, axis: object) -> RuleAnswer:
    return whole_dims(input, axis, is_linear=True)


@of("Tril Triu TrilExt")
def _triangle(input: Spec, diagonal: int = 0, attributes: object = None) -> RuleAnswer:
    return whole_dims(input, (-2, -1), is_linear=True)


# -- views
# --------------------------------------------------------------------------------------------------------------


@of("Reshape View")
def _reshape(x: Spec, *shape: Any, **named: Any) -> RuleAnswer:
    return views.reshape(x, as_shape(tuple(named.values()) if named else shape))


@of("ViewAs")
def _view_as(x: Spec, other: Spec) -> RuleAnswer:
    answer = views.reshape(x, other.shape)
    return answer._replace(inputs=(*answer.inputs, other.layout))


@of("FlattenExt")
def _flatten_ext(input: Spec, start_dim: int = 0, end_dim: int = -1) -> RuleAnswer:
    begin, end = dim_in(start_dim, input.ndim), dim_in(end_dim, input.ndim)
    return views.reshape(input, (*input.shape[:begin], -1, *input.shape[end + 1 :]))


@of("Flatten")
def _flatten(input: Spec) -> RuleAnswer:
    return views.reshape(input, (input.shape[0], -1))


@of("Transpose DeprecatedTranspose TransposeView Permute DeprecatedPermute")
def _permute(input: Spec, *dims: Any, **named: Any) -> RuleAnswer:
    return views.permute(input, as_shape(tuple(named.values()) if named else dims))


@of("TransposeExtView TransposeExt")
def _transpose(input: Spec, dim0: int, dim1: int) -> RuleAnswer:
    order = list(range(input.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return views.permute(input, order)


@of("TExt T")
def _t(input: Spec) -> RuleAnswer:
    return views.permute(input, list(reversed(range(input.ndim))))


@of("ExpandDims ExpandDimsView")
def _expand_dims(input: Spec, dim: int) -> RuleAnswer:
    return views.unsqueeze(input, dim)


@of("Squeeze SqueezeView DeprecatedSqueeze")
def _squeeze(input: Spec, dim: object = None) -> RuleAnswer:
    return views.squeeze(input, dim)


@of("BroadcastTo BroadcastToView Expand")
def _expand(input: Spec, *size: Any, **named: Any) -> RuleAnswer:
    return views.expand(input, as_shape(tuple(named.values()) if named else size))


@of("ExpandAs")
def _expand_as(input: Spec, other: Spec) -> RuleAnswer:
    answer = views.expand(input, other.shape)
    return answer._replace(inputs=(*answer.inputs, other.layout))


@of("Tile Repeat")
def _tile(input: Spec, *sizes: Any) -> RuleAnswer:
    counts = as_shape(sizes)
    return views.repeat(input, (*(1,) * (input.ndim - len(counts)), *counts))


@of("Concat")
def _cat(tensors: Sequence[Spec], axis: int = 0) -> RuleAnswer:
    return views.join(tensors, axis)


@of("StackExt")
def _stack(tensors: Sequence[Spec], dim: int = 0) -> RuleAnswer:
    return views.stack(tensors, dim)._replace(how="stack", facts={"dim": dim})


# -- parts
# --------------------------------------------------------------------------------------------------------------


@of("SplitTensor SplitTensorView SplitWithSize SplitWithSizeView", is_sequence=True)
def _split_method(x: Spec, split_size: Any, dim: int = 0) -> RuleAnswer:
    return indexing.split(x, split_size if isinstance(split_size, int) else list(split_size), dim)


@of("Split", is_sequence=True)
def _split(x: Spec, axis: int = 0, output_num: int = 1) -> RuleAnswer:
    length = x.shape[dim_in(axis, x.ndim)]
    if length % output_num:
        raise ArgumentError("The pieces are equal.", expected=f"a divisor of {length}", got=str(output_num))
    return indexing.split(x, [length // output_num] * output_num, axis)


@of("Chunk ChunkView", is_sequence=True)
def _chunk(input: Spec, chunks: int, dim: int = 0) -> RuleAnswer:
    return indexing.chunk(input, chunks, dim)


@of("Unstack", is_sequence=True)
def _unstack(input: Spec, attributes: Any = None) -> RuleAnswer:
    return indexing.unbind(input, (attributes or {}).get("axis", 0))


@of("UnstackExtView UnstackExt", is_sequence=True)
def _unbind(input: Spec, dim: int = 0) -> RuleAnswer:
    return indexing.unbind(input, dim)


@of("Narrow NarrowView")
def _narrow(input: Spec, dim: int, start: int, length: int) -> RuleAnswer:
    return indexing.narrow(input, dim, length)


@of("Slice")
def _slice(input: Spec, begin: Sequence[int], size: Sequence[int]) -> RuleAnswer:
    ends = [
        length if many == -1 else start + many for start, many, length in zip(begin, size, input.shape, strict=True)
    ]
    return _boxed(input, begin, ends, [1] * input.ndim)


@of("StridedSlice")
def _strided_slice(
    input: Spec, begin: Sequence[int], end: Sequence[int], strides: Sequence[int], *masks: int
) -> RuleAnswer:
    if any(masks) or not len(begin) == len(end) == len(strides) == input.ndim:
        raise ArgumentError(
            "A slice of a distributed tensor has a begin, an end and a stride per dim, and no masks.",
            got=f"{begin}, {end}, {strides}, {masks}", do="Use `x[...]`.",
        )  # fmt: skip
    return _boxed(input, begin, end, strides)


def _boxed(x: Spec, begin: Sequence[int], end: Sequence[int], strides: Sequence[int]) -> RuleAnswer:
    index = tuple(slice(*bounds) for bounds in zip(begin, end, strides, strict=True))
    # Sliced by our own call, which cuts the slice of a split dim, taken whole, to the local length.
    return indexing.getitem(x, index)._replace(how="getitem", facts={"index": index})


@of("SelectExtView SelectExt")
def _select(input: Spec, dim: int, index: int) -> RuleAnswer:
    return indexing.select(input, dim)


@of("__getitem__")
def _getitem(x: Spec, index: object) -> RuleAnswer:
    items = index if isinstance(index, tuple) else (index,)
    positions = [item for item in items if isinstance(item, Spec)]
    if not positions:
        return indexing.getitem(x, index)._replace(how="getitem", facts={"index": items})
    before = [item for item in items if not isinstance(item, Spec)]
    if len(positions) == 1 and all(item == slice(None) for item in before):
        dim = items.index(positions[0])
        return indexing.index_by_tensor(x, positions[0], dim)._replace(how="index", facts={"dim": dim})
    raise ArgumentError(
        "A distributed tensor is indexed by numbers and slices, or by one tensor beside whole slices.", got=repr(index)
    )


@of("Gather")
def _gather(input: Spec, index: Spec, axis: Any = 0, batch_dims: int = 0) -> RuleAnswer:
    if batch_dims:
        raise ArgumentError("`gather` of distributed tensors has no batch dims.", expected="0", got=str(batch_dims))
    layout = input.layout
    if axis == 0 and input.ndim == 2 and any(layout.mesh.size(name) > 1 for name in layout.axes_of(0)):
        # A table whose rows are split is looked up as in an embedding, whose rule has the ids first.
        answer = layers.embedding(index, input)
        return answer._replace(inputs=(answer.inputs[1], answer.inputs[0]))
    return indexing.index_by_tensor(input, index, axis)


@of("IndexSelect")
def _index_select(input: Spec, dim: int, index: Spec) -> RuleAnswer:
    return indexing.index_by_tensor(input, index, dim)


@of("GatherD")
def _gather_lines(input: Spec, dim: int, index: Spec) -> RuleAnswer:
    return indexing.lines_by_index(input, dim, index)


@of("Scatter ScatterAddExt ScatterValue")
def _scatter(input: Spec, dim: int, index: Spec, src: object, *args: Any) -> RuleAnswer:
    return indexing.scatter_lines(input, dim, index, src if isinstance(src, Spec) else None)


@of("TensorScatterElements")
def _scatter_elements(input: Spec, indices: Spec, updates: Spec, axis: int = 0, reduce: object = 0) -> RuleAnswer:
    return indexing.scatter_lines(input, axis, indices, updates)


@of("PadV3")
def _pad(input: Spec, paddings: Sequence[int], value: object = None, attributes: Any = None) -> RuleAnswer:
    if (attributes or {}).get("paddings_contiguous") is False:
        raise ArgumentError("`pad` of distributed tensors takes pairs of widths from the last dim on.")
    return indexing.pad(input, tuple(paddings))


@of("ConstantPadND")
def _constant_pad(input: Spec, padding: Sequence[int], value: object = 0) -> RuleAnswer:
    return indexing.pad(input, tuple(padding))


# -- layers
# -------------------------------------------------------------------------------------------------------------


@of("OneHot OneHotExt")
def _one_hot(indices: Spec, depth: int, on_value: object, off_value: object, axis: int = -1) -> RuleAnswer:
    if axis not in (-1, indices.ndim):
        raise ArgumentError("`one_hot` of distributed tensors adds the last dim.", expected="axis=-1", got=str(axis))
    strategies = [Strategy((R,), (R,)), *(Strategy((S(dim),), (S(dim),)) for dim in range(indices.ndim))]
    return answered([indices], strategies, [*indices.shape, depth], how="nothing_of_nothing")


@of("Embedding")
def _embedding(
    input: Spec,
    weight: Spec,
    padding_idx: object = None,
    max_norm: object = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
) -> RuleAnswer:
    if max_norm is not None or scale_grad_by_freq or padding_idx is not None:
        raise ArgumentError(
            "An embedding of distributed tensors has no `padding_idx`, `max_norm` or `scale_grad_by_freq`.",
            do="Leave them out.",
        )
    return layers.embedding(input, weight)


@of("LayerNorm")
def _layer_norm(
    input: Spec, gamma: Spec, beta: Spec, begin_norm_axis: int = 1, begin_params_axis: int = 1, epsilon: float = 1e-7
) -> RuleAnswer:
    count = input.ndim - dim_in(begin_norm_axis, input.ndim)
    answer = layers.norm_over_last(input, count, gamma, beta)
    # MindSpore returns means and variances, too; they have length 1 in the dims of the norm.
    shape = (*input.shape[: input.ndim - count], *(1,) * count)
    inner = Spec(answer.outputs[0].layout, shape)
    return answer._replace(outputs=(*answer.outputs, inner, inner), how="nothing_of_nothing")


@of("RmsNorm")
def _rms_norm(input: Spec, gamma: Spec, epsilon: float = 1e-6) -> RuleAnswer:
    answer = layers.norm_over_last(input, gamma.ndim, gamma)
    shape = (*input.shape[: input.ndim - gamma.ndim], *(1,) * gamma.ndim)
    return answer._replace(outputs=(*answer.outputs, Spec(answer.outputs[0].layout, shape)))


@of("SoftmaxCrossEntropyWithLogits")
def _softmax_cross_entropy(logits: Spec, labels: Spec) -> RuleAnswer:
    if logits.shape != labels.shape or logits.ndim != 2:
        raise ArgumentError("Logits and labels are rows of classes.", expected=str(logits.shape), got=str(labels.shape))
    strategies = [Strategy((R, R), (R, R)), Strategy((S(0), S(0)), (S(0), S(0)))]
    return answered([logits, labels], strategies, logits.shape[:1], logits.shape)
