# SPDX-License-Identifier: MIT
"""Fake kernels (shapes, strides, dtypes, devices) of torch.ops.gdn.*, for torch.compile, torch.export and opcheck."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _capi

# Bit of state_layout in the packed options of the rule (see csrc/torch_ops.cpp).
V_FIRST = 1 << 5


def _device(function: str, argument: str, tensor: Tensor) -> None:
    """The results are on the device of the inputs; a device that no kernel of this build serves is refused here too."""
    kind = tensor.device.type
    if kind in ("cpu", "meta") or (kind == "cuda" and _capi.has_cuda()):
        return
    found = f"{function}: argument '{argument}': found a tensor on {tensor.device}, expected "
    if kind == "cuda":
        raise _capi.UnsupportedError(found + "a CPU tensor: this build has no CUDA backend")
    raise _capi.InvalidArgumentError(found + "a CPU tensor or a CUDA tensor")


def _num_sequences(cu_seqlens: Tensor | None, batch: int) -> int:
    return batch if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _rule(function: str):
    def fake(
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, initial_state_indices, has_initial_state,
        output_final_state, scale, l2norm_eps, flags, impl, max_seqlen=0, split_tokens=0,
        split_threshold=0.0,
    ):  # fmt: skip
        _device(function, "q", q)
        o = v.new_empty(v.shape)
        state_dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        if not output_final_state:
            return o, v.new_empty((0,), dtype=torch.float32)
        state = (v.shape[3], q.shape[3]) if flags & V_FIRST else (q.shape[3], v.shape[3])
        n = _num_sequences(cu_seqlens, q.shape[0])
        return o, v.new_empty((n, v.shape[2], *state), dtype=state_dtype)

    return fake


def _rule_inplace(function: str):
    def fake(q, k, v, *rest):
        _device(function, "q", q)
        return v.new_empty(v.shape)

    return fake


def _conv_output(x: Tensor) -> Tensor:
    _device("causal_conv1d", "x", x)
    batch, dim, tokens = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((batch, tokens, dim)).transpose(1, 2)
    return x.new_empty((batch, dim, tokens))


def _conv(x, weight, bias, cu_seqlens, initial_state, indices, has_initial, final_state_len, activation, null_slots):
    y = _conv_output(x)
    if final_state_len <= 0:
        return y, x.new_empty((0,))
    return y, x.new_empty((_num_sequences(cu_seqlens, x.shape[0]), x.shape[1], final_state_len))


def _conv_inplace(x, weight, bias, cu_seqlens, state, indices, final_indices, has_initial, accepted, activation, null):
    return _conv_output(x)


def _gate(a, b, A_log, dt_bias, gate_form, beta_form):
    _device("gate", "a", a)
    return a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape, dtype=torch.float32)


def _rmsnorm_gated(x, z, weight, eps, activation, gate_first, zero_centered, round_before_weight):
    _device("rmsnorm_gated", "x", x)
    return x.new_empty(x.shape)


def _add_rmsnorm(x, residual, weight, eps, zero_centered):
    _device("rmsnorm_gated", "x", x)
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _glu(x, z, activation):
    _device("glu", "x", x)
    return x.new_empty(x.shape)


def _qk_rmsnorm_rope(
    q, k, q_weight, k_weight, cos, sin, positions, eps, theta, rotary_dim, mrope_t, mrope_h, mrope_w, q_has_gate,
    zero_centered,
):  # fmt: skip
    _device("qk_rmsnorm_rope", "q", q)
    q_shape = (*q.shape[:3], k.shape[3])
    gate = q.new_empty(q_shape if q_has_gate else (0,))
    return q.new_empty(q_shape), k.new_empty(k.shape), gate


def register() -> None:
    """Registers every fake kernel; called once, after the operators are loaded."""
    for name, fake in (
        ("chunk_forward", _rule("chunk_forward")),
        ("recurrent", _rule("recurrent")),
        ("chunk_forward_", _rule_inplace("chunk_forward")),
        ("recurrent_", _rule_inplace("recurrent")),
        ("causal_conv1d", _conv),
        ("causal_conv1d_", _conv_inplace),
        ("gate", _gate),
        ("rmsnorm_gated", _rmsnorm_gated),
        ("add_rmsnorm", _add_rmsnorm),
        ("glu", _glu),
        ("qk_rmsnorm_rope", _qk_rmsnorm_rope),
    ):
        torch.library.register_fake(f"gdn::{name}", fake)
