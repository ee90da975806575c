# SPDX-License-Identifier: MIT
"""The operators on NumPy arrays and on anything with DLPack, the buffer protocol or ``__array_interface__``.

No torch is needed. Strides are honoured, nothing is copied, and every function writes to ``out=`` (or the output
arguments it names) or allocates NumPy arrays. bfloat16 arrays are those of ``ml_dtypes``. Wrong arguments raise
:class:`gdn.InvalidArgumentError` (a ``ValueError``), refusals :class:`gdn.UnsupportedError` (a
``NotImplementedError``). B batch, T tokens, Hk / Hv key / value heads, K / V key / value dimension, N sequences.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _capi
from ._capi import choice
from ._views import Views, numpy_dtype

__all__ = [
    "add_rmsnorm",
    "causal_conv1d",
    "chunk_forward",
    "gate",
    "glu",
    "qk_rmsnorm_rope",
    "recurrent",
    "rmsnorm_gated",
]


def _allocate(shape: Sequence[int], dtype: int) -> np.ndarray:
    return np.empty(tuple(shape), numpy_dtype(dtype))


def _need_rank(function: str, argument: str, view: Any, rank: int, expected: str) -> None:
    found = view.contents.ndim
    if found != rank:
        raise _capi.InvalidArgumentError(
            f"{function}: argument '{argument}': found {found} dimensions, expected {expected}"
        )


def _num_sequences(cu_seqlens: Any, batch: int) -> int:
    if cu_seqlens is None:
        return batch
    return max(cu_seqlens.contents.shape[0] - 1, 0)


def _rule(
    function: str,
    call: Any,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    A_log: Any = None,
    dt_bias: Any = None,
    gate: str = "log",
    beta_form: str = "value",
    head_map: str = "grouped",
    scale: float | None = None,
    qk_l2norm: bool = False,
    l2norm_eps: float = 1e-6,
    cu_seqlens: Any = None,
    state_layout: str = "k_first",
    null_slots: str = "negative",
    initial_state: Any = None,
    initial_state_indices: Any = None,
    has_initial_state: Any = None,
    output_final_state: bool = False,
    final_state: Any = None,
    final_state_indices: Any = None,
    token_state_indices: Any = None,
    num_accepted: Any = None,
    snapshots: Any = None,
    checkpoints: Any = None,
    checkpoint_indices: Any = None,
    checkpoint_every: int = 0,
    round_qk: bool = False,
    round_beta: bool = False,
    batch_invariant: bool = False,
    num_threads: int = 0,
    impl: str | None = None,
    out: Any = None,
) -> tuple[Any, Any]:
    views = Views(function)
    args = _capi.RuleArgs(struct_size=ctypes.sizeof(_capi.RuleArgs))
    args.q = views.required("q", q)
    args.k = views.required("k", k)
    args.v = views.required("v", v)
    args.g = views.read("g", g)
    args.beta = views.read("beta", beta)
    args.A_log = views.read("A_log", A_log)
    args.dt_bias = views.read("dt_bias", dt_bias)
    args.gate_form = choice(function, "gate", gate, _capi.GATE_FORMS)
    args.beta_form = choice(function, "beta_form", beta_form, _capi.BETA_FORMS)
    args.head_map = choice(function, "head_map", head_map, _capi.HEAD_MAPS)
    args.state_layout = choice(function, "state_layout", state_layout, _capi.STATE_LAYOUTS)
    args.null_slots = choice(function, "null_slots", null_slots, _capi.NULL_SLOTS)
    if scale is not None and abs(scale) <= 2.0**-150:  # 0 in fp32
        raise _capi.InvalidArgumentError(
            f"{function}: argument 'scale': found {scale}, expected None or a number that is not 0 in fp32"
        )
    args.scale = 0.0 if scale is None else scale
    args.qk_l2norm, args.l2norm_eps = int(qk_l2norm), l2norm_eps
    cu = views.read("cu_seqlens", cu_seqlens)
    args.cu_seqlens = cu
    args.initial_state = views.read("initial_state", initial_state)
    args.initial_state_indices = views.read("initial_state_indices", initial_state_indices)
    args.has_initial_state = views.read("has_initial_state", has_initial_state)
    args.final_state_indices = views.read("final_state_indices", final_state_indices)
    args.token_state_indices = views.read("token_state_indices", token_state_indices)
    args.num_accepted = views.read("num_accepted", num_accepted)
    args.snapshots = views.write("snapshots", snapshots)
    args.checkpoints = views.write("checkpoints", checkpoints)
    args.checkpoint_indices = views.read("checkpoint_indices", checkpoint_indices)
    args.checkpoint_every = checkpoint_every
    args.round_qk, args.round_beta = int(round_qk), int(round_beta)
    args.batch_invariant, args.num_threads = int(batch_invariant), num_threads
    args.impl = None if impl is None else impl.encode()

    _need_rank(function, "q", args.q, 4, "[B, T, Hk, K]")
    _need_rank(function, "v", args.v, 4, "[B, T, Hv, V]")
    q_shape, v_shape = args.q.contents.shape, args.v.contents.shape
    v_dtype = args.v.contents.dtype
    if out is None:
        out = _allocate(v_shape[:4], v_dtype)
        if cu is not None:  # rows past cu_seqlens[N] are not written
            out[...] = 0
    args.o = views.write("out", out)
    if final_state is None and output_final_state:
        k_dim, v_dim = q_shape[3], v_shape[3]
        state = (k_dim, v_dim) if state_layout == "k_first" else (v_dim, k_dim)
        final_state = np.zeros(  # zeros: null sequences are not written
            (_num_sequences(cu, q_shape[0]), v_shape[2], *state),
            np.float64 if v_dtype == _capi.F64 else np.float32,
        )
    args.final_state = views.write("final_state", final_state)
    _capi.check(call(ctypes.byref(args)))
    return out, final_state


def chunk_forward(q: Any, k: Any, v: Any, g: Any = None, beta: Any = None, **options: Any) -> tuple[Any, Any]:
    """Gated delta rule over whole sequences (prefill).

    Args:
        q, k: ``[B, T, Hk, K]``; v: ``[B, T, Hv, V]``; g, beta: ``[B, T, Hv]`` or None (no decay, beta = 1).
        **options: ``A_log``, ``dt_bias`` ``[Hv]`` with ``gate="raw"``; ``gate`` log | linear | raw; ``beta_form``
            value | sigmoid | sigmoid2; ``head_map`` grouped | tiled; ``scale`` (None: K^-0.5); ``qk_l2norm``,
            ``l2norm_eps``; ``cu_seqlens`` ``[N+1]`` int32/int64; ``state_layout`` k_first | v_first; ``initial_state``
            ``[N or slots, Hv, K, V]`` with ``initial_state_indices`` ``[N]``, ``has_initial_state`` ``[N]``,
            ``null_slots`` negative | non_positive; ``output_final_state``; ``final_state`` (an output array, may be
            ``initial_state`` itself) with ``final_state_indices``; ``checkpoints``, ``checkpoint_indices``,
            ``checkpoint_every``; ``round_qk``, ``round_beta``; ``batch_invariant``; ``num_threads``; ``impl``; ``out``
            ``[B, T, Hv, V]``.

    Returns:
        ``(o, final_state)``: o ``[B, T, Hv, V]`` in v's dtype; final_state float32, or None when not asked for.
    """
    return _rule("chunk_forward", _capi.lib.gdn_chunk_forward, q, k, v, g, beta, **options)


def recurrent(q: Any, k: Any, v: Any, g: Any = None, beta: Any = None, **options: Any) -> tuple[Any, Any]:
    """Gated delta rule token by token (decode, multi-token verify).

    Takes what :func:`chunk_forward` takes, and ``token_state_indices`` ``[N, S]`` with ``num_accepted`` ``[N]``, or
    ``snapshots`` ``[N, S, Hv, K, V]``. Decode in place: pass one array as ``initial_state`` and ``final_state``.
    """
    return _rule("recurrent", _capi.lib.gdn_recurrent, q, k, v, g, beta, **options)


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    cu_seqlens: Any = None,
    initial_state: Any = None,
    initial_state_indices: Any = None,
    has_initial_state: Any = None,
    final_state: Any = None,
    final_state_indices: Any = None,
    num_accepted: Any = None,
    null_slots: str = "negative",
    num_threads: int = 0,
    out: Any = None,
) -> Any:
    """Causal depthwise convolution, prefill and update alike.

    Args:
        x: ``[B, D, T]`` (any strides: token-major data is a transposed view); weight ``[D, W]``; bias ``[D]``.
        activation: None or ``"silu"``.
        initial_state: ``[N or slots, D, L]``, L >= W - 1; final_state: an output array, may be initial_state itself.

    Returns:
        y ``[B, D, T]`` in x's dtype.
    """
    function = "causal_conv1d"
    views = Views(function)
    args = _capi.Conv1dArgs(struct_size=ctypes.sizeof(_capi.Conv1dArgs))
    args.x = views.required("x", x)
    args.weight = views.required("weight", weight)
    args.bias = views.read("bias", bias)
    args.cu_seqlens = views.read("cu_seqlens", cu_seqlens)
    args.initial_state = views.read("initial_state", initial_state)
    args.initial_state_indices = views.read("initial_state_indices", initial_state_indices)
    args.has_initial_state = views.read("has_initial_state", has_initial_state)
    args.final_state = views.write("final_state", final_state)
    args.final_state_indices = views.read("final_state_indices", final_state_indices)
    args.num_accepted = views.read("num_accepted", num_accepted)
    args.activation = choice(function, "activation", activation, _capi.ACTIVATIONS)
    args.null_slots = choice(function, "null_slots", null_slots, _capi.NULL_SLOTS)
    args.num_threads = num_threads
    _need_rank(function, "x", args.x, 3, "[B, D, T]")
    if out is None:
        view = args.x.contents
        batch, dim, tokens = view.shape[:3]
        if view.strides[1] < view.strides[2]:
            out = _allocate((batch, tokens, dim), view.dtype).transpose(0, 2, 1)
        else:
            out = _allocate((batch, dim, tokens), view.dtype)
        if cu_seqlens is not None:  # columns past cu_seqlens[N] are not written
            out[...] = 0
    args.y = views.write("out", out)
    _capi.check(_capi.lib.gdn_causal_conv1d(ctypes.byref(args)))
    return out


def gate(
    a: Any = None,
    b: Any = None,
    A_log: Any = None,
    dt_bias: Any = None,
    *,
    form: str = "log",
    beta_form: str = "sigmoid",
    num_threads: int = 0,
    g: Any = None,
    beta: Any = None,
) -> tuple[Any, Any]:
    """g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b) (or 2 sigmoid(b)).

    Args:
        a, b: ``[.., Hv]`` or None; A_log, dt_bias: ``[Hv]``; form: ``"log"`` or ``"linear"`` (exp g).
        g, beta: output arrays; allocated as float32 when None.

    Returns:
        ``(g, beta)``, None where the input is None.
    """
    views = Views("gate")
    args = _capi.GateArgs(struct_size=ctypes.sizeof(_capi.GateArgs))
    args.a, args.b = views.read("a", a), views.read("b", b)
    args.A_log, args.dt_bias = views.read("A_log", A_log), views.read("dt_bias", dt_bias)
    if g is None and a is not None:
        g = _allocate(args.a.contents.shape[: args.a.contents.ndim], _capi.F32)
    if beta is None and b is not None:
        beta = _allocate(args.b.contents.shape[: args.b.contents.ndim], _capi.F32)
    args.g, args.beta = views.write("g", g), views.write("beta", beta)
    args.gate_form = choice("gate", "form", form, {"log": 0, "linear": 1})
    args.beta_form = choice("gate", "beta_form", beta_form, {"sigmoid": 1, "sigmoid2": 2})
    args.num_threads = num_threads
    _capi.check(_capi.lib.gdn_gate(ctypes.byref(args)))
    return g, beta


def rmsnorm_gated(
    x: Any,
    z: Any = None,
    weight: Any = None,
    *,
    eps: float = 1e-6,
    activation: str | None = "silu",
    gate_first: bool = False,
    zero_centered: bool = False,
    round_before_weight: bool = False,
    num_threads: int = 0,
    out: Any = None,
) -> Any:
    """RMSNorm of the last dimension times weight (1 + weight if zero_centered) times act(z).

    Args:
        x, z: ``[.., D]``, rank 1 to 4; z None: no gate; weight: ``[D]`` or None; activation: silu or sigmoid.

    Returns:
        ``out``, of x's shape and dtype.
    """
    function = "rmsnorm_gated"
    views = Views(function)
    args = _capi.RmsnormGatedArgs(struct_size=ctypes.sizeof(_capi.RmsnormGatedArgs))
    args.x = views.required("x", x)
    args.z, args.weight = views.read("z", z), views.read("weight", weight)
    if out is None:
        out = _allocate(args.x.contents.shape[: args.x.contents.ndim], args.x.contents.dtype)
    args.out = views.write("out", out)
    args.eps = eps
    args.activation = 0 if z is None else choice(function, "activation", activation, _capi.ACTIVATIONS)
    args.gate_first, args.zero_centered = int(gate_first), int(zero_centered)
    args.round_before_weight, args.num_threads = int(round_before_weight), num_threads
    _capi.check(_capi.lib.gdn_rmsnorm_gated(ctypes.byref(args)))
    return out


def add_rmsnorm(
    x: Any,
    residual: Any,
    weight: Any = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    num_threads: int = 0,
    out: Any = None,
    residual_out: Any = None,
) -> tuple[Any, Any]:
    """RMSNorm of x + residual, times weight (1 + weight if zero_centered), and the sum itself.

    Args:
        x, residual: ``[.., D]``, rank 1 to 4; weight: ``[D]`` or None; residual_out may be residual itself.

    Returns:
        ``(out, residual_out)``, of x's shape and dtype; the sum is rounded to residual_out's dtype before the norm.
    """
    views = Views("rmsnorm_gated")
    args = _capi.RmsnormGatedArgs(struct_size=ctypes.sizeof(_capi.RmsnormGatedArgs))
    args.x = views.required("x", x)
    args.residual, args.weight = views.required("residual", residual), views.read("weight", weight)
    shape, dtype = args.x.contents.shape[: args.x.contents.ndim], args.x.contents.dtype
    out = _allocate(shape, dtype) if out is None else out
    residual_out = _allocate(shape, dtype) if residual_out is None else residual_out
    args.out, args.residual_out = views.write("out", out), views.write("residual_out", residual_out)
    args.eps, args.zero_centered, args.num_threads = eps, int(zero_centered), num_threads
    _capi.check(_capi.lib.gdn_rmsnorm_gated(ctypes.byref(args)))
    return out, residual_out


def glu(x: Any, z: Any, *, activation: str = "silu", num_threads: int = 0, out: Any = None) -> Any:
    """x * act(z): SwiGLU (x = up, z = gate), and with ``activation="sigmoid"`` an attention layer's output gate.

    Args:
        x, z: ``[.., D]``, rank 1 to 4.

    Returns:
        ``out``, of x's shape and dtype.
    """
    views = Views("glu")
    args = _capi.GluArgs(struct_size=ctypes.sizeof(_capi.GluArgs))
    args.x, args.z = views.required("x", x), views.required("z", z)
    if out is None:
        out = _allocate(args.x.contents.shape[: args.x.contents.ndim], args.x.contents.dtype)
    args.out = views.write("out", out)
    args.activation = choice("glu", "activation", activation, _capi.GLU_ACTIVATIONS)
    args.num_threads = num_threads
    _capi.check(_capi.lib.gdn_glu(ctypes.byref(args)))
    return out


def qk_rmsnorm_rope(
    q: Any,
    k: Any,
    q_weight: Any = None,
    k_weight: Any = None,
    *,
    cos: Any = None,
    sin: Any = None,
    positions: Any = None,
    eps: float = 1e-6,
    theta: float = 0.0,
    rotary_dim: int = 0,
    mrope_section: Sequence[int] = (0, 0, 0),
    q_has_gate: bool = False,
    zero_centered: bool = False,
    num_threads: int = 0,
    q_out: Any = None,
    k_out: Any = None,
    gate_out: Any = None,
) -> tuple[Any, Any, Any]:
    """RMSNorm per head, then NeoX rotary embedding of the first R channels, of an attention layer's q and k.

    Args:
        q: ``[B, T, Hq, D]``, or ``[B, T, Hq, 2D]`` (q then gate) with q_has_gate; k: ``[B, T, Hkv, D]``.
        cos, sin: ``[B or 1, T, R]``; or positions ``[B or 1, T]`` / ``[3, B or 1, T]`` with theta and rotary_dim.

    Returns:
        ``(q_out, k_out, gate_out)``; gate_out is None without q_has_gate.
    """
    function = "qk_rmsnorm_rope"
    views = Views(function)
    args = _capi.QkRmsnormRopeArgs(struct_size=ctypes.sizeof(_capi.QkRmsnormRopeArgs))
    args.q, args.k = views.required("q", q), views.required("k", k)
    args.q_weight, args.k_weight = views.read("q_weight", q_weight), views.read("k_weight", k_weight)
    args.cos, args.sin = views.read("cos", cos), views.read("sin", sin)
    args.positions = views.read("positions", positions)
    _need_rank(function, "q", args.q, 4, "[B, T, Hq, D]")
    _need_rank(function, "k", args.k, 4, "[B, T, Hkv, D]")
    q_view, k_view = args.q.contents, args.k.contents
    q_shape = (*q_view.shape[:3], k_view.shape[3])
    q_out = _allocate(q_shape, q_view.dtype) if q_out is None else q_out
    k_out = _allocate(k_view.shape[:4], k_view.dtype) if k_out is None else k_out
    if q_has_gate and gate_out is None:
        gate_out = _allocate(q_shape, q_view.dtype)
    args.q_out, args.k_out = views.write("q_out", q_out), views.write("k_out", k_out)
    args.gate_out = views.write("gate_out", gate_out)
    args.eps, args.theta, args.rotary_dim = eps, theta, rotary_dim
    args.mrope_section = (ctypes.c_int32 * 3)(*mrope_section)
    args.q_has_gate, args.zero_centered, args.num_threads = int(q_has_gate), int(zero_centered), num_threads
    _capi.check(_capi.lib.gdn_qk_rmsnorm_rope(ctypes.byref(args)))
    return q_out, k_out, gate_out
