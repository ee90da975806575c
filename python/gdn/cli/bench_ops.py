# SPDX-License-Identifier: MIT
"""What `gdn bench` measures: prepared calls of every operator, with the work that each one is."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import _capi
from .calls import OPS, Struct, numpy_type
from .device import Mirror, explain_on
from .plan import rule_forms

# Qwen3.5's attention layers, for qk_rmsnorm_rope.
_ROPE = {"q_heads": 16, "kv_heads": 4, "head_dim": 256, "rotary_dim": 64, "theta": 1e7, "sections": (11, 11, 10)}
_CONV_WIDTH = 4


@dataclass
class Workload:
    """One row of the benchmark: calls to rotate over and what one call amounts to."""

    op: str
    label: str
    seqlens: str
    h_k: int
    h_v: int
    dtype: str  # inputs/state
    tokens: int
    heads: int
    flop: float  # 0: not counted, the operator is bound by memory
    bytes: float
    kernel: str
    calls: list[Callable[[], None]] = field(default_factory=list)


def _caller(function: Any, struct: Struct, device: int | None) -> Callable[[], None]:
    if device is not None:
        mirror = Mirror(struct.args, device)
        return lambda: mirror.call(function)
    reference = ctypes.byref(struct.args)

    def call(struct: Struct = struct) -> None:  # the default keeps the arrays alive
        _capi.check(function(reference))

    return call


class Maker:
    """Makes workloads of one set of flags. copies(bytes) is how many sets of buffers a call rotates over; device is the
    number of a GPU, None for the CPU."""

    def __init__(self, args: argparse.Namespace, copies: Callable[[float], int], device: int | None = None) -> None:
        self.args, self._copies, self._device = args, copies, device
        self._rng = np.random.default_rng(1)
        self._type = numpy_type(args.dtype)

    def _normal(self, shape: tuple[int, ...], dtype: Any = None) -> np.ndarray:
        values = self._rng.standard_normal(shape, np.float32)
        return values.astype(self._type if dtype is None else dtype)

    def _fill(self, workload: Workload, function: Any, make: Callable[[], Struct]) -> Workload:
        for _ in range(self._copies(workload.bytes)):
            workload.calls.append(_caller(function, make(), self._device))
        return workload

    def rule(self, op: str, label: str, B: int, T: int, lens: list[int] | None) -> Workload:
        """chunk_forward or recurrent, with an initial state and the final state written in its place."""
        a = self.args
        count = B if lens is None else len(lens)
        dims = (a.K, a.V) if a.state_layout == "k_first" else (a.V, a.K)
        state_type, gate_type = numpy_type(a.state_dtype), numpy_type(a.gate_dtype)
        q, k = self._normal((B, T, a.hk, a.K), np.float32), self._normal((B, T, a.hk, a.K), np.float32)
        k /= np.linalg.norm(k, axis=-1, keepdims=True) + 1e-9
        q /= np.linalg.norm(q, axis=-1, keepdims=True) + 1e-9
        q, k, v = q.astype(self._type), k.astype(self._type), self._normal((B, T, a.hv, a.V))
        g = (-np.logaddexp(0, self._normal((B, T, a.hv), np.float32)) / 16).astype(gate_type)
        beta = self._rng.random((B, T, a.hv), np.float32).astype(gate_type)
        cu_seqlens = None if lens is None else np.cumsum([0, *lens]).astype(np.int64)

        def make() -> Struct:
            state = np.zeros((count, a.hv, *dims), state_type)
            inputs = {name: x.copy() for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))}
            struct = Struct(_capi.RuleArgs, **inputs, cu_seqlens=cu_seqlens, initial_state=state, final_state=state)
            return struct.set(o=np.empty_like(v), num_threads=a.threads, **rule_forms(a))

        tokens = B * T if lens is None else sum(lens)
        state_bytes = 2 * count * a.hv * a.K * a.V * state_type.itemsize
        io = q.nbytes + k.nbytes + 2 * v.nbytes + g.nbytes + beta.nbytes
        plan = explain_on(self._device, OPS[op], make().args)
        if plan.get("impl") is None:
            raise _capi.UnsupportedError(plan["error"])
        workload = Workload(
            op, label, _seqlens(op, B, T, lens), a.hk, a.hv, f"{a.dtype}/{a.state_dtype}", tokens, a.hv,
            6.0 * a.K * a.V * tokens * a.hv, float(state_bytes + io), plan["impl"],
        )  # fmt: skip
        function = _capi.lib.gdn_chunk_forward if op == "chunk_forward" else _capi.lib.gdn_recurrent
        return self._fill(workload, function, make)

    def conv1d(self, label: str, B: int, T: int) -> Workload:
        """causal_conv1d with SiLU on token-major data and a carried state."""
        a = self.args
        channels = 2 * a.hk * a.K + a.hv * a.V
        x, weight = self._normal((B, T, channels)), self._normal((channels, _CONV_WIDTH))

        def make() -> Struct:
            state = np.zeros((B, channels, _CONV_WIDTH - 1), self._type)
            views = {"x": x.copy().transpose(0, 2, 1), "y": np.empty_like(x).transpose(0, 2, 1)}
            return Struct(
                _capi.Conv1dArgs, **views, weight=weight, initial_state=state, final_state=state,
                activation=_capi.ACTIVATIONS["silu"], num_threads=a.threads,
            )  # fmt: skip

        state_bytes = 2 * B * channels * (_CONV_WIDTH - 1) * self._type.itemsize
        workload = self._memory_bound("conv1d", label, B, T, 2 * x.nbytes + weight.nbytes + state_bytes)
        return self._fill(workload, _capi.lib.gdn_causal_conv1d, make)

    def gate(self, label: str, B: int, T: int) -> Workload:
        """g and beta from raw projections."""
        a = self.args
        raw, bias = self._normal((B, T, a.hv)), self._normal((a.hv,), np.float32)

        def make() -> Struct:
            out = {name: np.empty(raw.shape, np.float32) for name in ("g", "beta")}
            return Struct(
                _capi.GateArgs, a=raw.copy(), b=raw.copy(), A_log=bias, dt_bias=bias, **out,
                beta_form=_capi.BETA_FORMS["sigmoid"], num_threads=a.threads,
            )  # fmt: skip

        workload = self._memory_bound("gate", label, B, T, 2 * raw.nbytes + 8 * raw.size)
        return self._fill(workload, _capi.lib.gdn_gate, make)

    def rmsnorm_gated(self, label: str, B: int, T: int) -> Workload:
        """RMSNorm per value head, times SiLU of z."""
        a = self.args
        x, weight = self._normal((B, T, a.hv, a.V)), self._normal((a.V,))

        def make() -> Struct:
            return Struct(
                _capi.RmsnormGatedArgs, x=x.copy(), z=x.copy(), weight=weight, out=np.empty_like(x), eps=1e-6,
                activation=_capi.ACTIVATIONS["silu"], num_threads=a.threads,
            )  # fmt: skip

        return self._fill(
            self._memory_bound("rmsnorm_gated", label, B, T, 3 * x.nbytes), _capi.lib.gdn_rmsnorm_gated, make
        )

    def qk_rmsnorm_rope(self, label: str, B: int, T: int) -> Workload:
        """q/k norm, split of the gate and rotary embedding of a Qwen3.5 attention layer."""
        r = _ROPE
        q = self._normal((B, T, r["q_heads"], 2 * r["head_dim"]))
        k, weight = self._normal((B, T, r["kv_heads"], r["head_dim"])), self._normal((r["head_dim"],))
        positions = np.broadcast_to(np.arange(T), (3, B, T)).copy()

        def make() -> Struct:
            half = (*q.shape[:3], r["head_dim"])
            out = {"q_out": np.empty(half, q.dtype), "gate_out": np.empty(half, q.dtype), "k_out": np.empty_like(k)}
            return Struct(
                _capi.QkRmsnormRopeArgs, q=q.copy(), k=k.copy(), q_weight=weight, k_weight=weight, positions=positions,
                **out, eps=1e-6, theta=r["theta"], rotary_dim=r["rotary_dim"], q_has_gate=1, zero_centered=1,
                mrope_section=(ctypes.c_int32 * 3)(*r["sections"]), num_threads=self.args.threads,
            )  # fmt: skip

        workload = self._memory_bound("qk_rmsnorm_rope", label, B, T, 2 * (q.nbytes + k.nbytes))
        workload.h_k, workload.h_v, workload.heads = r["kv_heads"], r["q_heads"], r["q_heads"]
        return self._fill(workload, _capi.lib.gdn_qk_rmsnorm_rope, make)

    def _memory_bound(self, op: str, label: str, B: int, T: int, num_bytes: float) -> Workload:
        a = self.args
        seqlens = _seqlens(op, B, T, None)
        kernel = f"{op}_{_capi.get_isa()}" if self._device is None else f"{op}_cuda"
        return Workload(op, label, seqlens, a.hk, a.hv, a.dtype, B * T, a.hv, 0.0, float(num_bytes), kernel)


def _seqlens(op: str, B: int, T: int, lens: list[int] | None) -> str:
    """The column of the records: the batch for decode, else the lengths."""
    if op == "recurrent" and T == 1 and lens is None:
        return str(B)
    if lens is None:
        return str(T) if B == 1 else f"{B}x{T}"
    return f"{len(lens)}x{lens[0]}" if len(set(lens)) == 1 else "+".join(map(str, lens))
