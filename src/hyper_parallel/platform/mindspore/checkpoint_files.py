"""Checkpoint files of MindSpore's tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn
from mindspore.common.dtype import _dtype_to_nptype

from hyper_parallel._base.errors import ArgumentTypeError
from hyper_parallel.platform import checkpoint_files
from hyper_parallel.platform.checkpoint_files import LoadedTensors
from hyper_parallel.platform.mindspore.parameters import Parameters, new_parameter
from hyper_parallel.platform.tensor_file import TensorRecord

CODES = {
    mindspore.float64: "F64", mindspore.float32: "F32", mindspore.float16: "F16", mindspore.bfloat16: "BF16",
    mindspore.int64: "I64", mindspore.int32: "I32", mindspore.int16: "I16", mindspore.int8: "I8",
    mindspore.uint64: "U64", mindspore.uint32: "U32", mindspore.uint16: "U16", mindspore.uint8: "U8",
    mindspore.bool_: "BOOL", mindspore.complex64: "C64",
    mindspore.float8_e4m3fn: "F8_E4M3", mindspore.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}
NOT_IN_NUMPY = {mindspore.float8_e4m3fn, mindspore.float8_e5m2}


class CheckpointFiles:
    @staticmethod
    def save_checkpoint(
        cell: nn.Cell | Mapping[str, Tensor], file_path: str | os.PathLike[str], ckpt_format: str = "safetensors"
    ) -> None:
        if isinstance(cell, nn.Cell):
            cell = cell.state_dict()
        checkpoint_files.save(cell, file_path, ckpt_format, _Codec())

    @staticmethod
    def load_checkpoint(file_path: str | os.PathLike[str], ckpt_format: str = "safetensors") -> LoadedTensors:
        """Load the tensors of a file by name, on the CPU; `.verified` tells whether their checksums were compared.

        They are Parameters without gradient, so that `load_param_into_net` takes them as well as `load_state_dict`.
        """
        return checkpoint_files.load(file_path, ckpt_format, _Codec())


class _Codec:
    tensor_type: type = Tensor

    def code(self, tensor: Tensor) -> str | None:
        return CODES.get(tensor.dtype)

    def refusal(self, tensor: Tensor) -> str | None:
        if tensor.is_meta:
            return "it has no data (it lives on the meta device)."
        if tensor.has_init:
            return "it has no data (its initializer has not run; `init_parameters` runs it)."
        if hasattr(tensor, "to_local"):
            return (
                "it is one rank's part of a distributed tensor; "
                "save `platform.get_model_state_dict(model, options=...)` with "
                "`full_state_dict`, or `full_tensor()` of it."
            )
        return None

    def content(self, tensor: Tensor) -> Any:
        return content_of(tensor)

    def tensor(self, record: TensorRecord) -> Parameter:
        return tensor_of(record)


def content_of(tensor: Tensor) -> Any:
    """Return the bytes of a tensor as a flat array: of its own memory, where that is contiguous."""
    if tensor.dtype in NOT_IN_NUMPY:
        tensor = tensor.view(mindspore.uint8)
    return np.ascontiguousarray(tensor.asnumpy()).reshape(-1).view(np.uint8)


def tensor_of(record: TensorRecord) -> Parameter:
    """Make a new tensor with a copy of the record's bytes."""
    dtype = DTYPES.get(record.dtype)
    if dtype is None:
        raise ArgumentTypeError(
            "MindSpore has no such dtype here.",
            got=record.dtype,
            where=f"tensor {record.name!r}",
            do="Cast it before saving.",
        )
    if dtype in NOT_IN_NUMPY:
        parameter = _loaded(mint.empty(record.shape, dtype=dtype, device="meta"), record.name)
        stored = Tensor.convert_bytes_to_tensor(bytes(record.data), record.shape, dtype)
        Parameters.update_param_data(parameter, Tensor(stored))
        return parameter
    return _loaded(np.ndarray(record.shape, _dtype_to_nptype(dtype), record.data), record.name)  # a copy


def _loaded(data: object, name: str) -> Parameter:
    return new_parameter(data, name=name, requires_grad=False)
