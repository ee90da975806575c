# SPDX-License-Identifier: MIT
"""The implementations of chunk_forward behind one kind of call: prepare(inputs) -> call() -> (o, final state K-first).

libgdn runs through its C ABI on the tensors' addresses; FlashQLA, FlashInfer and FLA through the functions that their
own autograd wrappers call, so that nothing but the operator is timed. What a caller would do once per batch of lengths
(index tables, exp of the gate for FlashInfer, state transposition) is done in prepare().
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpu_common import ROOT, D, Inputs, Results

Call = Callable[[], Results]
SCALE = D**-0.5


@dataclass
class Implementation:
    name: str  # the record's `impl`
    prepare: Callable[[Inputs], Call]
    version: Callable[[Inputs], str]
    limit: int | None = None  # only the first so many length patterns
    failures: int = 0


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """os.environ (and the C library's) with these values."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def capi() -> Any:
    """gdn._capi's struct mirrors (this also checks that GDN_LIBRARY loads)."""
    if str(ROOT / "python") not in sys.path and not os.environ.get("GDN_BENCH_INSTALLED"):
        sys.path.insert(0, str(ROOT / "python"))
    from gdn import _capi

    return _capi


@dataclass
class GdnLibrary:
    """One loaded copy of libgdn. A variant with environment settings gets a copy of its own, so that the settings count
    whether the library reads them at load, at its first plan or at every plan."""

    path: Path
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.api, path = capi(), self.path
        if self.env:
            folder = Path(tempfile.mkdtemp(prefix="gdn-variant-"))
            path = Path(shutil.copy(self.path, folder / f"libgdn-{folder.name}.so"))
        with environment(self.env):
            self.lib = ctypes.CDLL(str(path))
        if self.env:
            shutil.rmtree(path.parent)
        self.lib.gdn_last_error.restype = ctypes.c_char_p
        self.lib.gdn_version.restype = ctypes.c_char_p
        self.lib.gdn_chunk_forward.argtypes = (ctypes.POINTER(self.api.RuleArgs),)
        self.lib.gdn_chunk_forward_workspace.argtypes = (
            ctypes.POINTER(self.api.RuleArgs),
            ctypes.POINTER(ctypes.c_int64),
        )
        self.lib.gdn_explain.argtypes = (
            ctypes.c_int32,
            ctypes.POINTER(self.api.RuleArgs),
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.POINTER(ctypes.c_size_t),
        )

    def check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(self.lib.gdn_last_error().decode())

    def tensor(self, x: torch.Tensor) -> Any:
        api = self.api
        dtypes = {
            torch.float32: api.F32,
            torch.bfloat16: api.BF16,
            torch.float16: api.F16,
            torch.int32: api.I32,
            torch.int64: api.I64,
        }
        view = api.Tensor(x.data_ptr(), api.CUDA if x.is_cuda else api.CPU, max(x.get_device(), 0), dtypes[x.dtype])
        view.ndim = x.dim()
        view.shape[: x.dim()] = list(x.shape)
        view.strides[: x.dim()] = list(x.stride())
        return view


class GdnCall:
    """One prepared call; arguments and outputs are kept."""

    def __init__(self, library: GdnLibrary, impl: str | None, x: Inputs, o_dtype: torch.dtype | None = None) -> None:
        self.gdn, self.x = library, x
        self.o = torch.full_like(x["v"], float("nan"), dtype=o_dtype or x["v"].dtype)
        self.state = torch.full_like(x["h0"], float("nan"))
        args = library.api.RuleArgs(struct_size=ctypes.sizeof(library.api.RuleArgs), scale=SCALE)
        named = {"o": self.o, "initial_state": x["h0"], "final_state": self.state, "cu_seqlens": x["cu_seqlens"]}
        named |= {name: x[name] for name in ("q", "k", "v", "g", "beta")}
        self._views = {name: library.tensor(tensor) for name, tensor in named.items()}
        for name, view in self._views.items():
            setattr(args, name, ctypes.pointer(view))
        if impl:
            args.impl = impl.encode()
        if self.o.is_cuda and not hasattr(args, "stream"):  # else Python would add an attribute that C never sees
            raise RuntimeError(f"{library.api.__file__}: RuleArgs has no field 'stream'; expected that of gdn.h")
        # What an engine knows on the host, and scratch of its own as an engine would have it.
        args.max_seqlen = int(x["cu_seqlens"].diff().max())
        needed = ctypes.c_int64(0)
        with environment(library.env):
            library.check(library.lib.gdn_chunk_forward_workspace(ctypes.byref(args), ctypes.byref(needed)))
        self.workspace = torch.empty(needed.value, dtype=torch.uint8, device=self.o.device)
        if needed.value:
            args.workspace, args.workspace_bytes = self.workspace.data_ptr(), needed.value
        self.args = args

    def __call__(self) -> Results:
        if self.o.is_cuda:
            self.args.stream = torch.cuda.current_stream().cuda_stream
        with environment(self.gdn.env):
            self.gdn.check(self.gdn.lib.gdn_chunk_forward(ctypes.byref(self.args)))
        return self.o, self.state

    def plan(self) -> dict[str, Any]:
        needed = ctypes.c_size_t(0)
        explain, api = self.gdn.lib.gdn_explain, self.gdn.api
        with environment(self.gdn.env):
            self.gdn.check(explain(api.OP_CHUNK_FORWARD, self.args, None, 0, needed))
            buffer = ctypes.create_string_buffer(needed.value)
            self.gdn.check(explain(api.OP_CHUNK_FORWARD, self.args, buffer, needed.value, None))
        return json.loads(buffer.value)


def libgdn(
    path: Path, name: str = "libgdn", impl: str | None = None, env: dict[str, str] | None = None
) -> Implementation:
    library = GdnLibrary(path, env or {})

    def version(x: Inputs) -> str:
        plan = GdnCall(library, impl, x).plan()
        return f"{library.lib.gdn_version().decode()} {plan['impl']}"

    return Implementation(name, lambda x: GdnCall(library, impl, x), version)


def parse_variant(path: Path, text: str) -> Implementation:
    """LABEL[,impl=NAME][,VARIABLE=VALUE]...: recorded as libgdn:LABEL."""
    label, *settings = text.split(",")
    impl, env = None, {}
    for setting in settings:
        key, found, value = setting.partition("=")
        if not found:
            raise ValueError(f"--variant {text}: found {setting!r}, expected impl=NAME or VARIABLE=VALUE")
        if key == "impl":
            impl = value
        else:
            env[key] = value
    return libgdn(path, f"libgdn:{label}", impl, env)


def gdn_torch(path: Path) -> Implementation:
    """The same operator through gdn.torch (its own outputs, torch's dispatcher)."""
    del path  # GDN_LIBRARY names it
    from gdn import torch as gdn_ops

    def prepare(x: Inputs) -> Call:
        tensors = [x[name] for name in ("q", "k", "v", "g", "beta")]
        return lambda: gdn_ops.chunk_forward(
            *tensors,
            scale=SCALE,
            cu_seqlens=x["cu_seqlens"],
            initial_state=x["h0"],
            output_final_state=True,
        )

    return Implementation("libgdn_torch", prepare, lambda x: capi().version())


def _constant(text: str) -> Callable[[Inputs], str]:
    return lambda x: text


def flash_qla() -> Implementation:
    from flash_qla import chunk_gated_delta_rule_fwd

    def prepare(x: Inputs) -> Call:
        positional = [x[name] for name in ("q", "k", "v", "g", "beta")]

        def call() -> Results:
            result = chunk_gated_delta_rule_fwd(*positional, SCALE, x["h0"], x["cu_seqlens"])
            return result[2], result[4]  # (cumulated g, A, o, h, final state, ...)

        return call

    version = importlib.metadata.version
    return Implementation("flash_qla", prepare, _constant(f"{version('flash-qla')} (tilelang {version('tilelang')})"))


def flashinfer() -> Implementation:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    def prepare(x: Inputs) -> Call:
        q, k, v, beta = (x[name][0] for name in ("q", "k", "v", "beta"))
        alpha = x["g"][0].exp()
        state = x["h0"].transpose(-1, -2).contiguous()  # V-first
        longest = int(x["cu_seqlens"].diff().max())

        def call() -> Results:
            o, final = chunk_gated_delta_rule(
                q, k, v, alpha, beta, SCALE, state, True, x["cu_seqlens"], max_seqlen=longest
            )
            return o[None], final.transpose(-1, -2)

        return call

    return Implementation("flashinfer", prepare, _constant(importlib.metadata.version("flashinfer-python")))


def fla() -> Implementation:
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd
    from fla.ops.utils.index import prepare_chunk_indices

    def prepare(x: Inputs) -> Call:
        positional = [x[name] for name in ("q", "k", "v", "g", "beta")]
        cu = x["cu_seqlens"]
        indices = prepare_chunk_indices(cu, 64)

        def call() -> Results:
            result = chunk_gated_delta_rule_fwd(*positional, SCALE, x["h0"], True, cu_seqlens=cu, chunk_indices=indices)
            return result[1], result[3]  # (cumulated g, o, A, final state, ...)

        return call

    version = importlib.metadata.version
    return Implementation("fla", prepare, _constant(f"{version('fla-core')} (triton {version('triton')})"))


PEERS: dict[str, Callable[[], Implementation]] = {"flash_qla": flash_qla, "flashinfer": flashinfer, "fla": fla}
