# SPDX-License-Identifier: MIT
"""Functions of Transformers' modeling modules as dispatchers that act for active layers only, for gdn.hf."""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

from torch import Tensor

from . import _capi
from . import torch as ops
from .causal_conv1d import causal_conv1d_fn

# Which layer is running on this thread: what the dispatchers look at.
current = threading.local()


def active() -> Any:
    return getattr(current, "layer", None)


# ---- functions of the modeling module, for an active layer


def _chunk_rule(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    return _rule(
        layer, "chunk_forward", query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        kwargs,
    )  # fmt: skip


def _recurrent_rule(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    return _rule(
        layer, "recurrent", query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        kwargs,
    )  # fmt: skip


def _rule(
    layer: Any,
    function: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    qk_l2norm: bool,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    layer.state.counts[function] += 1
    # The initial state is the cache's own tensor and the layer stores the result back into it: update it in place.
    inplace = initial_state is not None and output_final_state
    return (ops.chunk_forward if function == "chunk_forward" else ops.recurrent)(
        query,
        key,
        value,
        g,
        beta,
        scale=kwargs.get("scale"),
        qk_l2norm=qk_l2norm,
        cu_seqlens=kwargs.get("cu_seqlens"),
        initial_state=initial_state,
        output_final_state=output_final_state and not inplace,
        inplace=inplace,
    )


def _conv_fn(
    layer: Any,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    layer.state.counts["causal_conv1d_fn"] += 1
    seq_idx = kwargs.get("seq_idx")
    if seq_idx is not None:
        return causal_conv1d_fn(hidden_states, weight, bias, seq_idx=seq_idx, activation=activation)
    # Packed sequences arrive under the flash-attention name; the layer passes it on to the rule as cu_seqlens.
    cu_seqlens, columns = kwargs.get("cu_seq_lens_q"), hidden_states.shape[-1]
    if cu_seqlens is not None:
        # On a GPU the end of cu_seqlens cannot be read without waiting for everything before: what the layer itself
        # was given has to do. Both tell a cached context (columns before the new tokens) apart.
        end = layer.tokens if cu_seqlens.is_cuda else int(cu_seqlens[-1])
        if end != columns:
            raise _capi.UnsupportedError(
                f"gdn.hf: argument 'cu_seq_lens_q': found an end of {end} for {columns} columns (cached context "
                "included), expected packed sequences without a cached context"
            )
    return ops.causal_conv1d(hidden_states, weight, bias, activation=activation, cu_seqlens=cu_seqlens)[0]


def _conv_update(
    layer: Any,
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    layer.state.counts["causal_conv1d_update"] += 1
    return ops.causal_conv1d(
        hidden_states, weight, bias, activation=activation, initial_state=conv_state, inplace=True
    )[0]


def _rotary(
    layer: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    if layer.pending != 2 or unsqueeze_dim != 1:
        raise _capi.InternalError(
            f"gdn.hf: {type(layer.module).__name__}: found {layer.pending} normed tensors before the rotary embedding, "
            "expected q and k; run gdn.hf.disable(model) and report the Transformers version"
        )
    layer.pending = 0
    layer.state.counts["qk_rmsnorm_rope"] += 1
    q_norm, k_norm = layer.module.q_norm, layer.module.k_norm
    q_out, k_out, _ = ops.qk_rmsnorm_rope(
        q.transpose(1, 2), k.transpose(1, 2), q_norm.weight, k_norm.weight, cos=cos, sin=sin, **layer.options
    )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


# Function of the modeling module -> (kind of layer it acts for, replacement).
_REPLACEMENTS = {
    "torch_chunk_gated_delta_rule": ("gated_delta_net", _chunk_rule),
    "torch_recurrent_gated_delta_rule": ("gated_delta_net", _recurrent_rule),
    "causal_conv1d_fn": ("gated_delta_net", _conv_fn),
    "causal_conv1d_update": ("gated_delta_net", _conv_update),
    "apply_rotary_pos_emb": ("attention", _rotary),
}
RULE_FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def _dispatcher(original: Any, kind: str, replacement: Any) -> Any:
    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        layer = active()
        if layer is None or layer.kind != kind:
            return original(*args, **kwargs)
        return replacement(layer, *args, **kwargs)

    return dispatch


class _Patch:
    """The replaced functions of one modeling module, and how many enabled models use them."""

    def __init__(self, module_name: str) -> None:
        self.users = 0
        self.originals: dict[str, Any] = {}
        self.dispatchers: dict[str, Any] = {}
        namespace = vars(sys.modules[module_name])
        for name, (kind, replacement) in _REPLACEMENTS.items():
            if name in namespace:
                self.originals[name] = namespace[name]
                self.dispatchers[name] = namespace[name] = _dispatcher(namespace[name], kind, replacement)


patches: dict[str, _Patch] = {}
_lock = threading.RLock()


def install(module_name: str) -> None:
    with _lock:
        patch = patches.get(module_name)
        if patch is None:
            patch = patches[module_name] = _Patch(module_name)
        patch.users += 1


def uninstall(module_names: list[str]) -> None:
    with _lock:
        for module_name in module_names:
            patch = patches.get(module_name)
            if patch is None:
                continue
            patch.users -= 1
            if patch.users > 0:
                continue
            del patches[module_name]
            namespace = vars(sys.modules[module_name])
            for name, original in patch.originals.items():
                # Someone else may have replaced the function since: theirs stays.
                if namespace.get(name) is patch.dispatchers[name]:
                    namespace[name] = original
        module_names.clear()
