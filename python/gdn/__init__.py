# SPDX-License-Identifier: MIT
"""libgdn: operators for Gated Delta Networks.

``import gdn`` loads neither torch nor numpy. Submodules load when first used:

- ``gdn.numpy``: the operators on NumPy / DLPack arrays, without torch
- ``gdn.torch``: the operators on torch tensors
- ``gdn.fla``, ``gdn.causal_conv1d``: functions with the exact signatures of FLA and of causal-conv1d
- ``gdn.nn``: the ``GatedDeltaNet`` layer; ``gdn.hf``: ``enable(model)`` for Transformers models
"""

from __future__ import annotations

import importlib
from typing import Any

from ._capi import (
    Error,
    InternalError,
    InvalidArgumentError,
    OutOfMemoryError,
    UnsupportedError,
    abi_version,
    cmake_dir,
    get_isa,
    get_num_threads,
    include_dir,
    info,
    library_dir,
    library_path,
    measure_peak,
    release_memory,
    set_isa,
    set_num_threads,
    version,
)

__version__ = version()

_SUBMODULES = frozenset({"causal_conv1d", "cli", "fla", "hf", "nn", "numpy", "torch"})
_LAZY = {
    "chunk_gated_delta_rule": "fla",
    "fused_recurrent_gated_delta_rule": "fla",
    "causal_conv1d_fn": "causal_conv1d",
    "causal_conv1d_update": "causal_conv1d",
}

__all__ = [
    "Error",
    "InternalError",
    "InvalidArgumentError",
    "OutOfMemoryError",
    "UnsupportedError",
    "__version__",
    "abi_version",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "cmake_dir",
    "fused_recurrent_gated_delta_rule",
    "get_isa",
    "get_num_threads",
    "include_dir",
    "info",
    "library_dir",
    "library_path",
    "measure_peak",
    "release_memory",
    "set_isa",
    "set_num_threads",
    "version",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LAZY:
        value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | _SUBMODULES | set(_LAZY))
