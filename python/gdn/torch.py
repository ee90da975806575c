# SPDX-License-Identifier: MIT
"""The operators on torch tensors. They work under torch.compile(fullgraph=True) and allocate only their results.

CPU tensors, or CUDA tensors of one device where libgdn has its CUDA backend. A call on CUDA tensors is launched on
PyTorch's current stream of their device (which need not be the current device), synchronises nothing, and can be
captured in a CUDA graph. Index tensors (cu_seqlens and those that end in _indices, has_initial_state, num_accepted,
positions) that are on the CPU are copied to the device of the data first, without a wait; that copy cannot be part of a
graph, and it is the only one: every other tensor must be where the data is. Their contents are not read on the host:
on a GPU an entry that is out of range counts as null (GDN_CHECK=1 in the environment checks them and waits).

Shapes: B batch, T tokens, Hk / Hv key / value heads (Hv a multiple of Hk), K / V key / value dimension, N sequences
(B, or len(cu_seqlens) - 1). Inputs are float32, bfloat16 or float16 in any mixture and with any strides; states are
float32, bfloat16 or float16. The forward pass only: an input that requires grad is refused in grad mode.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _capi, _fake
from ._capi import ACTIVATIONS, BETA_FORMS, GATE_FORMS, GLU_ACTIVATIONS, HEAD_MAPS, NULL_SLOTS, STATE_LAYOUTS, choice

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


def _load() -> None:
    path = os.environ.get("GDN_TORCH_OPS") or str(Path(__file__).resolve().parent / "_torch_ops.so")
    if not os.path.exists(path):
        raise ImportError(
            f"gdn: {path} does not exist: torch was not installed when this package was built. Install torch >= 2.11, "
            "then reinstall gdn with --no-build-isolation"
        )
    torch.ops.load_library(path)
    _fake.register()


_load()
_chunk_forward = torch.ops.gdn.chunk_forward.default
_chunk_forward_ = torch.ops.gdn.chunk_forward_.default
_recurrent = torch.ops.gdn.recurrent.default
_recurrent_ = torch.ops.gdn.recurrent_.default
_causal_conv1d = torch.ops.gdn.causal_conv1d.default
_causal_conv1d_ = torch.ops.gdn.causal_conv1d_.default
_gate = torch.ops.gdn.gate.default
_rmsnorm_gated = torch.ops.gdn.rmsnorm_gated.default
_add_rmsnorm = torch.ops.gdn.add_rmsnorm.default
_glu = torch.ops.gdn.glu.default
_qk_rmsnorm_rope = torch.ops.gdn.qk_rmsnorm_rope.default


def _refuse_grad(function: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise _capi.UnsupportedError(
                f"gdn: backward is not implemented yet; {function}: argument '{name}' requires grad: call it under "
                "torch.no_grad() or torch.inference_mode(), or detach the input"
            )


def _translate(error: Exception) -> NoReturn:
    """The operators throw C++ standard exceptions; here they become gdn's own, with the same message."""
    message = str(error)
    if isinstance(error, _capi.Error):
        raise error
    if isinstance(error, MemoryError):
        raise _capi.OutOfMemoryError("gdn: scratch memory could not be allocated") from None
    if isinstance(error, ValueError):
        raise _capi.InvalidArgumentError(message) from None
    if message.startswith("unsupported: "):
        raise _capi.UnsupportedError(message.removeprefix("unsupported: ")) from None
    if message.startswith("internal: "):
        raise _capi.InternalError(message.removeprefix("internal: ")) from None
    raise error


# The named options of the rule, packed as csrc/torch_ops.cpp unpacks them.
_MODES = {
    (gate, beta, heads, layout, null): a | b << 2 | c << 4 | d << 5 | e << 6
    for gate, a in GATE_FORMS.items()
    for beta, b in BETA_FORMS.items()
    for heads, c in HEAD_MAPS.items()
    for layout, d in STATE_LAYOUTS.items()
    for null, e in NULL_SLOTS.items()
}


