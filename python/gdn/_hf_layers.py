# SPDX-License-Identifier: MIT
"""Forwards of whole layers of Transformers models (decoder layer, GDN, attention, MLP) on libgdn, for gdn.hf.

They do what the classes of KNOWN do, with the fewest launches and copies: q, k and v are views of the convolution's
output, the gate and the L2 norm are in the rule's kernel, the attention's q and its output gate are views of one
projection, and the sum with the residual goes with the norm that follows it. No arguments are checked twice: the
operators are called without gdn.torch's wrappers. Every forward answers NotImplemented to a call that it does not take
(a hooked or replaced submodule, grad mode, packed sequences, a cache that records its past): gdn.hf then runs the
model's own forward.
"""

from __future__ import annotations

import inspect
import sys
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import torch as ops

# Modeling modules whose decoder layers, attention and MLP these forwards stand for; others keep gdn.hf's dispatchers.
KNOWN = frozenset(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next"))

_QK_L2NORM = 1 << 7
_RULE_FLAGS = ops._MODES["raw", "sigmoid", "grouped", "k_first", "negative"] | _QK_L2NORM
_L2NORM_EPS = 1e-6
_SILU, _SIGMOID = 1, 2

# What the decoder layer that just ran on this thread normed ahead for its successor: (hidden states, their version,
# norm module, normed).
_ahead = threading.local()


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of a class's own forward (decorators of Transformers keep the signature)."""
    return tuple(inspect.signature(type(module).forward).parameters)


def untouched(module: nn.Module) -> bool:
    """No forward of its own and no hook: calling it is calling its class's forward."""
    return "forward" not in module.__dict__ and not (module._forward_hooks or module._forward_pre_hooks)


def _unhooked(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks)


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), without the cost of a module call where it is a plain nn.Linear."""
    if type(module) is nn.Linear and untouched(module):
        parameters = module._parameters
        return F.linear(x, parameters["weight"], parameters["bias"])
    return module(x)


GDN_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj")


def projections(layer: Any, names: tuple[str, ...], x: Tensor) -> Any:
    if layer.merged is not None:
        parts = layer.merged.split_linear(layer.module, x)
        if parts is not None:
            return parts
    modules = layer.module._modules
    return [linear(modules[name], x) for name in names]


# ---- norms around the residual


def take_ahead(norm: nn.Module, x: Tensor) -> Tensor | None:
    """norm(x), if the decoder layer before has computed it with its sum."""
    entry = getattr(_ahead, "entry", None)
    if entry is None:
        return None
    _ahead.entry = None
    hidden, version, of, normed = entry
    return normed if hidden is x and of is norm and x._version == version else None


def add_norm(layer: Any, norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(residual + x), residual + x)"""
    if layer.norms.get(id(norm)) is norm and _unhooked(norm) and x.dtype == residual.dtype and x.dim() <= 4:
        layer.state.counts["rmsnorm"] += 1
        return ops._add_rmsnorm(x, residual, norm._parameters["weight"], norm.eps, True)
    hidden = residual + x
    return norm(hidden), hidden


class Decoder:
    """Which arguments a decoder layer's class passes on."""

    def __init__(self, module: nn.Module) -> None:
        self.cache = "cache" if "cache" in parameters_of(module) else "past_key_values"
        mixer = getattr(module, "linear_attn", None)
        self.linear_cache = self.cache
        if mixer is not None:
            self.linear_cache = "cache" if "cache" in parameters_of(mixer) else "cache_params"

    @staticmethod
    def takes(module: nn.Module) -> bool:
        names = parameters_of(module)
        expected = ("self", "hidden_states", "position_embeddings", "attention_mask", "position_ids")
        mixers = hasattr(module, "linear_attn") + hasattr(module, "self_attn")
        parts = all(hasattr(module, name) for name in ("mlp", "input_layernorm", "post_attention_layernorm"))
        return parts and mixers == 1 and names[:5] == expected and names[5:6] in (("cache",), ("past_key_values",))


