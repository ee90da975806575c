# SPDX-License-Identifier: MIT
"""The Gated DeltaNet layer as an nn.Module, for models of your own.

Parameter names and shapes are those of Transformers' Qwen3.5 layer, so that its checkpoints load as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import _capi
from . import torch as ops

__all__ = ["GatedDeltaNet", "GatedDeltaNetCache", "GatedDeltaNetConfig"]


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Sizes of a layer; defaults are those of the Qwen3.5 family."""

    hidden_size: int
    num_k_heads: int = 16
    num_v_heads: int = 32
    head_k_dim: int = 128
    head_v_dim: int = 128
    conv_kernel_size: int = 4
    norm_eps: float = 1e-6
    norm_activation: str = "silu"
    allow_neg_eigval: bool = False

    @classmethod
    def from_transformers(cls, config: Any) -> GatedDeltaNetConfig:
        """From a Transformers configuration with ``linear_*`` fields (Qwen3.5, Qwen3-Next)."""
        if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
            raise _capi.UnsupportedError(
                f"GatedDeltaNetConfig: argument 'hidden_act': found {config.hidden_act!r}, expected 'silu'"
            )
        return cls(
            hidden_size=config.hidden_size,
            num_k_heads=config.linear_num_key_heads,
            num_v_heads=config.linear_num_value_heads,
            head_k_dim=config.linear_key_head_dim,
            head_v_dim=config.linear_value_head_dim,
            conv_kernel_size=config.linear_conv_kernel_dim,
            norm_eps=config.rms_norm_eps,
        )


@dataclass
class GatedDeltaNetCache:
    """State of one layer; updated in place by every forward that gets it.

    conv_state: ``[N, channels, conv_kernel_size - 1]``, newest input last; state: ``[N, Hv, K, V]`` float32.
    """

    conv_state: Tensor
    state: Tensor

    def reset(self) -> None:
        """Back to the empty sequence."""
        self.conv_state.zero_()
        self.state.zero_()

    def clone(self) -> GatedDeltaNetCache:
        """An independent copy, for instance to branch a generation."""
        return GatedDeltaNetCache(self.conv_state.clone(), self.state.clone())


