# SPDX-License-Identifier: MIT
"""Arrays of any library as gdn_tensor views: NumPy, DLPack, buffer protocol, __array_interface__. No torch."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any

import numpy as np

from . import _capi

_NUMPY_DTYPES = {
    "float32": _capi.F32,
    "bfloat16": _capi.BF16,
    "float16": _capi.F16,
    "float64": _capi.F64,
    "int32": _capi.I32,
    "int64": _capi.I64,
    "uint8": _capi.U8,
    "bool": _capi.U8,
}
# DLPack (type code, bits): code 0 int, 1 uint, 2 float, 4 bfloat, 6 bool.
_DLPACK_DTYPES = {
    (2, 32): _capi.F32,
    (4, 16): _capi.BF16,
    (2, 16): _capi.F16,
    (2, 64): _capi.F64,
    (0, 32): _capi.I32,
    (0, 64): _capi.I64,
    (1, 8): _capi.U8,
    (6, 8): _capi.U8,
}
_EXPECTED_DTYPES = "float32, bfloat16, float16, float64, int32, int64, uint8 or bool"


class _DLTensor(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _invalid(function: str, argument: str, found: str, expected: str) -> _capi.InvalidArgumentError:
    return _capi.InvalidArgumentError(f"{function}: argument '{argument}': found {found}, expected {expected}")


def numpy_dtype(dtype: int) -> np.dtype:
    """The NumPy dtype of a gdn dtype; bfloat16 comes from ml_dtypes."""
    if dtype == _capi.BF16:
        try:
            import ml_dtypes
        except ImportError:
            raise _capi.UnsupportedError(
                "gdn.numpy: a bfloat16 output needs the package ml_dtypes; install it, or pass out="
            ) from None
        return np.dtype(ml_dtypes.bfloat16)
    names = {_capi.F32: "float32", _capi.F16: "float16", _capi.F64: "float64"}
    return np.dtype(names[dtype])


class Views:
    """The views of one call; keeps every array and capsule alive until it is dropped."""

    def __init__(self, function: str) -> None:
        self.function = function
        self._alive: list[Any] = []

    def read(self, argument: str, array: Any) -> Any:
        """Pointer to the view of an input, or None for an absent one."""
        return self._view(argument, array, output=False)

    def write(self, argument: str, array: Any) -> Any:
        """Pointer to the view of an output, or None; read-only arrays are refused."""
        return self._view(argument, array, output=True)

    def required(self, argument: str, array: Any) -> Any:
        if array is None:
            raise _invalid(self.function, argument, "None", "an array")
        return self.read(argument, array)

    def _view(self, argument: str, array: Any, output: bool) -> Any:
        if array is None:
            return None
        self._alive.append(array)
        tensor = _capi.Tensor()
        if not isinstance(array, np.ndarray) and hasattr(array, "__dlpack__"):
            self._from_dlpack(argument, array, tensor)
        else:
            self._from_numpy(argument, array, tensor, output)
        self._alive.append(tensor)
        return ctypes.pointer(tensor)

    def _from_numpy(self, argument: str, array: Any, tensor: _capi.Tensor, output: bool) -> None:
        if output and not isinstance(array, np.ndarray):
            # np.asarray may copy; an output must be the caller's own memory.
            view = np.asarray(memoryview(array)) if not hasattr(array, "__array_interface__") else np.asarray(array)
        else:
            view = np.asarray(array)
        self._alive.append(view)
        if view.dtype.name not in _NUMPY_DTYPES or not view.dtype.isnative:
            raise _invalid(self.function, argument, f"dtype {view.dtype}", _EXPECTED_DTYPES)
        if output and not view.flags.writeable:
            raise _invalid(self.function, argument, "a read-only array", "a writable array")
        if view.ndim > _capi.MAX_DIMS:
            raise _invalid(self.function, argument, f"{view.ndim} dimensions", f"at most {_capi.MAX_DIMS}")
        tensor.data = view.ctypes.data
        tensor.device_type = _capi.CPU
        tensor.dtype = _NUMPY_DTYPES[view.dtype.name]
        tensor.ndim = view.ndim
        for i, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
            if stride % view.itemsize != 0:
                raise _invalid(
                    self.function, argument, f"a stride of {stride} bytes", f"a multiple of {view.itemsize} bytes"
                )
            tensor.shape[i] = size
            tensor.strides[i] = stride // view.itemsize

    def _from_dlpack(self, argument: str, array: Any, tensor: _capi.Tensor) -> None:
        device_type, _ = array.__dlpack_device__()
        if device_type != _capi.CPU:
            raise _invalid(
                self.function,
                argument,
                f"an array on DLPack device type {int(device_type)}",
                "a CPU array (gdn.numpy has no CUDA streams; gdn.torch takes CUDA tensors)",
            )
        capsule = array.__dlpack__()
        self._alive.append(capsule)
        source = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        dtype = _DLPACK_DTYPES.get((source.code, source.bits)) if source.lanes == 1 else None
        if dtype is None:
            raise _invalid(
                self.function, argument, f"DLPack dtype code {source.code} of {source.bits} bits", _EXPECTED_DTYPES
            )
        if source.ndim > _capi.MAX_DIMS:
            raise _invalid(self.function, argument, f"{source.ndim} dimensions", f"at most {_capi.MAX_DIMS}")
        tensor.data = (source.data or 0) + source.byte_offset
        tensor.device_type = _capi.CPU
        tensor.dtype = dtype
        tensor.ndim = source.ndim
        stride = 1
        for i in reversed(range(source.ndim)):
            tensor.shape[i] = source.shape[i]
            tensor.strides[i] = source.strides[i] if source.strides else stride
            stride *= source.shape[i]
