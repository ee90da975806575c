# SPDX-License-Identifier: MIT
"""ggml's gated_delta_net and libgdn behind one shape of call; building what the benchmark needs beside libgdn."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build-peers"
GGML_PACKAGE = "llama-cpp-python"
GGML_VERSION = "0.3.36"


def _run(command: list[str], log: Path) -> None:
    with log.open("a") as out:
        code = subprocess.call(command, stdout=out, stderr=subprocess.STDOUT)
    if code != 0:
        raise RuntimeError(f"{' '.join(command[:4])} ... failed with {code}; see {log}")


def build_ggml(sdist: str | None, isas: list[str]) -> list[Path]:
    """Shared libraries with ggml's CPU backend, one per instruction set; ggml's source comes from the sdist."""
    BUILD.mkdir(exist_ok=True)
    log = BUILD / "ggml.log"
    libraries = [BUILD / f"ggml-{isa}" / f"libggml_peer_{isa}.so" for isa in isas]
    if all(path.exists() for path in libraries):
        return libraries
    archive = Path(sdist) if sdist else BUILD / f"{GGML_PACKAGE.replace('-', '_')}-{GGML_VERSION}.tar.gz"
    if not archive.exists():
        print(f"downloading the {GGML_PACKAGE} {GGML_VERSION} sdist", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", GGML_PACKAGE, "-d", str(BUILD)]
        _run([*pip, f"{GGML_PACKAGE}=={GGML_VERSION}"], log)
    source = BUILD / "source"
    if not source.exists():
        with tarfile.open(archive) as tar:
            members = [m for m in tar.getmembers() if "/vendor/llama.cpp/ggml/" in m.name]
            tar.extractall(source, members=members, filter="data")
    ggml = next(source.glob("*/vendor/llama.cpp/ggml"))
    (ggml / "ggml.pc.in").touch()  # configure wants one; the sdist leaves it out
    for isa, path in zip(isas, libraries, strict=True):
        print(f"building ggml for {isa} (log: {log})", flush=True)
        configure = ["cmake", "-S", str(ROOT / "bench" / "ggml"), "-B", str(path.parent)]
        _run([*configure, f"-DGGML_SOURCE_DIR={ggml}", f"-DPEER_ISA={isa}", "-DCMAKE_BUILD_TYPE=Release"], log)
        _run(["cmake", "--build", str(path.parent), "--target", "ggml_peer", "-j", str(os.cpu_count() or 2)], log)
    return libraries


def build_fma_peak() -> Path:
    """The independent ceiling measurement, one static binary for every x86 instruction set."""
    BUILD.mkdir(exist_ok=True)
    binary = BUILD / "fma_peak"
    source = ROOT / "bench" / "cpp" / "fma_peak.cpp"
    if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
        command = ["g++", "-O2", "-std=c++20", "-static", "-pthread", str(source), "-o", str(binary)]
        _run(command, BUILD / "fma_peak.log")
    return binary


def cpu_flags() -> set[str]:
    """Flags of the first CPU in /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