def _refuse_mode(function: str, gate: Any, beta_form: Any, head_map: Any, state_layout: Any, null_slots: Any) -> None:
    choice(function, "gate", gate, GATE_FORMS)
    choice(function, "beta_form", beta_form, BETA_FORMS)
    choice(function, "head_map", head_map, HEAD_MAPS)
    choice(function, "state_layout", state_layout, STATE_LAYOUTS)
    choice(function, "null_slots", null_slots, NULL_SLOTS)


def _scale(function: str, scale: float | None) -> float:
    if scale is None:
        return 0.0
    if scale is not None and abs(scale) <= 2.0**-150:  # 0 in fp32
        raise _capi.InvalidArgumentError(
            f"{function}: argument 'scale': found {scale}, expected None or a number that is not 0 in fp32"
        )
    return float(scale)


def _split_tokens(function: str, split: str | int) -> int:
    if split == "off":
        return 0
    if isinstance(split, int) and not isinstance(split, bool):
        return split
    raise _capi.InvalidArgumentError(
        f"{function}: argument 'split': found {split!r}, expected 'auto', 'off' or a number of tokens"
    )


def chunk_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate: str = "log",
    beta_form: str = "value",
    head_map: str = "grouped",
    scale: float | None = None,
    qk_l2norm: bool = False,
    l2norm_eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    output_final_state: bool = False,
    inplace: bool = False,
    final_state_indices: Tensor | None = None,
    checkpoints: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    checkpoint_every: int = 0,
    state_layout: str = "k_first",
    null_slots: str = "negative",
    round_qk: bool = False,
    round_beta: bool = False,
    batch_invariant: bool = False,
    max_seqlen: int = 0,
    split: str | int = "auto",
    split_exact: bool = False,
    split_threshold: float = 0.0,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over whole sequences (prefill).

    Args:
        q, k: ``[B, T, Hk, K]``; v: ``[B, T, Hv, V]``; g, beta: ``[B, T, Hv]`` or None (no decay; beta = 1).
        A_log, dt_bias: ``[Hv]``, with ``gate="raw"`` (g is then the raw input a).
        gate: ``"log"`` (g), ``"linear"`` (exp g) or ``"raw"``; beta_form: ``"value"``, ``"sigmoid"`` or ``"sigmoid2"``.
        head_map: ``"grouped"`` (key head h // (Hv / Hk)) or ``"tiled"`` (h % Hk).
        scale: None for K^-0.5.
        cu_seqlens: ``[N + 1]`` int32 or int64; B must be 1 then. Rows of o past its last entry are zero.
        max_seqlen: its longest sequence if the caller knows it, 0 if not: on a GPU the work is then spread better (the
            lengths are not read on the host). It may change where sequences are split, hence bits, no more.
        split: whether long sequences may be cut into segments that a GPU computes side by side: ``"auto"``, ``"off"``,
            or the segments' length, a multiple of 64. Without split_exact what a head's gates shrink below
            exp(-split_threshold) (0.0: 10) is not carried from one segment to the next.
        initial_state: ``[N, Hv, K, V]`` (``[N, Hv, V, K]`` with ``state_layout="v_first"``), or a pool
            ``[slots, ...]`` with ``initial_state_indices`` ``[N]``; has_initial_state ``[N]``: 0 starts from zeros.
        inplace: the final states are written to initial_state (rows final_state_indices, else the rows read).
        checkpoints: ``[M or slots, Hv, K, V]``, written in place every checkpoint_every tokens (inplace only).

    Returns:
        ``(o, final_state)``: o ``[B, T, Hv, V]`` in v's dtype; final_state float32 ``[N, Hv, K, V]``, initial_state
        itself if inplace, None if neither was asked for.
    """
    if torch.is_grad_enabled():
        _refuse_grad(
            "chunk_forward", q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state
        )
    mode = _MODES.get((gate, beta_form, head_map, state_layout, null_slots))
    if mode is None:
        _refuse_mode("chunk_forward", gate, beta_form, head_map, state_layout, null_slots)
    split_tokens = 0 if split == "auto" else _split_tokens("chunk_forward", split)
    flags = mode | qk_l2norm << 7 | batch_invariant << 8 | round_qk << 9 | round_beta << 10
    flags |= (split == "off") << 11 | split_exact << 12
    options = (_scale("chunk_forward", scale), l2norm_eps, flags, impl, max_seqlen, split_tokens, split_threshold)
    if q.is_cuda:
        cu_seqlens, initial_state_indices, has_initial_state, final_state_indices, checkpoint_indices = _to_device(
            q, cu_seqlens, initial_state_indices, has_initial_state, final_state_indices, checkpoint_indices
        )
    inputs = (q, k, v, g, beta, A_log, dt_bias, cu_seqlens)
    if not inplace:
        _only_inplace("chunk_forward", final_state_indices=final_state_indices, checkpoints=checkpoints)
    elif initial_state is None:
        _need_state("chunk_forward")
    try:
        if inplace:
            o = _chunk_forward_(
                *inputs, initial_state, initial_state_indices, final_state_indices, has_initial_state, checkpoints,
                checkpoint_indices, checkpoint_every, *options,
            )  # fmt: skip
            return o, initial_state
        o, final_state = _chunk_forward(
            *inputs, initial_state, initial_state_indices, has_initial_state, output_final_state, *options
        )
    except (RuntimeError, ValueError, MemoryError) as error:
        _translate(error)
    return o, final_state if output_final_state else None


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate: str = "log",
    beta_form: str = "value",
    head_map: str = "grouped",
    scale: float | None = None,
    qk_l2norm: bool = False,
    l2norm_eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    output_final_state: bool = False,
    inplace: bool = False,
    final_state_indices: Tensor | None = None,
    token_state_indices: Tensor | None = None,
    num_accepted: Tensor | None = None,
    snapshots: Tensor | None = None,
    commit: bool = True,
    state_layout: str = "k_first",
    null_slots: str = "negative",
    round_qk: bool = False,
    round_beta: bool = False,
    batch_invariant: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule token by token: decode (T = 1) and multi-token verify. Arguments as in :func:`chunk_forward`.

    With ``inplace=True`` initial_state (a state or a pool) is updated without a copy, and additionally:

        token_state_indices: ``[N, S]``, the state after token t goes to slot ``[n, t]``; num_accepted ``[N]``: sequence
            n starts from slot ``[n, num_accepted[n] - 1]``.
        snapshots: ``[N, S, Hv, K, V]``, written with the state after each token.
        commit: False leaves the pool untouched (with snapshots).
    """
    if torch.is_grad_enabled():
        _refuse_grad(
            "recurrent", q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state
        )
    mode = _MODES.get((gate, beta_form, head_map, state_layout, null_slots))
    if mode is None:
        _refuse_mode("recurrent", gate, beta_form, head_map, state_layout, null_slots)
    flags = mode | qk_l2norm << 7 | batch_invariant << 8 | round_qk << 9 | round_beta << 10
    options = (_scale("recurrent", scale), l2norm_eps, flags, impl)
    if q.is_cuda:
        cu_seqlens, initial_state_indices, has_initial_state, final_state_indices = _to_device(
            q, cu_seqlens, initial_state_indices, has_initial_state, final_state_indices
        )
        token_state_indices, num_accepted = _to_device(q, token_state_indices, num_accepted)
    inputs = (q, k, v, g, beta, A_log, dt_bias, cu_seqlens)
    if not inplace:
        _only_inplace(
            "recurrent",
            final_state_indices=final_state_indices,
            token_state_indices=token_state_indices,
            num_accepted=num_accepted,
            snapshots=snapshots,
        )
    elif initial_state is None:
        _need_state("recurrent")
    try:
        if inplace:
            o = _recurrent_(
                *inputs, initial_state, initial_state_indices, final_state_indices, has_initial_state,
                token_state_indices, num_accepted, snapshots, commit, *options,
            )  # fmt: skip
            return o, initial_state
        o, final_state = _recurrent(
            *inputs, initial_state, initial_state_indices, has_initial_state, output_final_state, *options
        )
    except (RuntimeError, ValueError, MemoryError) as error:
        _translate(error)
    return o, final_state if output_final_state else None


def _to_device(data: Tensor, *indices: Tensor | None) -> tuple[Tensor | None, ...]:
    """Index tensors of a call on CUDA data: those on the CPU are copied to the device, on the current stream."""
    return tuple(
        t.to(data.device, non_blocking=True) if t is not None and t.device.type == "cpu" else t for t in indices
    )


def _only_inplace(function: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise _capi.InvalidArgumentError(
                f"{function}: argument '{name}': found a tensor with inplace=False, expected None, or inplace=True"
            )


def _need_state(function: str) -> NoReturn:
    raise _capi.InvalidArgumentError(
        f"{function}: argument 'initial_state': found None with inplace=True, expected the state or pool to update"
    )


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    final_state_len: int = 0,
    inplace: bool = False,
    final_state_indices: Tensor | None = None,
    num_accepted: Tensor | None = None,
    null_slots: str = "negative",
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution; one function for prefill and update.

    Args:
        x: ``[B, D, T]`` with any strides (token-major data is a transposed view and gives a token-major y).
        weight: ``[D, W]``; bias: ``[D]``; activation: None or ``"silu"``.
        initial_state: ``[N or slots, D, L]``, L >= W - 1, newest input last.
        final_state_len: L of the returned state; 0: none. With inplace the new state goes to initial_state instead.

    Returns:
        ``(y, final_state)``: y ``[B, D, T]`` in x's dtype; final_state in x's dtype, initial_state if inplace, or None.
    """
    if torch.is_grad_enabled():
        _refuse_grad("causal_conv1d", x=x, weight=weight, bias=bias, initial_state=initial_state)
    act = choice("causal_conv1d", "activation", activation, ACTIVATIONS)
    null = choice("causal_conv1d", "null_slots", null_slots, NULL_SLOTS)
    if x.is_cuda:
        cu_seqlens, initial_state_indices, has_initial_state, final_state_indices, num_accepted = _to_device(
            x, cu_seqlens, initial_state_indices, has_initial_state, final_state_indices, num_accepted
        )
    if not inplace:
        _only_inplace("causal_conv1d", final_state_indices=final_state_indices, num_accepted=num_accepted)
    elif initial_state is None:
        _need_state("causal_conv1d")
    try:
        if inplace:
            y = _causal_conv1d_(
                x, weight, bias, cu_seqlens, initial_state, initial_state_indices, final_state_indices,
                has_initial_state, num_accepted, act, null,
            )  # fmt: skip
            return y, initial_state
        y, final_state = _causal_conv1d(
            x, weight, bias, cu_seqlens, initial_state, initial_state_indices, has_initial_state, final_state_len, act,
            null,
        )  # fmt: skip
    except (RuntimeError, ValueError, MemoryError) as error:
        _translate(error)
    return y, final_state if final_state_len > 0 else None


def gate(
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    *,
    form: str = "log",
    beta_form: str = "sigmoid",
) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b) (or 2 sigmoid(b)), float32.

    Args:
        a, b: ``[.., Hv]``; A_log, dt_bias: ``[Hv]``; form: ``"log"`` or ``"linear"`` (exp g).
    """
    if torch.is_grad_enabled():
        _refuse_grad("gate", a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    gate_form = choice("gate", "form", form, {"log": 0, "linear": 1})
    beta = choice("gate", "beta_form", beta_form, {"sigmoid": 1, "sigmoid2": 2})
    try:
        return _gate(a, b, A_log, dt_bias, gate_form, beta)
    except (RuntimeError, ValueError, MemoryError) as error:
        _translate(error)


def rmsnorm_gated(
    x: Tensor,
    z: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    activation: str | None = "silu",
    gate_first: bool = False,
    zero_centered: bool = False,
    round_before_weight: bool = False,
) -> Tensor:
    """RMSNorm of the last dimension, times weight (1 + weight if zero_centered), times act(z).

    Args:
        x, z: ``[.., D]``, rank 1 to 4; z None: no gate; weight: ``[D]`` or None; activation: silu or sigmoid.
        gate_first: the norm is taken of x * act(z); round_before_weight: Transformers' rounding.
    """
    if torch.is_grad_enabled():
        _refuse_grad("rmsnorm_gated", x=x, z=z, weight=weight)
    act = 0 if z is None else choice("rmsnorm_gated", "activation", activation, ACTIVATIONS)
    try:
        return _rmsnorm_gated(x, z, weight, eps, act, gate_first, zero_centered, round_before_weight)
    except (RuntimeError, ValueError, MemoryError) as error:
        _translate(error)


def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual, times weight (1 + weight if zero_centered), and the sum itself.

    Args:
        x, residual: ``[.., D]``, rank 1 to 4, fp32, bf16 or fp16, any strides; weight: ``[D]`` or None. On the CPU
            or one CUDA device.

    Returns:
        ``(out, sum)``, both in x's dtype; the norm is taken of the sum as it is rounded. Raises InvalidArgumentError
        for another shape of residual or weight.
    """
    if torch.is_grad_enabled():
        _refuse_grad("add_rmsnorm", x=x, residual=residual, weight=weight)
    try:
        return _add_rmsnorm(x, residual, weight, eps, zero_centered)
    except (RuntimeError, ValueError, MemoryError) as error:
        _translate(error)


def glu(x: Tensor, z: Tensor, *, activation: str = "silu") -> Tensor:
    """x * act(z), in x's dtype: SwiGLU (x = up, z = gate), and with ``activation="sigmoid"`` an output gate.

    Args:
        x, z: ``[.., D]``, rank 1 to 4, fp32, bf16 or fp16, any strides, on the CPU or one CUDA device.

    Returns:
        ``out``, of x's shape and dtype. Raises InvalidArgumentError for another shape of z or another activation.
    """
    if torch.is_grad_enabled():
        _refuse_grad("glu", x=x, z=z)
    act = choice("glu", "activation", activation, GLU_ACTIVATIONS)
    try:
        return _glu(x, z, act)
    except (RuntimeError, ValueError, MemoryError) as error:
        _translate(error)


def qk_rmsnorm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    eps: float = 1e-6,
    theta: float = 0.0,
    rotary_dim: int = 0,
    mrope_section: Sequence[int] = (0, 0, 0),
    q_has_gate: bool = False,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """RMSNorm per head, then NeoX rotary embedding of the first R channels, of an attention layer's q and k.

    Args:
        q: ``[B, T, Hq, D]``, or ``[B, T, Hq, 2D]`` (q then gate) with q_has_gate; k: ``[B, T, Hkv, D]``.
        cos, sin: ``[B or 1, T, R]``; or positions ``[B or 1, T]`` / ``[3, B or 1, T]`` with theta and rotary_dim.

    Returns:
        ``(q_out, k_out, gate)``; gate is None without q_has_gate.
    """
    if torch.is_grad_enabled():
        _refuse_grad("qk_rmsnorm_rope", q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    mrope_t, mrope_h, mrope_w = mrope_section
    if q.is_cuda:
        (positions,) = _to_device(q, positions)
    try:
        q_out, k_out, gate_out = _qk_rmsnorm_rope(
            q, k, q_weight, k_weight, cos, sin, positions, eps, theta, rotary_dim, mrope_t, mrope_h, mrope_w,
            q_has_gate, zero_centered,
        )  # fmt: skip
    except (RuntimeError, ValueError, MemoryError) as error:
        _translate(error)
    return q_out, k_out, gate_out if q_has_gate else None