class GatedDeltaNet(nn.Module):
    """Projections, causal convolution, gated delta rule, gated norm and output projection. Forward only."""

    def __init__(self, config: GatedDeltaNetConfig | Any, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if not isinstance(config, GatedDeltaNetConfig):
            config = GatedDeltaNetConfig.from_transformers(config)
        if config.num_v_heads % config.num_k_heads != 0:
            raise _capi.InvalidArgumentError(
                f"GatedDeltaNet: argument 'num_v_heads': found {config.num_v_heads}, expected a multiple of "
                f"num_k_heads = {config.num_k_heads}"
            )
        self.config = config
        self.key_dim = config.num_k_heads * config.head_k_dim
        self.value_dim = config.num_v_heads * config.head_v_dim
        self.conv_dim = 2 * self.key_dim + self.value_dim
        hidden, heads = config.hidden_size, config.num_v_heads
        self.in_proj_qkv = nn.Linear(hidden, self.conv_dim, bias=False, dtype=dtype)
        self.in_proj_z = nn.Linear(hidden, self.value_dim, bias=False, dtype=dtype)
        self.in_proj_b = nn.Linear(hidden, heads, bias=False, dtype=dtype)
        self.in_proj_a = nn.Linear(hidden, heads, bias=False, dtype=dtype)
        width = config.conv_kernel_size
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, width, groups=self.conv_dim, padding=width - 1, bias=False, dtype=dtype
        )
        self.A_log = nn.Parameter(torch.empty(heads, dtype=dtype).uniform_(0.01, 16).log_())
        self.dt_bias = nn.Parameter(torch.ones(heads, dtype=dtype))
        self.norm = nn.RMSNorm(config.head_v_dim, eps=config.norm_eps, dtype=dtype)
        self.out_proj = nn.Linear(self.value_dim, hidden, bias=False, dtype=dtype)

    @classmethod
    def from_module(cls, layer: nn.Module) -> GatedDeltaNet:
        """From a Transformers layer (``*GatedDeltaNet``).

        The parameters of a Qwen3.5 layer are shared, not copied. Qwen3-Next packs its projections per key head; those
        two matrices are reordered into new ones.
        """
        needed = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv1d", "A_log", "dt_bias", "norm")
        missing = [name for name in needed if not hasattr(layer, name)]
        if missing:
            raise _capi.InvalidArgumentError(
                f"GatedDeltaNet.from_module: argument 'layer': found {type(layer).__name__} without {missing[0]!r}, "
                "expected a Gated DeltaNet layer of Transformers"
            )
        config = GatedDeltaNetConfig(
            hidden_size=layer.out_proj.out_features,
            num_k_heads=layer.num_k_heads,
            num_v_heads=layer.num_v_heads,
            head_k_dim=layer.head_k_dim,
            head_v_dim=layer.head_v_dim,
            conv_kernel_size=layer.conv1d.kernel_size[0],
            norm_eps=layer.norm.variance_epsilon,
            norm_activation=getattr(layer.norm, "activation", "silu"),
        )
        with torch.device("meta"):
            module = cls(config)
        module.conv1d, module.out_proj = layer.conv1d, layer.out_proj
        module.A_log, module.dt_bias = layer.A_log, layer.dt_bias
        module.norm.weight = layer.norm.weight
        if hasattr(layer, "in_proj_qkv"):
            for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"):
                setattr(module, name, getattr(layer, name))
        else:
            _unpack_qwen3_next(layer, module)
        return module.train(layer.training)

    def new_cache(self, num_sequences: int, dtype: torch.dtype | None = None) -> GatedDeltaNetCache:
        """An empty cache for ``num_sequences``; dtype is that of conv_state (default: the layer's)."""
        c, weight = self.config, self.conv1d.weight
        conv_shape = (num_sequences, self.conv_dim, c.conv_kernel_size - 1)
        conv_state = torch.zeros(conv_shape, dtype=dtype or weight.dtype, device=weight.device)
        state_shape = (num_sequences, c.num_v_heads, c.head_k_dim, c.head_v_dim)
        state = torch.zeros(state_shape, dtype=torch.float32, device=weight.device)
        return GatedDeltaNetCache(conv_state, state)

    def forward(
        self,
        x: Tensor,
        cache: GatedDeltaNetCache | None = None,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Prefill and decode alike.

        Args:
            x: ``[B, T, hidden_size]``; with cu_seqlens ``[N + 1]`` B is 1 and the sequences are packed.
            cache: continues from it and is updated in place (N rows).
            mask: ``[B, T]``, 0 for padding (left padding, as Transformers makes it).

        Returns:
            ``[B, T, hidden_size]``.
        """
        c = self.config
        if mask is not None:
            x = x * mask.unsqueeze(-1).to(x.dtype)
        heads_k, heads_v = (c.num_k_heads, c.head_k_dim), (c.num_v_heads, c.head_v_dim)
        mixed, _ = ops.causal_conv1d(
            self.in_proj_qkv(x).transpose(1, 2),
            self.conv1d.weight.squeeze(1),
            activation="silu",
            cu_seqlens=cu_seqlens,
            initial_state=None if cache is None else cache.conv_state,
            inplace=cache is not None,
        )
        q, k, v = mixed.transpose(1, 2).split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        rule = ops.recurrent if x.shape[1] == 1 else ops.chunk_forward
        o, _ = rule(
            q.unflatten(-1, heads_k),
            k.unflatten(-1, heads_k),
            v.unflatten(-1, heads_v),
            self.in_proj_a(x),
            self.in_proj_b(x),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            gate="raw",
            beta_form="sigmoid2" if c.allow_neg_eigval else "sigmoid",
            round_beta=True,
            qk_l2norm=True,
            cu_seqlens=cu_seqlens,
            initial_state=None if cache is None else cache.state,
            inplace=cache is not None,
        )
        z = self.in_proj_z(x).unflatten(-1, heads_v)
        o = ops.rmsnorm_gated(
            o, z, self.norm.weight, eps=c.norm_eps, activation=c.norm_activation, round_before_weight=True
        )
        return self.out_proj(o.flatten(2))


def _unpack_qwen3_next(layer: nn.Module, module: GatedDeltaNet) -> None:
    """Rows [q | k | v r | z r] and [b r | a r] per key head -> q | k | v, z, b, a (r = Hv / Hk)."""
    c = module.config
    ratio = c.num_v_heads // c.num_k_heads
    sizes = [c.head_k_dim, c.head_k_dim, ratio * c.head_v_dim, ratio * c.head_v_dim]
    with torch.no_grad():
        packed = layer.in_proj_qkvz.weight.view(c.num_k_heads, sum(sizes), c.hidden_size)
        q, k, v, z = (part.reshape(-1, c.hidden_size) for part in packed.split(sizes, dim=1))
        packed = layer.in_proj_ba.weight.view(c.num_k_heads, 2 * ratio, c.hidden_size)
        b, a = (part.reshape(-1, c.hidden_size) for part in packed.split([ratio, ratio], dim=1))
        weights = {"in_proj_qkv": torch.cat([q, k, v]), "in_proj_z": z, "in_proj_b": b, "in_proj_a": a}
        for name, weight in weights.items():
            getattr(module, name).weight = nn.Parameter(weight, requires_grad=layer.in_proj_qkvz.weight.requires_grad)