class Ggml:
    """One library with ggml_gated_delta_net (fp32, K = V, tiled heads, V-first state, scale K^-0.5)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lib = ctypes.CDLL(str(path))
        lib.ggml_peer_new.restype = ctypes.c_void_p
        lib.ggml_peer_new.argtypes = [ctypes.c_int32] + [ctypes.c_int64] * 5 + [ctypes.c_void_p] * 7 + [ctypes.c_int32]
        for name in ("ggml_peer_run", "ggml_peer_pause", "ggml_peer_resume", "ggml_peer_free"):
            getattr(lib, name).argtypes = [ctypes.c_void_p]
        self.lib = lib

    @property
    def isa(self) -> str:
        return self.path.stem.rsplit("_", 1)[-1]


class GgmlCall:
    """A graph with one operation per layer; run() computes it with a persistent pool."""

    def __init__(self, ggml: Ggml, threads: int, x: dict[str, np.ndarray], states: list[np.ndarray]) -> None:
        n, t, hk, d = x["q"].shape
        hv = x["v"].shape[2]
        self._lib = ggml.lib
        self.outs = [np.zeros(n * t * hv * d + states[0].size, np.float32) for _ in states]
        pointers = [(ctypes.c_void_p * len(states))(*[a.ctypes.data for a in arrays]) for arrays in (states, self.outs)]
        self._keep = (x, states, pointers)
        data = [x[name].ctypes.data for name in ("q", "k", "v", "g", "beta")]
        addresses = [ctypes.addressof(p) for p in pointers]
        self._handle = self._lib.ggml_peer_new(threads, n, t, hk, hv, d, *data, *addresses, len(states))
        self._shape = (n, t, hv, d)

    def run(self) -> None:
        if self._lib.ggml_peer_run(self._handle) != 0:
            raise RuntimeError("ggml_graph_compute failed")

    def pause(self) -> None:
        """Sends ggml's polling threads to sleep; the next run wakes them."""
        self._lib.ggml_peer_pause(self._handle)

    def result(self, layer: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(o [N, T, Hv, D], state [N, Hv, V, K])."""
        n, _, hv, d = self._shape
        size = int(np.prod(self._shape))
        return self.outs[layer][:size].reshape(self._shape), self.outs[layer][size:].reshape(n, hv, d, d)

    def close(self) -> None:
        self._lib.ggml_peer_free(self._handle)


class GdnCall:
    """One prepared call of libgdn: run() is the bare C function."""

    def __init__(
        self,
        capi: Any,
        op: str,
        threads: int,
        x: dict[str, np.ndarray],
        state: np.ndarray | None,
        head_map: str = "grouped",
        layout: str = "k_first",
        in_place: bool = False,
        impl: str | None = None,
    ) -> None:
        import ml_dtypes

        codes = {
            np.dtype(np.float32): capi.F32,
            np.dtype(ml_dtypes.bfloat16): capi.BF16,
            np.dtype(np.float16): capi.F16,
        }
        self._capi, self._keep = capi, [x, state]
        self.args = capi.RuleArgs()
        self.args.struct_size = ctypes.sizeof(capi.RuleArgs)

        def attach(field: str, array: np.ndarray) -> None:
            t = capi.Tensor()
            t.data, t.device_type, t.dtype, t.ndim = array.ctypes.data, capi.CPU, codes[array.dtype], array.ndim
            for i in range(array.ndim):
                t.shape[i], t.strides[i] = array.shape[i], array.strides[i] // array.itemsize
            self._keep.append(t)
            setattr(self.args, field, ctypes.pointer(t))

        for name in ("q", "k", "v", "g", "beta"):
            attach(name, x[name])
        self.o = np.zeros(x["v"].shape, x["v"].dtype)
        attach("o", self.o)
        n, _, hv, d_v = x["v"].shape
        d_k = x["k"].shape[3]
        dims = (d_k, d_v) if layout == "k_first" else (d_v, d_k)
        if state is not None:
            attach("initial_state", state)
        self.final = state if in_place else np.zeros((n, hv, *dims), np.float32)
        attach("final_state", self.final)
        self.args.head_map = capi.HEAD_MAPS[head_map]
        self.args.state_layout = capi.STATE_LAYOUTS[layout]
        self.args.num_threads = threads
        self.args.impl = impl.encode() if impl else None
        self._op = capi.OP_CHUNK_FORWARD if op == "chunk_forward" else capi.OP_RECURRENT
        function = capi.lib.gdn_chunk_forward if op == "chunk_forward" else capi.lib.gdn_recurrent
        reference = ctypes.byref(self.args)
        self.call = lambda: function(reference)
        self.plan = capi.explain(self._op, self.args)

    def run(self) -> None:
        if self.call() != 0:
            self._capi.check(self.call())
