# SPDX-License-Identifier: MIT
"""ctypes over libgdn's C ABI (include/gdn/gdn.h): structs, enums, status codes as exceptions.

The structs mirror the header field by field; tests/python/test_numpy.py compares every size and offset with the
compiled ones.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

OK, INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, INTERNAL = range(5)
CPU, CUDA = 1, 2
F32, BF16, F16, F64, I32, I64, U8 = range(1, 8)
MAX_DIMS = 6
OP_CHUNK_FORWARD, OP_RECURRENT = 0, 1

# Names that the Python API uses for the header's enums.
GATE_FORMS = {"log": 0, "linear": 1, "raw": 2}
BETA_FORMS = {"value": 0, "sigmoid": 1, "sigmoid2": 2}
HEAD_MAPS = {"grouped": 0, "tiled": 1}
STATE_LAYOUTS = {"k_first": 0, "v_first": 1}
NULL_SLOTS = {"negative": 0, "non_positive": 1}
SPLITS = {"auto": 0, "off": 1}
ACTIVATIONS = {None: 0, "none": 0, "silu": 1, "swish": 1, "sigmoid": 2}
GLU_ACTIVATIONS = {"silu": 1, "sigmoid": 2}


class Error(Exception):
    """Base class of what libgdn refuses or fails at."""


class InvalidArgumentError(Error, ValueError):
    """The call contradicts the documented contract; the message names argument, found and expected."""


class UnsupportedError(Error, NotImplementedError):
    """A legal call that no implementation takes; the message names what is missing."""


class OutOfMemoryError(Error, MemoryError):
    """Scratch memory could not be allocated."""


class InternalError(Error, RuntimeError):
    """A bug in libgdn."""


_EXCEPTIONS: dict[int, type[Error]] = {
    INVALID_ARGUMENT: InvalidArgumentError,
    UNSUPPORTED: UnsupportedError,
    OUT_OF_MEMORY: OutOfMemoryError,
    INTERNAL: InternalError,
}


def choice(function: str, argument: str, value: Any, choices: dict[Any, int]) -> int:
    """The enum value of a name, or an error in the library's own wording."""
    try:
        return choices[value]
    except (KeyError, TypeError):
        names = ", ".join(repr(name) for name in choices)
        message = f"{function}: argument '{argument}': found {value!r}, expected one of {names}"
        raise InvalidArgumentError(message) from None


class Tensor(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("dtype", c_int32),
        ("ndim", c_int32),
        ("shape", c_int64 * MAX_DIMS),
        ("strides", c_int64 * MAX_DIMS),
    )


def _fields(names: str, ctype: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctype) for name in names.split())


_TENSOR = POINTER(Tensor)


class RuleArgs(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        *_fields("q k v g beta A_log dt_bias o", _TENSOR),
        *_fields("gate_form beta_form head_map qk_l2norm", c_int32),
        *_fields("l2norm_eps scale", c_float),
        ("cu_seqlens", _TENSOR),
        *_fields("state_layout null_slots", c_int32),
        *_fields(
            "initial_state initial_state_indices has_initial_state final_state final_state_indices "
            "token_state_indices num_accepted snapshots checkpoints checkpoint_indices",
            _TENSOR,
        ),
        ("checkpoint_every", c_int64),
        *_fields("num_threads batch_invariant", c_int32),
        ("impl", c_char_p),
        *_fields("round_qk round_beta", c_int32),
        ("stream", c_void_p),
        ("max_seqlen", c_int64),
        *_fields("zero_tail split", c_int32),
        ("split_tokens", c_int64),
        ("split_exact", c_int32),
        ("split_threshold", c_float),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
    )


class Conv1dArgs(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        *_fields(
            "x weight bias y cu_seqlens initial_state initial_state_indices has_initial_state final_state "
            "final_state_indices num_accepted",
            _TENSOR,
        ),
        *_fields("activation null_slots num_threads", c_int32),
        ("stream", c_void_p),
    )


class GateArgs(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        *_fields("a b A_log dt_bias g beta", _TENSOR),
        *_fields("gate_form beta_form num_threads", c_int32),
        ("stream", c_void_p),
    )


class RmsnormGatedArgs(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        *_fields("x z weight out", _TENSOR),
        ("eps", c_float),
        *_fields("activation gate_first zero_centered round_before_weight num_threads", c_int32),
        ("stream", c_void_p),
        *_fields("residual residual_out", _TENSOR),
    )


class GluArgs(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        *_fields("x z out", _TENSOR),
        *_fields("activation num_threads", c_int32),
        ("stream", c_void_p),
    )


class QkRmsnormRopeArgs(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        *_fields("q k q_weight k_weight cos sin positions q_out k_out gate_out", _TENSOR),
        *_fields("eps theta", c_float),
        ("rotary_dim", c_int32),
        ("mrope_section", c_int32 * 3),
        *_fields("q_has_gate zero_centered num_threads", c_int32),
        ("stream", c_void_p),
    )


_PACKAGE = Path(__file__).resolve().parent