def decoder_forward(layer: Any, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    module, plan = layer.module._modules, layer.plan
    norm = module["input_layernorm"]
    normed = take_ahead(norm, x)
    if normed is None:
        normed = norm(x)
    if "linear_attn" in module:
        del kwargs["position_embeddings"]
        kwargs.pop("position_ids", None)
        if plan.linear_cache != plan.cache:
            kwargs[plan.linear_cache] = kwargs.pop(plan.cache, None)
        mixed = module["linear_attn"](hidden_states=normed, **kwargs)
    else:
        mixed, _ = module["self_attn"](hidden_states=normed, **kwargs)
    normed, hidden = add_norm(layer, module["post_attention_layernorm"], mixed, x)
    out = module["mlp"](normed)
    if isinstance(out, tuple):  # mixture of experts: with its router's logits
        out = out[0]
    following = layer.following
    # Tensors of inference mode have no version by which a change would be noticed.
    if following is None or not _unhooked(following) or torch.is_inference_mode_enabled():
        return hidden + out
    normed, hidden = add_norm(layer, following, out, hidden)
    _ahead.entry = (hidden, hidden._version, following, normed)
    return hidden


# ---- Gated DeltaNet


def gdn_takes(module: nn.Module) -> bool:
    parts = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj", "A_log", "dt_bias")
    return all(hasattr(module, part) for part in parts) and module.activation in ("silu", "swish")


def gdn_forward(layer: Any, x: Tensor, cache: Any, attention_mask: Tensor | None) -> Any:
    module = layer.module
    modules, parameters = module._modules, module._parameters
    conv = modules["conv1d"]
    if not untouched(conv) or "weight" not in conv._parameters:
        return NotImplemented
    states = None
    if cache is not None:
        states = cache.layers[module.layer_idx]
        if getattr(states, "record_past", True) or getattr(cache, "offloading", False):
            return NotImplemented
    if attention_mask is not None:
        x = layer.namespace["apply_mask_to_padding_states"](x, attention_mask)
    batch, tokens, _ = x.shape
    key_heads, key_dim, value_dim = module.num_k_heads, module.head_k_dim, module.head_v_dim
    mixed, z, b, a = projections(layer, GDN_PROJECTIONS, x)
    mixed, z = mixed.transpose(1, 2), z.view(batch, tokens, -1, value_dim)

    weight, bias = conv._parameters["weight"].squeeze(1), conv._parameters["bias"]
    counts = layer.state.counts
    started = False
    if states is None:
        mixed, _ = ops._causal_conv1d(mixed, weight, bias, None, None, None, None, 0, _SILU, 0)
    else:
        if not states.is_conv_states_initialized[0]:
            states.lazy_initialization(conv_states=mixed, conv_kernel_size=module.conv_kernel_size)
        # Not started: the state is zeros, so the start of a prompt is a continuation like any other.
        started = states.has_previous_state[0]
        states.has_previous_state[0] = True
        state = states.conv_states[0]
        mixed = ops._causal_conv1d_(mixed, weight, bias, None, state, None, None, None, None, _SILU, 0)
    decode = started and tokens == 1
    counts["causal_conv1d_update" if decode else "causal_conv1d_fn"] += 1

    mixed = mixed.transpose(1, 2)
    if key_dim == value_dim:
        heads = mixed.view(batch, tokens, -1, key_dim)
        q, k, v = heads.split((key_heads, key_heads, heads.shape[2] - 2 * key_heads), 2)
    else:
        q, k, v = mixed.split((module.key_dim, module.key_dim, module.value_dim), 2)
        q, k = q.view(batch, tokens, -1, key_dim), k.view(batch, tokens, -1, key_dim)
        v = v.view(batch, tokens, -1, value_dim)
    inputs = (q, k, v, a, b, parameters["A_log"], parameters["dt_bias"], None)
    options = (0.0, _L2NORM_EPS, _RULE_FLAGS, None)
    if decode:
        counts["recurrent"] += 1
        state = states.recurrent_states[0]
        o = ops._recurrent_(*inputs, state, None, None, None, None, None, None, True, *options)
    else:
        counts["chunk_forward"] += 1
        if started:
            o = ops._chunk_forward_(*inputs, states.recurrent_states[0], None, None, None, None, None, 0, *options)
        else:
            o, state = ops._chunk_forward(*inputs, None, None, None, states is not None, *options)
            if states is not None:
                cache.update_recurrent_state(state, module.layer_idx)

    norm = modules["norm"]
    if layer.norms.get(id(norm)) is norm and _unhooked(norm):
        counts["rmsnorm_gated"] += 1
        o = ops._rmsnorm_gated(o, z, norm._parameters["weight"], norm.variance_epsilon, _SILU, False, False, True)
    else:
        o = norm(o.reshape(-1, value_dim), z.reshape(-1, value_dim))
    return linear(modules["out_proj"], o.view(batch, tokens, -1))


# ---- attention


def attention_takes(module: nn.Module) -> bool:
    names = parameters_of(module)
    q_proj, o_proj = getattr(module, "q_proj", None), getattr(module, "o_proj", None)
    return (
        isinstance(q_proj, nn.Linear)
        and isinstance(o_proj, nn.Linear)
        and q_proj.out_features == 2 * o_proj.in_features  # q and its gate
        and names[:4] == ("self", "hidden_states", "position_embeddings", "attention_mask")
        and names[4:5] in (("cache",), ("past_key_values",))
    )


def attention_forward(
    layer: Any, x: Tensor, position_embeddings: Any, attention_mask: Any, cache: Any, kwargs: dict[str, Any]
) -> Any:
    module = layer.module
    modules = module._modules
    q_norm, k_norm = modules["q_norm"], modules["k_norm"]
    if not (_unhooked(q_norm) and _unhooked(k_norm)):
        return NotImplemented
    batch, tokens, _ = x.shape
    dim = module.head_dim
    heads, k, v = projections(layer, ATTENTION_PROJECTIONS, x)
    q, gate = heads.view(batch, tokens, -1, 2 * dim).split(dim, 3)
    k, v = k.view(batch, tokens, -1, dim), v.view(batch, tokens, -1, dim).transpose(1, 2)
    cos, sin = position_embeddings
    layer.state.counts["qk_rmsnorm_rope"] += 1
    q, k, _ = ops._qk_rmsnorm_rope(
        q, k, q_norm._parameters["weight"], k_norm._parameters["weight"], cos, sin, None, q_norm.eps, 0.0, 0, 0, 0, 0,
        False, True,
    )  # fmt: skip
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    if cache is not None:
        k, v = cache.update(k, v, module.layer_idx, **({"kwargs": kwargs} if layer.passes_kwargs else {}))
    config = module.config
    attend = layer.namespace["ALL_ATTENTION_FUNCTIONS"].get_interface(
        config._attn_implementation, layer.namespace["eager_attention_forward"]
    )
    dropout = module.attention_dropout if module.training else 0.0
    out, weights = attend(module, q, k, v, attention_mask, dropout=dropout, scaling=module.scaling, **kwargs)
    layer.state.counts["glu"] += 1
    out = ops._glu(out.view(batch, tokens, -1, dim), gate, _SIGMOID)
    return linear(modules["o_proj"], out.view(batch, tokens, -1)), weights


# ---- MLP


def mlp_takes(module: nn.Module) -> bool:
    parts = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
    return parts and type(module.act_fn).__name__ in ("SiLUActivation", "SiLU")


def mlp_forward(layer: Any, x: Tensor) -> Any:
    modules = layer.module._modules
    if not untouched(modules["act_fn"]):
        return NotImplemented
    if x.dim() > 4:
        return NotImplemented
    gate, up = projections(layer, MLP_PROJECTIONS, x)
    layer.state.counts["glu"] += 1
    return linear(modules["down_proj"], ops._glu(up, gate, _SILU))


def namespace_of(module: nn.Module) -> dict[str, Any]:
    return vars(sys.modules[type(module).__module__])
