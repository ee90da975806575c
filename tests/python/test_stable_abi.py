# SPDX-License-Identifier: MIT
"""The torch binding uses PyTorch's stable ABI and libgdn's C ABI, nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import gdn
import gdn.torch

OPS = Path(os.environ.get("GDN_TORCH_OPS") or Path(gdn.__file__).parent / "_torch_ops.so")


def _tool(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} (binutils) is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_no_python_and_no_unstable_symbols() -> None:
    """Undefined symbols: no Python C API, no at:: / c10:: C++ symbols, only the C shims and gdn_*."""
    undefined = [line.split()[-1] for line in _tool("nm", "-D", "--undefined-only", str(OPS)).splitlines()]
    assert not [s for s in undefined if s.startswith(("Py", "_Py"))]
    assert not [s for s in undefined if re.match(r"_ZNK?(St)?(2at|3c10|5torch|8pybind11)", s)]
    used = {s for s in undefined if s.startswith("gdn_")}
    functions = (
        "chunk_forward",
        "chunk_forward_workspace",
        "recurrent",
        "causal_conv1d",
        "gate",
        "rmsnorm_gated",
        "glu",
        "qk_rmsnorm_rope",
    )
    assert used == {"gdn_last_error", *(f"gdn_{name}" for name in functions)}


def test_needed_libraries() -> None:
    needed = re.findall(r"NEEDED.*\[(.*)\]", _tool("readelf", "-d", str(OPS)))
    assert any(name.startswith("libgdn.so") for name in needed) and "libtorch_cpu.so" in needed
    assert not [name for name in needed if "python" in name or "torch_python" in name or name == "libtorch.so"]


def test_one_copy_of_the_library_is_loaded() -> None:
    """ctypes and the operators share one libgdn, hence one thread pool and one gdn_set_num_threads."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc on this system")
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "/libgdn.so" in line}
    assert len(loaded) == 1 and os.path.samefile(loaded.pop(), gdn.library_path())


def test_schemas() -> None:
    """In-place operators say what they change; the others change nothing."""
    mutated = {"chunk_forward_": {"state", "checkpoints"}, "recurrent_": {"state", "snapshots"}}
    mutated |= {"causal_conv1d_": {"state"}}
    for name in (
        "chunk_forward",
        "recurrent",
        "causal_conv1d",
        "gate",
        "rmsnorm_gated",
        "add_rmsnorm",
        "glu",
        "qk_rmsnorm_rope",
        *mutated,
    ):
        schema = getattr(torch.ops.gdn, name).default._schema
        written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        assert written == mutated.get(name, set())
        assert all(r.alias_info is None for r in schema.returns)
