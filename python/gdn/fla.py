# SPDX-License-Identifier: MIT
"""Functions with the signatures of FLA 0.6.0 (``fla.ops.gated_delta_rule``), on libgdn. Forward only."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from . import _capi
from . import torch as ops

__all__ = ["chunk_gated_delta_rule", "chunk_gdn", "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn"]


def _pop_deprecated(function: str, kwargs: dict[str, Any], state_v_first: bool) -> bool:
    if "head_first" in kwargs:
        raise DeprecationWarning(
            f"{function}: argument 'head_first': removed from FLA, expected inputs in [B, T, H, ...] format"
        )
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise _capi.InvalidArgumentError(
                f"{function}: argument 'transpose_state_layout': found beside state_v_first, its new name; pass one"
            )
        warnings.warn("transpose_state_layout is deprecated: use state_v_first", DeprecationWarning, stacklevel=3)
        return bool(kwargs.pop("transpose_state_layout"))
    return state_v_first


def _refuse_unknown(function: str, kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise TypeError(f"{function}: unexpected keyword argument {next(iter(kwargs))!r}")


def _gate(function: str, use_gate: bool, g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None):
    """FLA ignores A_log and dt_bias unless use_gate_in_kernel."""
    if not use_gate:
        return {"gate": "log"}
    for name, value in (("A_log", A_log), ("g", g)):
        if value is None:
            raise _capi.InvalidArgumentError(
                f"{function}: argument '{name}': found None with use_gate_in_kernel=True, expected a tensor"
            )
    return {"gate": "raw", "A_log": A_log, "dt_bias": dt_bias}


def _beta_form(function: str, use_sigmoid: bool, allow_neg_eigval: bool) -> str:
    if allow_neg_eigval and not use_sigmoid:
        raise _capi.InvalidArgumentError(
            f"{function}: argument 'allow_neg_eigval': found True without use_beta_sigmoid_in_kernel, which it requires"
        )
    if not use_sigmoid:
        return "value"
    return "sigmoid2" if allow_neg_eigval else "sigmoid"


def _longest(cu_seqlens: Tensor) -> int:
    """The longest sequence, or 0 for what the call itself will refuse."""
    if cu_seqlens.is_cuda or cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        return 0
    return max(0, int(cu_seqlens.diff().max()))


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Chunked gated delta rule (prefill).

    Args:
        q, k: ``[B, T, H, K]``; v: ``[B, T, HV, V]``, HV a multiple of H; g, beta: ``[B, T, HV]``.
        scale: None for K^-0.5.
        initial_state: ``[N, HV, K, V]`` (``[N, HV, V, K]`` with state_v_first); never modified.
        use_beta_sigmoid_in_kernel: beta holds logits; allow_neg_eigval: 2 * sigmoid.
        cu_seqlens, cu_seqlens_cpu: ``[N + 1]`` int32/int64, the same lengths; the one on the data's device is used.
        chunk_indices: accepted and not needed.
        cp_context: not supported: refused.
        **kwargs: use_gate_in_kernel with A_log, dt_bias ``[HV]`` (g is then the raw gate input); chunk_size (accepted:
            it changes no result); transpose_state_layout (deprecated name of state_v_first).

    Returns:
        ``(o, final_state)``: o ``[B, T, HV, V]`` in v's dtype, final_state float32 or None.
    """
    function = "chunk_gated_delta_rule"
    if cp_context is not None:
        raise _capi.UnsupportedError(f"{function}: argument 'cp_context': context parallelism is not supported")
    if kwargs:
        state_v_first = _pop_deprecated(function, kwargs, state_v_first)
        chunk_size = kwargs.pop("chunk_size", 64)
        if chunk_size not in (16, 32, 64):
            raise _capi.InvalidArgumentError(
                f"{function}: argument 'chunk_size': found {chunk_size!r}, expected 16, 32 or 64"
            )
    use_gate = kwargs.pop("use_gate_in_kernel", False)
    gate = _gate(function, use_gate, g, kwargs.pop("A_log", None), kwargs.pop("dt_bias", None))
    _refuse_unknown(function, kwargs)
    max_seqlen = 0
    if cu_seqlens_cpu is not None and q.is_cuda and not torch.compiler.is_compiling():
        max_seqlen = _longest(cu_seqlens_cpu)
    return ops.chunk_forward(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        qk_l2norm=use_qk_l2norm_in_kernel,
        beta_form=_beta_form(function, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        cu_seqlens=cu_seqlens if cu_seqlens_cpu is None or (q.is_cuda and cu_seqlens is not None) else cu_seqlens_cpu,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_layout="v_first" if state_v_first else "k_first",
        max_seqlen=max_seqlen,
        **gate,
    )


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Token-by-token gated delta rule (decode). Arguments as in :func:`chunk_gated_delta_rule`.

    gk and gv (gates per key or value channel) are not supported: refused. The state is returned as a new tensor; decode
    in place with :func:`gdn.torch.recurrent` (``inplace=True``).
    """
    function = "fused_recurrent_gated_delta_rule"
    for name, value in (("gk", gk), ("gv", gv)):
        if value is not None:
            raise _capi.UnsupportedError(f"{function}: argument '{name}': gates per channel are not supported")
    if kwargs:
        state_v_first = _pop_deprecated(function, kwargs, state_v_first)
        _refuse_unknown(function, kwargs)
    if beta is None and use_beta_sigmoid_in_kernel:
        beta = torch.ones(v.shape[:3], dtype=v.dtype, device=v.device)  # FLA's default, which then goes through sigmoid
    return ops.recurrent(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        qk_l2norm=use_qk_l2norm_in_kernel,
        beta_form=_beta_form(function, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_layout="v_first" if state_v_first else "k_first",
        **_gate(function, use_gate_in_kernel, g, A_log, dt_bias),
    )


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