def library_path() -> str:
    """Path of the libgdn that this package loads: GDN_LIBRARY if set, else the one inside the package."""
    return os.environ.get("GDN_LIBRARY") or str(_PACKAGE / "lib" / "libgdn.so")


def library_dir() -> str:
    """Folder to link against (``-L`` and run path) in an extension of your own."""
    return str(Path(library_path()).parent)


def include_dir() -> str:
    """Folder that holds ``gdn/gdn.h`` and ``gdn/gdn.hpp``."""
    return str(_PACKAGE / "include")


def cmake_dir() -> str:
    """Folder for ``find_package(gdn)``: pass it as ``-Dgdn_DIR=...``."""
    return str(_PACKAGE / "lib" / "cmake" / "gdn")


def _load() -> ctypes.CDLL:
    path = library_path()
    try:
        loaded = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"gdn: cannot load {path} ({error}); install the package, or set GDN_LIBRARY to a libgdn.so"
        ) from None
    loaded.gdn_abi_version.restype = c_int32
    if loaded.gdn_abi_version() != 1:
        raise ImportError(f"gdn: {path} has ABI version {loaded.gdn_abi_version()}, expected 1")
    loaded.gdn_last_error.restype = c_char_p
    loaded.gdn_version.restype = c_char_p
    loaded.gdn_get_isa.restype = c_char_p
    loaded.gdn_get_num_threads.restype = c_int32
    for name, struct in (
        ("gdn_chunk_forward", RuleArgs),
        ("gdn_recurrent", RuleArgs),
        ("gdn_causal_conv1d", Conv1dArgs),
        ("gdn_gate", GateArgs),
        ("gdn_rmsnorm_gated", RmsnormGatedArgs),
        ("gdn_glu", GluArgs),
        ("gdn_qk_rmsnorm_rope", QkRmsnormRopeArgs),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = c_int32, (POINTER(struct),)
    loaded.gdn_chunk_forward_workspace.argtypes = (POINTER(RuleArgs), POINTER(c_int64))
    loaded.gdn_explain.argtypes = (c_int32, POINTER(RuleArgs), c_char_p, c_size_t, POINTER(c_size_t))
    loaded.gdn_info.argtypes = (c_char_p, c_size_t, POINTER(c_size_t))
    loaded.gdn_set_num_threads.argtypes = (c_int32,)
    loaded.gdn_set_isa.argtypes = (c_char_p,)
    loaded.gdn_measure_peak.argtypes = (c_int32, POINTER(c_double), POINTER(c_double))
    return loaded


lib = _load()


def check(status: int) -> None:
    """Turns a gdn_status into an exception carrying gdn_last_error()."""
    if status != OK:
        raise _EXCEPTIONS.get(status, InternalError)(lib.gdn_last_error().decode())


def _json(call: Any) -> dict[str, Any]:
    needed = c_size_t(0)
    check(call(None, 0, byref(needed)))
    buffer = ctypes.create_string_buffer(needed.value)
    check(call(buffer, needed.value, None))
    return json.loads(buffer.value.decode())


def explain(op: int, args: RuleArgs) -> dict[str, Any]:
    """The plan of a call and why each implementation accepts or refuses it (gdn_explain)."""
    return _json(lambda buffer, size, needed: lib.gdn_explain(op, byref(args), buffer, size, needed))


def info() -> dict[str, Any]:
    """Version, build, CPU, ISAs, threads and GPUs of the loaded library."""
    return _json(lambda buffer, size, needed: lib.gdn_info(buffer, size, needed))


@functools.cache
def has_cuda() -> bool:
    """Whether the loaded library was built with its CUDA backend (not: whether there is a GPU)."""
    return bool(info()["build"]["cuda"])


def version() -> str:
    """Version of the loaded libgdn."""
    return lib.gdn_version().decode()


def abi_version() -> int:
    """Version of the C ABI."""
    return lib.gdn_abi_version()


def set_num_threads(num_threads: int) -> None:
    """Threads of the pool; 0: the default (GDN_NUM_THREADS, else the CPUs that this process may use)."""
    check(lib.gdn_set_num_threads(num_threads))


def get_num_threads() -> int:
    """Threads that a call uses unless it says otherwise."""
    return lib.gdn_get_num_threads()


def set_isa(name: str) -> None:
    """Caps the instruction set of the process: auto, amx, avx512, avx2, neon or baseline."""
    check(lib.gdn_set_isa(name.encode()))


def get_isa() -> str:
    """The instruction set in use."""
    return lib.gdn_get_isa().decode()


def measure_peak(num_threads: int = 0) -> tuple[float, float]:
    """Measured fp32 multiply-add peak in GFLOP/s and copy rate in GB/s (about 0.4 s)."""
    gflops, copy = c_double(), c_double()
    check(lib.gdn_measure_peak(num_threads, byref(gflops), byref(copy)))
    return gflops.value, copy.value


def release_memory() -> None:
    """Frees the scratch memory of the pool's threads."""
    check(lib.gdn_release_memory())
