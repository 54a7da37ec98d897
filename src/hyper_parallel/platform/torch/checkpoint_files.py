"""Checkpoint files of PyTorch's tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hyper_parallel._base.errors import ArgumentTypeError
from hyper_parallel.platform import checkpoint_files
from hyper_parallel.platform.checkpoint_files import LoadedTensors
from hyper_parallel.platform.tensor_file import TensorRecord

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}


class CheckpointFiles:
    @staticmethod
    def save_checkpoint(
        cell: nn.Module | Mapping[str, torch.Tensor],
        file_path: str | os.PathLike[str],
        ckpt_format: str = "safetensors",
    ) -> None:
        if isinstance(cell, nn.Module):
            cell = cell.state_dict()
        checkpoint_files.save(cell, file_path, ckpt_format, _Codec())

    @staticmethod
    def load_checkpoint(file_path: str | os.PathLike[str], ckpt_format: str = "safetensors") -> LoadedTensors:
        """Load the tensors of a file by name, on the CPU; `.verified` tells whether their checksums were compared."""
        return checkpoint_files.load(file_path, ckpt_format, _Codec())


class _Codec:
    tensor_type: Any = torch.Tensor

    def code(self, tensor: torch.Tensor) -> str | None:
        return CODES.get(tensor.dtype)

    def refusal(self, tensor: torch.Tensor) -> str | None:
        if tensor.device.type == "meta":
            return "it has no data (it lives on the meta device)."
        if hasattr(tensor, "to_local"):
            return (
                "it is one rank's part of a distributed tensor; "
                "save `platform.get_model_state_dict(model, options=...)` with "
                "`full_state_dict`, or `full_tensor()` of it; or each rank's part, by `torch.distributed.checkpoint`."
            )
        if tensor.layout is not torch.strided:
            return "it is sparse."
        return None

    def content(self, tensor: torch.Tensor) -> Any:
        host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # As bytes through NumPy: a view without a copy, for every dtype (NumPy lacks bfloat16 and float8).
        return host.reshape(-1).view(torch.uint8).numpy()

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        dtype = DTYPES.get(record.dtype)
        if dtype is None:
            raise ArgumentTypeError(
                "PyTorch has no such dtype here.",
                got=record.dtype,
                where=f"tensor {record.name!r}",
                do="Cast it before saving.",
            )
        tensor = torch.empty(record.shape, dtype=dtype, device="cpu")
        if tensor.numel():
            tensor.reshape(-1).view(torch.uint8).numpy()[:] = memoryview(record.data)
        return tensor
