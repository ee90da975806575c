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
import threading
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from . import _capi
from . import _hf_layers as layers
from . import torch as ops
from ._hf_graph import GraphDecode
from .causal_conv1d import causal_conv1d_fn

__all__ = ["disable", "enable", "graph_decode", "is_enabled", "stats"]

# Which layer is running on this thread: what the dispatchers look at.
_current = threading.local()


def _active() -> _Layer | None:
    return getattr(_current, "layer", None)


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
        self.forwards: list[tuple[weakref.ref[nn.Module], Any]] = []  # patched submodule, its own forward or _ABSENT


_ABSENT = object()
_states: weakref.WeakKeyDictionary[nn.Module, _State] = weakref.WeakKeyDictionary()


# ---- functions of the modeling module, for an active layer


def _chunk_rule(
    layer: _Layer,
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
    layer: _Layer,
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
    layer: _Layer,
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
    layer: _Layer,
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
    layer: _Layer,
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
    layer: _Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
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
_RULE_FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def _dispatcher(original: Any, kind: str, replacement: Any) -> Any:
    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        layer = _active()
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


_patches: dict[str, _Patch] = {}
_lock = threading.RLock()


def _install(module_name: str) -> None:
    with _lock:
        patch = _patches.get(module_name)
        if patch is None:
            patch = _patches[module_name] = _Patch(module_name)
        patch.users += 1


def _uninstall(module_names: list[str]) -> None:
    with _lock:
        for module_name in module_names:
            patch = _patches.get(module_name)
            if patch is None:
                continue
            patch.users -= 1
            if patch.users > 0:
                continue
            del _patches[module_name]
            namespace = vars(sys.modules[module_name])
            for name, original in patch.originals.items():
                # Someone else may have replaced the function since: theirs stays.
                if namespace.get(name) is patch.dispatchers[name]:
                    namespace[name] = original
        module_names.clear()


# ---- forwards of patched submodules


def _run_layer(layer: _Layer, original: Any, *args: Any, **kwargs: Any) -> Any:
    previous = _active()
    _current.layer = layer
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
        _current.layer = previous


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
    active = _active()
    if active is None or active.kind != "attention" or type(active.module).__module__ not in _patches:
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
        missing = [f for f in _RULE_FUNCTIONS if f not in vars(sys.modules[name])]
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


def enable(model: nn.Module) -> nn.Module:
    """Runs a Transformers model's Gated DeltaNet layers, norms, and q/k norm + rotary on libgdn.

    Idempotent. Returns the model. Forward only: run it under ``torch.no_grad()`` (``generate`` does).
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
            _enable_gated_delta_net(state, module)
        elif kind == "attention":
            _enable_attention(state, module)
        elif type(module).__name__.endswith("RMSNorm") and _is_zero_centered(module):
            if layers.untouched(module):
                fusable[id(module)] = module
            _set_forward(state, _Layer(state, "norm", module), _run_norm)
        elif type(module).__name__.endswith("MLP") and layers.untouched(module) and layers.mlp_takes(module):
            if type(module).__module__ in layers.KNOWN:
                _set_forward(state, _Layer(state, "mlp", module), _run_mlp)
    _enable_decoders(state, model, names, fusable)
    for name in names:
        _install(name)
        state.modeling.append(name)
    _states[model] = state
    # A model that is dropped without disable() gives the functions back as well.
    weakref.finalize(model, _uninstall, state.modeling)
    return model


def _enable_gated_delta_net(state: _State, module: nn.Module) -> None:
    layer, norm = _Layer(state, "gated_delta_net", module), module.norm
    layer.namespace = layers.namespace_of(module)
    layer.fast = layers.untouched(module) and layers.gdn_takes(module)
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


def _enable_attention(state: _State, module: nn.Module) -> None:
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
    _uninstall(state.modeling)
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
