# SPDX-License-Identifier: MIT
"""Argument structs of the C ABI from NumPy arrays, or from shapes alone (for plans)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import _capi
from .console import UsageError

if TYPE_CHECKING:
    import numpy as np

CODES = {
    "fp32": _capi.F32,
    "bf16": _capi.BF16,
    "fp16": _capi.F16,
    "fp64": _capi.F64,
    "i32": _capi.I32,
    "i64": _capi.I64,
}
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "i32": 4, "i64": 8}
_NUMPY_CODES = {
    "float32": _capi.F32,
    "bfloat16": _capi.BF16,
    "float16": _capi.F16,
    "float64": _capi.F64,
    "int32": _capi.I32,
    "int64": _capi.I64,
    "uint8": _capi.U8,
}
OPS = {"chunk_forward": _capi.OP_CHUNK_FORWARD, "recurrent": _capi.OP_RECURRENT}
OP_NAMES = {"chunk": "chunk_forward", **{name: name for name in OPS}}


def numpy_type(dtype: str) -> Any:
    """NumPy's type of fp32 | bf16 | fp16 | fp64 | i32 | i64; bf16 is ml_dtypes'."""
    from .console import need

    np = need("numpy", "this command")
    if dtype == "bf16":
        return np.dtype(need("ml_dtypes", "bf16").bfloat16)
    return np.dtype({"fp32": "f4", "fp16": "f2", "fp64": "f8", "i32": "i4", "i64": "i8"}[dtype])


def tensor_of(array: np.ndarray, swap_last: bool = False) -> _capi.Tensor:
    """View of an array (which the caller keeps alive); swap_last exchanges the last two axes (V-first states)."""
    tensor = _capi.Tensor(data=array.ctypes.data, device_type=_capi.CPU, dtype=_NUMPY_CODES[array.dtype.name])
    tensor.ndim = array.ndim
    axes = list(range(array.ndim))
    if swap_last:
        axes[-1], axes[-2] = axes[-2], axes[-1]
    for i, axis in enumerate(axes):
        tensor.shape[i] = array.shape[axis]
        tensor.strides[i] = array.strides[axis] // array.itemsize
    return tensor


def tensor_shape(shape: Sequence[int], dtype: str) -> _capi.Tensor:
    """A contiguous tensor without data, for gdn_explain."""
    tensor = _capi.Tensor(device_type=_capi.CPU, dtype=CODES[dtype], ndim=len(shape))
    stride = 1
    for i in reversed(range(len(shape))):
        tensor.shape[i], tensor.strides[i] = shape[i], stride
        stride *= shape[i]
    return tensor


class Struct:
    """An argument struct and everything that it points at."""

    def __init__(self, kind: Any, **fields: Any) -> None:
        self.args = kind(struct_size=ctypes.sizeof(kind))
        self._keep: list[Any] = []
        self.set(**fields)

    def set(self, **fields: Any) -> Struct:
        """Sets fields: arrays and tensors become views, strings become bytes, None stays absent."""
        for name, value in fields.items():
            if value is None:
                continue
            if isinstance(value, str):
                value = value.encode()
            elif hasattr(value, "ctypes"):
                self._keep.append(value)
                value = tensor_of(value)
            if isinstance(value, _capi.Tensor):
                self._keep.append(value)
                value = ctypes.pointer(value)
            setattr(self.args, name, value)
        return self


def integers(text: str) -> list[int]:
    """ "7,9" -> [7, 9]; "4x512" -> four times 512."""
    values: list[int] = []
    for part in text.replace(" ", "").split(","):
        count, _, value = part.rpartition("x")
        try:
            repeats, number = int(count or 1), int(value)
        except ValueError:
            raise UsageError(f"argument '--seqlens': found {text!r}, expected lengths such as 7,9 or 4x512") from None
        if repeats < 0 or number < 0:
            raise UsageError(f"argument '--seqlens': found {text!r}, expected lengths of 0 or more")
        values += [number] * repeats
    return values
