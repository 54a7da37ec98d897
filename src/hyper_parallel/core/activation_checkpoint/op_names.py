"""How ops are called, on either framework, and which of them are matrix products, attention, convolutions or random.

A PyTorch op has three parts, "aten.mm.default": namespace, name, overload. A MindSpore op and a higher-order op of
PyTorch have one, "MatMul", "flex_attention". Ops are recognised by their classes' names: this file knows no framework.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe

__all__ = ["is_op", "names_of", "written_name", "MATMULS", "ATTENTION", "CONVOLUTIONS", "is_random", "draws"]

_OP_CLASSES = {
    ("torch._ops", "OperatorBase"),  # overloads and higher-order ops
    ("torch._ops", "OpOverloadPacket"),
    ("torch._library.custom_ops", "CustomOpDef"),  # what `torch.library.custom_op` gives
    ("mindspore.ops.primitive", "Primitive"),
}
_WRITTEN = re.compile(r"[A-Za-z_]\w*(\.\w+){0,2}")
_ACCEPTED = 'an op such as torch.ops.aten.mm.default, or a name such as "aten.mm", "aten.mm.default", "MatMul"'


def is_op(value: object) -> bool:
    """Tell whether this is an op object of a framework; a name is not one."""
    return any((cls.__module__, cls.__name__) in _OP_CLASSES for cls in type(value).__mro__)


@functools.cache
def names_of(op: object) -> frozenset[str]:
    """Return every name that means this op: the whole one, the one without overload, the one without namespace."""
    whole = _plain(op)
    parts = whole.split(".")
    return frozenset({whole, ".".join(parts[:2]), parts[min(1, len(parts) - 1)]})


def no_op(thing: object) -> ArgumentTypeError:
    return ArgumentTypeError("This is no op.", expected=_ACCEPTED, got=describe(thing), do=_hint(thing))


def written_name(entry: object) -> str:
    """Return the name that stands for `entry`: an op, all its overloads (`torch.ops.aten.mm`), or a name a user wrote.

    Raises:
        ArgumentError: a text that cannot be an op's name.
        ArgumentTypeError: neither an op nor a text.
    """
    if is_op(entry):
        return _plain(entry)
    if not isinstance(entry, str):
        raise no_op(entry)
    name = _plain(entry).removeprefix("torch.ops.")
    if not _WRITTEN.fullmatch(name):
        raise ArgumentError("This is no op's name.", expected=_ACCEPTED, got=describe(entry))
    if name.startswith("torch."):
        # It would never match, and the policy would silently recompute what was meant to be saved.
        do = f'Write "aten.{name.removeprefix("torch.")}".'
        raise ArgumentError("This names a function, not an op.", expected=_ACCEPTED, got=describe(entry), do=do)
    return name


def _plain(op: Any) -> str:
    for cls in type(op).__mro__:
        if cls.__name__ == "CustomOpDef":
            return str(op._qualname).replace("::", ".")
        if cls.__name__ == "Primitive":
            return str(op.name)
    return str(op).replace("::", ".")


def _hint(entry: object) -> str | None:
    name = getattr(entry, "__name__", None)
    if callable(entry) and isinstance(name, str) and _WRITTEN.fullmatch(name) and not isinstance(entry, type):
        return f"`{name}` is a function: name the op that it runs, as in torch.ops.aten.{name}."
    return None


def _names(namespace: str, names: str) -> Iterator[str]:
    return (f"{namespace}.{name}" if namespace else name for name in names.split())


# What reaches a region depends on the device, the shapes and the mode (`linear` is whole in inference mode and `mm` or
# `addmm` in training), so both the composite names and their parts are here. `einsum` of PyTorch arrives as `bmm`,
# MindSpore's as itself.
MATMULS = frozenset(
    [
        *_names("aten", "mm addmm bmm baddbmm addbmm mv addmv matmul linalg_matmul linear bilinear _trilinear"),
        *_names("aten", "addmm_ baddbmm_ addbmm_ addmv_ chain_matmul smm hspmm sspaddmm sparse_sampled_addmm"),
        *_names("aten", "_addmm_activation _grouped_mm _foreach_mm mkldnn_linear"),
        *_names("aten", "_scaled_mm _scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2"),
        *_names("aten", "_int_mm _mixed_dtypes_linear _weight_int8pack_mm _weight_int4pack_mm _dyn_quant_matmul_4bit"),
        *_names("aten", "_weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros"),
        *_names("aten", "_sparse_mm _sparse_addmm _sparse_sparse_matmul _sparse_mm_reduce_impl _cslt_sparse_mm"),
        *_names("aten", "_sparse_semi_structured_mm _sparse_semi_structured_addmm _sparse_semi_structured_linear"),
        *_names("symm_mem", "fused_all_gather_matmul fused_all_gather_scaled_matmul"),
        *_names("symm_mem", "fused_matmul_reduce_scatter fused_scaled_matmul_reduce_scatter"),
        *_names("npu", "npu_linear npu_bmmV2 npu_grouped_matmul npu_quant_matmul"),
        *_names("", "MatMul MatMulExt BatchMatMul BatchMatMulExt Mm Mv Addmm Addmv Addbmm Baddbmm Dense InplaceAddmm"),
        *_names("", "Einsum EinsumExt Gmm GmmV2 GroupedMatmul GroupedMatmulV2 GroupedMatmulV4"),
        *_names("", "QuantMatmul QuantBatchMatmul WeightQuantBatchMatmul QuantLinearSparse SparseTensorDenseMatmul"),
        *_names("", "TransposeBatchMatmulTranspose AllGatherMatmul MatmulReduceScatter"),
    ]
)

# The "math" fallback of PyTorch is not here: it arrives as matrix products and a softmax.
ATTENTION = frozenset(
    [
        *_names("aten", "scaled_dot_product_attention _scaled_dot_product_attention_math"),
        *_names("aten", "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"),
        *_names("aten", "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"),
        *_names("aten", "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps"),
        *_names("aten", "_flash_attention_forward _flash_attention_forward_no_dropout_inplace"),
        *_names("aten", "_efficient_attention_forward _cudnn_attention_forward _native_multi_head_attention"),
        *_names("aten", "_triton_scaled_dot_attention _triton_multi_head_attention"),
        *_names("torch_attn", "_varlen_attn"),
        *_names("flash_attn", "_flash_attn_forward _flash_attn_varlen_forward"),
        *_names("flash_attn_3", "fwd _flash_attn_forward"),
        *_names("flash_attn_4", "_flash_attn_forward"),
        *_names("xformers", "efficient_attention_forward_cutlass"),
        *_names("xformers_flash", "flash_fwd"),
        *_names("xformers_flash3", "flash_fwd"),
        *_names("npu", "npu_fusion_attention npu_fusion_attention_v2 npu_fusion_attention_v3"),
        *_names("", "flex_attention"),
        *_names("", "FlashAttentionScore SpeedFusionAttention SparseFlashAttention"),
        *_names("", "NsaCompressAttention NsaSelectAttention"),
        *_names(
            "", "FusedInferAttentionScore PromptFlashAttention IncreFlashAttention PagedAttention PagedAttentionMask"
        ),
    ]
)

CONVOLUTIONS = frozenset(
    [
        *_names("aten", "convolution _convolution _convolution_mode convolution_overrideable"),
        *_names("aten", "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"),
        *_names(
            "aten", "cudnn_convolution cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu"
        ),
        *_names("aten", "miopen_convolution miopen_convolution_transpose miopen_depthwise_convolution"),
        *_names("aten", "miopen_convolution_relu miopen_convolution_add_relu mkldnn_convolution"),
        *_names("aten", "_mps_convolution _mps_convolution_transpose _nnpack_spatial_convolution"),
        *_names("aten", "_conv_depthwise2d conv_depthwise3d thnn_conv2d _slow_conv2d_forward"),
        *_names("aten", "slow_conv3d slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d"),
        *_names("aten", "slow_conv_transpose2d slow_conv_transpose3d"),
        *_names("", "Conv1DExt Conv1DPadding Conv2D Conv2DExt Conv2DPadding Conv2DTranspose"),
        *_names("", "Conv3D Conv3DExt Conv3DPadding Conv3DTranspose ConvTranspose2D ConvTbc"),
        *_names("", "Convolution ConvolutionStr DepthwiseConv2dNative"),
    ]
)

# PyTorch marks its own random ops with a tag; these have none.
RANDOM = frozenset(
    [
        *_names("npu", "_npu_dropout"),
        *_names(
            "", "Dropout Dropout2D Dropout3D DropoutExt Dropout2dExt FuncDropoutExt DropoutGenMask DropoutGenMaskExt"
        ),
        *_names("", "Bernoulli BernoulliExt InplaceBernoulliScalar InplaceBernoulliTensor"),
        *_names("", "Multinomial MultinomialExt MultinomialWithReplacement RandomCategorical RandomChoiceWithMask"),
        *_names("", "NormalFloatFloat NormalFloatTensor NormalTensorFloat NormalTensorTensor InplaceNormal"),
        *_names("", "StandardNormal TruncatedNormal ParameterizedTruncatedNormal LogNormalReverse"),
        *_names("", "Uniform UniformExt UniformInt UniformReal InplaceUniform"),
        *_names("", "UniformCandidateSampler LogUniformCandidateSampler"),
        *_names("", "RandExt RandLikeExt RandInt RandIntLike Randn RandnLike Randperm RandpermExt RandpermV2"),
        *_names("", "InplaceRandom InplaceExponential RandomShuffle Cauchy Gamma RandomGamma Poisson RandomPoisson"),
    ]
)

# The arguments that turn randomness off, with the value that does.
_OFF = {"dropout_p": 0, "dropout": 0, "keep_prob": 1}


@functools.cache
def is_random(op: object) -> bool | None:
    """Tell whether the op draws random numbers; None where it depends on the call (see `draws`)."""
    names = names_of(op)
    if not RANDOM.isdisjoint(names):
        return True
    tagged = any(getattr(tag, "name", None) == "nondeterministic_seeded" for tag in getattr(op, "tags", None) or ())
    if tagged or not ATTENTION.isdisjoint(names):
        # PyTorch tags attention for the dropout that it may have; ops of other packages carry no tag.
        return None if _switch(op) is not None else tagged
    return False


@functools.cache
def _switch(op: object) -> tuple[int, str] | None:
    """Return position and name of the argument that turns the op's randomness off, if it has one."""
    arguments = getattr(getattr(op, "_schema", None), "arguments", ())
    return next(((i, argument.name) for i, argument in enumerate(arguments) if argument.name in _OFF), None)


def draws(op: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether this call of an op that may be random draws random numbers."""
    switch = _switch(op)
    if switch is None:
        return True
    position, name = switch
    value = args[position] if position < len(args) else kwargs.get(name, _OFF[name])
    return bool(value != _OFF[name])
