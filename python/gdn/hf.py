# SPDX-License-Identifier: MIT
"""``gdn.hf.enable(model)``: Transformers models with Gated DeltaNet layers run on libgdn.

Works with Qwen3.5, Qwen3.5-MoE and Qwen3-Next of Transformers 5.17 and later. Nothing of the model is changed: the
layers of the model given to :func:`enable` get a ``forward`` of their own (an instance attribute) that marks them as
active while they run, and the functions of their modeling module become dispatchers that act for active layers only.
Other models in the process keep their path; :func:`disable` restores everything.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from . import _capi
from . import _hf_dispatch as dispatch
from . import _hf_layers as layers
from . import torch as ops
from ._hf_graph import GraphDecode
from ._hf_merge import Merged

__all__ = ["disable", "enable", "graph_decode", "is_enabled", "stats"]


class _Layer:
    """One patched submodule: what its dispatchers need, and how to undo the patch."""

    def __init__(self, state: _State, kind: str, module: nn.Module) -> None:
        self.state = state
        self.kind = kind
        self.module = module
        self.pending = 0  # q/k norms postponed to the fused rotary call
        self.tokens = 0  # of the forward that is running
        self.options: dict[str, Any] = {}
        # Of forwards of whole layers (_hf_layers); fast: this layer has one.
        self.fast = False
        self.plan: layers.Decoder | None = None
        self.norms: dict[int, nn.Module] = {}  # by id: norms whose forward may be fused with what surrounds them
        self.following: nn.Module | None = None  # the norm that takes a decoder layer's result
        self.namespace: dict[str, Any] = {}  # of the modeling module
        self.passes_kwargs = False  # to the cache's update
        self.merged: Merged | None = None  # its projections as one; a copied layer has weights of its own

    def __deepcopy__(self, memo: dict[int, Any]) -> _Layer:
        # A copied model keeps running on libgdn: its layers point at the copied submodules and at the same counters.
        other = _Layer(self.state, self.kind, copy.deepcopy(self.module, memo))
        other.options = dict(self.options)
        other.fast, other.plan, other.namespace = self.fast, self.plan, self.namespace
        other.passes_kwargs = self.passes_kwargs
        norms = [copy.deepcopy(norm, memo) for norm in self.norms.values()]
        other.norms = {id(norm): norm for norm in norms}
        other.following = copy.deepcopy(self.following, memo)
        return other


class _State:
    """What enable() did to one model."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.modeling: list[str] = []  # names of the modules whose functions this model uses
        self.merged: list[tuple[weakref.ref[nn.Module], Merged]] = []
        self.forwards: list[tuple[weakref.ref[nn.Module], Any]] = []  # patched submodule, its own forward or _ABSENT


_ABSENT = object()
_states: weakref.WeakKeyDictionary[nn.Module, _State] = weakref.WeakKeyDictionary()


# ---- forwards of patched submodules


def _run_layer(layer: _Layer, original: Any, *args: Any, **kwargs: Any) -> Any:
    previous = dispatch.active()
    dispatch.current.layer = layer
    layer.pending = 0
    hidden_states = args[0] if args else kwargs.get("hidden_states")
    if hidden_states is not None:
        layer.tokens = hidden_states.shape[1]
    try:
        result = original(*args, **kwargs)
        if layer.pending:
            raise _capi.InternalError(
                f"gdn.hf: {type(layer.module).__name__} normed q or k but never called apply_rotary_pos_emb; run "
                "gdn.hf.disable(model) and report the Transformers version"
            )
        return result
    finally:
        dispatch.current.layer = previous


