# SPDX-License-Identifier: MIT
"""Functions with the signatures of the causal-conv1d package, on libgdn. Forward only."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _capi
from . import torch as ops

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]


def _activation(function: str, activation: str | None) -> str | None:
    if activation not in (None, "silu", "swish"):
        raise _capi.UnsupportedError(
            f"{function}: argument 'activation': found {activation!r}, expected None, 'silu' or 'swish'"
        )
    return activation


def _segments(seq_idx: Tensor) -> Tensor:
    """cu_seqlens of one row ``[T]`` of seq_idx: a segment is a run of equal values."""
    change = torch.nonzero(seq_idx[1:] != seq_idx[:-1]).flatten() + 1
    first = change.new_zeros(1)
    last = change.new_full((1,), seq_idx.shape[0])
    starts = torch.cat([first, change])
    if torch.unique(seq_idx).numel() != starts.numel():
        raise _capi.UnsupportedError(
            "causal_conv1d_fn: argument 'seq_idx': found an index that comes back after another one, expected every "
            "sequence to be one run of tokens"
        )
    return torch.cat([starts, last])


def _packed(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor, activation: str | None) -> Tensor:
    if seq_idx.shape != (x.shape[0], x.shape[2]):
        raise _capi.InvalidArgumentError(
            f"causal_conv1d_fn: argument 'seq_idx': found shape {list(seq_idx.shape)}, expected [batch, seqlen] = "
            f"{[x.shape[0], x.shape[2]]}"
        )
    if x.shape[2] == 0:
        return torch.empty_like(x)
    rows = [
        ops.causal_conv1d(x[i : i + 1], weight, bias, activation=activation, cu_seqlens=_segments(seq_idx[i]))[0]
        for i in range(x.shape[0])
    ]
    y = rows[0] if len(rows) == 1 else torch.cat(rows)
    return y.masked_fill_((seq_idx < 0).unsqueeze(1), 0)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal depthwise convolution of whole sequences.

    Args:
        x: ``(batch, dim, seqlen)``, any strides; weight: ``(dim, width)``; bias: ``(dim,)``.
        seq_idx: ``(batch, seqlen)`` integers; tokens see only tokens of their own index, negative indices give 0.
            Excludes initial_states and return_final_states. On a GPU finding the sequences waits for the device;
            cu_seqlens of :func:`gdn.torch.causal_conv1d` does not.
        initial_states: ``(batch, dim, width - 1)``; final_states_out: the same shape, written and returned.
        activation: None, ``"silu"`` or ``"swish"``.

    Returns:
        out ``(batch, dim, seqlen)``, or ``(out, final_states)`` with return_final_states.
    """
    function = "causal_conv1d_fn"
    activation = _activation(function, activation)
    if seq_idx is not None:
        if initial_states is not None or return_final_states:
            name = "initial_states" if initial_states is not None else "return_final_states"
            raise _capi.UnsupportedError(f"{function}: argument 'seq_idx': not supported together with '{name}'")
        return _packed(x, weight, bias, seq_idx, activation)
    if final_states_out is not None and not return_final_states:
        raise _capi.InvalidArgumentError(
            f"{function}: argument 'final_states_out': found a tensor, expected None without return_final_states"
        )
    state_len = weight.shape[-1] - 1
    if state_len == 0:
        initial_states = None
    y, final_states = ops.causal_conv1d(
        x,
        weight,
        bias,
        activation=activation,
        initial_state=initial_states,
        final_state_len=state_len if return_final_states else 0,
    )
    if not return_final_states:
        return y
    if final_states is None:
        final_states = x.new_empty((x.shape[0], x.shape[1], 0))
    if final_states_out is not None:
        final_states = final_states_out.copy_(final_states)
    return y, final_states


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """One decode step (or a few tokens); conv_state is updated in place.

    Args:
        x: ``(batch, dim)`` or ``(batch, dim, seqlen)``; weight: ``(dim, width)``; bias: ``(dim,)``.
        conv_state: ``(batch or slots, dim, state_len)``, state_len >= width - 1, newest input last.
        cache_seqlens: ``(batch,)``; conv_state is then a circular buffer, written from cache_seqlens % state_len on.
        conv_state_indices: ``(batch,)`` rows of conv_state.

    Returns:
        out, of x's shape.
    """
    function = "causal_conv1d_update"
    activation = _activation(function, activation)
    x_3d = x.unsqueeze(-1) if x.dim() == 2 else x
    if cache_seqlens is None:
        y, _ = ops.causal_conv1d(
            x_3d,
            weight,
            bias,
            activation=activation,
            initial_state=conv_state,
            initial_state_indices=conv_state_indices,
            inplace=True,
        )
    else:
        y = _update_circular(x_3d, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)
    return y.squeeze(-1) if x.dim() == 2 else y


def _update_circular(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cache_seqlens: Tensor,
    conv_state_indices: Tensor | None,
) -> Tensor:
    batch, _, tokens = x.shape
    state_len, context = conv_state.shape[-1], weight.shape[-1] - 1
    if state_len < context or tokens > state_len:
        raise _capi.InvalidArgumentError(
            f"causal_conv1d_update: argument 'conv_state': found state_len {state_len}, expected at least width - 1 = "
            f"{context} and seqlen = {tokens}"
        )
    if cache_seqlens.shape != (batch,):
        raise _capi.InvalidArgumentError(
            f"causal_conv1d_update: argument 'cache_seqlens': found shape {list(cache_seqlens.shape)}, expected "
            f"[{batch}]"
        )
    here = x.device
    rows = torch.arange(batch, device=here) if conv_state_indices is None else conv_state_indices.to(here).long()
    start = cache_seqlens.to(here).long().unsqueeze(1)
    read = torch.remainder(start + torch.arange(-context, 0, device=here), state_len)
    write = torch.remainder(start + torch.arange(tokens, device=here), state_len)
    initial = conv_state[rows.unsqueeze(1), :, read].transpose(1, 2) if context > 0 else None
    y, _ = ops.causal_conv1d(x, weight, bias, activation=activation, initial_state=initial)
    conv_state[rows.unsqueeze(1), :, write] = x.transpose(1, 2).to(conv_state.dtype)
    return y