def _run_decoder(layer: _Layer, original: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or "position_embeddings" not in kwargs or torch.is_grad_enabled():
        return original(*args, **kwargs)
    return layers.decoder_forward(layer, args[0], kwargs)


def _run_gated_delta_net(layer: _Layer, original: Any, *args: Any, **kwargs: Any) -> Any:
    if (
        layer.fast
        and len(args) + ("hidden_states" in kwargs) == 1
        and kwargs.get("cu_seq_lens_q") is None
        and kwargs.get("seq_idx") is None
        and not torch.is_grad_enabled()
    ):
        cache = kwargs.get("cache")
        cache = kwargs.get("cache_params") if cache is None else cache
        hidden_states = args[0] if args else kwargs["hidden_states"]
        result = layers.gdn_forward(layer, hidden_states, cache, kwargs.get("attention_mask"))
        if result is not NotImplemented:
            return result
    return _run_layer(layer, original, *args, **kwargs)


def _run_attention(layer: _Layer, original: Any, *args: Any, **kwargs: Any) -> Any:
    if layer.fast and not args and kwargs.get("position_embeddings") is not None and not torch.is_grad_enabled():
        rest = dict(kwargs)
        cache, past = rest.pop("cache", None), rest.pop("past_key_values", None)
        result = layers.attention_forward(
            layer,
            rest.pop("hidden_states"),
            rest.pop("position_embeddings"),
            rest.pop("attention_mask", None),
            past if cache is None else cache,
            rest,
        )
        if result is not NotImplemented:
            return result
    return _run_layer(layer, original, *args, **kwargs)


def _run_mlp(layer: _Layer, original: Any, x: Tensor) -> Tensor:
    result = NotImplemented if torch.is_grad_enabled() else layers.mlp_forward(layer, x)
    return original(x) if result is NotImplemented else result


def _run_gated_norm(layer: _Layer, original: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    norm = layer.module
    layer.state.counts["rmsnorm_gated"] += 1
    return ops.rmsnorm_gated(
        hidden_states,
        gate,
        norm.weight,
        eps=norm.variance_epsilon,
        activation=getattr(norm, "activation", "silu"),
        round_before_weight=True,
    )


def _run_norm(layer: _Layer, original: Any, x: Tensor) -> Tensor:
    normed = layers.take_ahead(layer.module, x)
    if normed is not None:
        return normed
    layer.state.counts["rmsnorm"] += 1
    return ops.rmsnorm_gated(x, None, layer.module.weight, eps=layer.module.eps, zero_centered=True)


def _run_qk_norm(layer: _Layer, original: Any, x: Tensor) -> Tensor:
    """q_norm and k_norm inside an active attention layer: left to the fused rotary call."""
    active = dispatch.active()
    if active is None or active.kind != "attention" or type(active.module).__module__ not in dispatch.patches:
        return original(x)
    active.pending += 1
    return x


def _set_forward(state: _State, layer: _Layer, run: Any) -> None:
    module = layer.module
    own = module.__dict__.get("forward", _ABSENT)
    state.forwards.append((weakref.ref(module), own))
    # A partial, not a closure: copy.deepcopy(model) then copies the layer it points at.
    module.forward = functools.partial(run, layer, module.forward)


def _is_zero_centered(norm: nn.Module) -> bool:
    """Whether the norm computes x * rsqrt(mean x^2 + eps) * (1 + weight), found by trying it."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "eps", None)
    if weight is None or not isinstance(eps, float) or weight.dim() != 1:
        return False
    with torch.no_grad():
        x = torch.linspace(-1, 2, weight.numel(), dtype=torch.float32).to(weight.device, weight.dtype)
        x64 = x.double()
        expected = x64 * torch.rsqrt(x64.square().mean() + eps) * (1 + weight.double())
        found = norm(x).double()
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    return bool((found - expected).norm() <= tolerance * expected.norm())


def _kind(module: nn.Module) -> str | None:
    name = type(module).__name__
    if name.endswith("GatedDeltaNet"):
        return "gated_delta_net"
    if name.endswith("Attention") and hasattr(module, "q_norm") and hasattr(module, "k_norm"):
        return "attention"
    return None


def _check_model(model: nn.Module) -> list[str]:
    """Names of the modeling modules with Gated DeltaNet layers; refuses what cannot be enabled."""
    names: list[str] = []
    for module in model.modules():
        if _kind(module) != "gated_delta_net":
            continue
        name = type(module).__module__
        missing = [f for f in dispatch.RULE_FUNCTIONS if f not in vars(sys.modules[name])]
        if missing:
            raise _capi.UnsupportedError(
                f"gdn.hf.enable: argument 'model': {type(module).__name__} of {name} has no module function "
                f"{missing[0]}, expected a model of Transformers >= 5.17"
            )
        if name not in names:
            names.append(name)
    if not names:
        raise _capi.InvalidArgumentError(
            f"gdn.hf.enable: argument 'model': found {type(model).__name__} without Gated DeltaNet layers, expected "
            "a model such as Qwen3.5 or Qwen3-Next"
        )
    expected = "the CPU or a CUDA device" if _capi.has_cuda() else "the CPU: this build has no CUDA backend"
    for name, parameter in model.named_parameters():
        if parameter.device.type == "cpu" or (parameter.is_cuda and _capi.has_cuda()):
            continue
        raise _capi.UnsupportedError(
            f"gdn.hf.enable: argument 'model': parameter {name} is on {parameter.device}, expected {expected}"
        )
    return names


def enable(model: nn.Module, *, merge_projections: bool = False) -> nn.Module:
    """Runs a Transformers model's layers between the matrix products and the softmax attention on libgdn.

    Idempotent. Returns the model. Forward only: run it under ``torch.no_grad()`` (``generate`` does).

    merge_projections: the weights that meet one input (in_proj_qkv/z/b/a; q, k, v; gate, up) are moved next to each
        other in memory and taken as one product: fewer launches in decode. Parameters, their values and the state dict
        stay as they are. A layer's weights are held twice for a moment.
    """
    if model in _states:
        return model
    names = _check_model(model)
    state = _State()
    fusable: dict[int, nn.Module] = {}
    rotary_norms = {id(norm) for m in model.modules() if _kind(m) == "attention" for norm in (m.q_norm, m.k_norm)}
    for module in list(model.modules()):
        if type(module).__module__ not in names or id(module) in rotary_norms:
            continue
        kind = _kind(module)
        if kind == "gated_delta_net":
            _enable_gated_delta_net(state, module, merge_projections)
        elif kind == "attention":
            _enable_attention(state, module, merge_projections)
        elif type(module).__name__.endswith("RMSNorm") and _is_zero_centered(module):
            if layers.untouched(module):
                fusable[id(module)] = module
            _set_forward(state, _Layer(state, "norm", module), _run_norm)
        elif type(module).__name__.endswith("MLP") and layers.untouched(module) and layers.mlp_takes(module):
            if type(module).__module__ in layers.KNOWN:
                layer = _Layer(state, "mlp", module)
                if merge_projections:
                    _merge(state, layer, layers.MLP_PROJECTIONS)
                _set_forward(state, layer, _run_mlp)
    _enable_decoders(state, model, names, fusable)
    for name in names:
        dispatch.install(name)
        state.modeling.append(name)
    _states[model] = state
    # A model that is dropped without disable() gives the functions back as well.
    weakref.finalize(model, dispatch.uninstall, state.modeling)
    return model


def _merge(state: _State, layer: _Layer, names: tuple[str, ...]) -> None:
    if Merged.takes(layer.module, names):
        layer.merged = Merged(layer.module, names)
        state.merged.append((weakref.ref(layer.module), layer.merged))


def _enable_gated_delta_net(state: _State, module: nn.Module, merge: bool) -> None:
    layer, norm = _Layer(state, "gated_delta_net", module), module.norm
    layer.namespace = layers.namespace_of(module)
    layer.fast = layers.untouched(module) and layers.gdn_takes(module)
    if layer.fast and merge:
        _merge(state, layer, layers.GDN_PROJECTIONS)
    gated = type(norm).__name__.endswith("RMSNormGated")
    if gated and layers.untouched(norm) and getattr(norm, "activation", "silu") in ("silu", "swish"):
        layer.norms = {id(norm): norm}
    _set_forward(state, layer, _run_gated_delta_net)
    if gated:
        _set_forward(state, _Layer(state, "norm", norm), _run_gated_norm)


def _enable_decoders(state: _State, model: nn.Module, names: list[str], fusable: dict[int, nn.Module]) -> None:
    """Decoder layers of models that hold them as `layers`, followed by `norm`."""
    for owner in list(model.modules()):
        chain, final = getattr(owner, "layers", None), getattr(owner, "norm", None)
        if type(owner).__module__ not in layers.KNOWN or not isinstance(chain, nn.ModuleList):
            continue
        followers = [getattr(module, "input_layernorm", None) for module in list(chain)[1:]] + [final]
        for module, following in zip(chain, followers, strict=True):
            known = type(module).__module__ in names and type(module).__name__.endswith("DecoderLayer")
            if not known or not layers.untouched(module) or not layers.Decoder.takes(module):
                continue
            layer = _Layer(state, "decoder", module)
            layer.plan = layers.Decoder(module)
            norms = (following, module.input_layernorm, module.post_attention_layernorm)
            layer.norms = {id(norm): norm for norm in norms if id(norm) in fusable}
            layer.following = following if id(following) in layer.norms else None
            _set_forward(state, layer, _run_decoder)


def _enable_attention(state: _State, module: nn.Module, merge: bool) -> None:
    q_norm, k_norm = module.q_norm, module.k_norm
    if not hasattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb"):
        return
    if not (_is_zero_centered(q_norm) and _is_zero_centered(k_norm)) or q_norm.eps != k_norm.eps:
        return
    layer = _Layer(state, "attention", module)
    layer.options = {"eps": q_norm.eps, "zero_centered": True}
    layer.namespace = layers.namespace_of(module)
    layer.passes_kwargs = "cache" in layers.parameters_of(module)
    known = type(module).__module__ in layers.KNOWN and all(map(layers.untouched, (module, q_norm, k_norm)))
    layer.fast = known and layers.attention_takes(module)
    if layer.fast and merge:
        _merge(state, layer, layers.ATTENTION_PROJECTIONS)
    _set_forward(state, layer, _run_attention)
    for norm in (q_norm, k_norm):
        _set_forward(state, _Layer(state, "norm", norm), _run_qk_norm)


def disable(model: nn.Module) -> nn.Module:
    """Undoes :func:`enable` exactly; a model that is not enabled is left alone. Returns the model."""
    state = _states.pop(model, None)
    if state is None:
        return model
    for reference, own in reversed(state.forwards):
        module = reference()
        if module is None:
            continue
        if own is _ABSENT:
            module.__dict__.pop("forward", None)
        else:
            module.forward = own
    for reference, merged in state.merged:
        module = reference()
        if module is not None:
            merged.undo(module)
    dispatch.uninstall(state.modeling)
    return model


def graph_decode(model: nn.Module) -> GraphDecode:
    """Decode steps of an enabled model as one CUDA graph: ``logits = step(token, cache)``, see :class:`GraphDecode`.

    cache is a ``transformers.StaticCache`` that the model was prefilled with; the first call runs as usual, the second
    captures the graph. A step then costs the GPU's time, where the usual path costs the host's for every launch.
    """
    if model not in _states:
        raise _capi.InvalidArgumentError(
            "gdn.hf.graph_decode: argument 'model': found a model that is not enabled, expected an enabled one"
        )
    return GraphDecode(model)


def is_enabled(model: nn.Module) -> bool:
    """Whether :func:`enable` is in effect for this model."""
    return model in _states


def stats(model: nn.Module) -> dict[str, int]:
    """How many calls of each operator this model has made on libgdn since :func:`enable` (empty if not enabled)."""
    state = _states.get(model)
    return {} if state is None else dict(state.counts)
