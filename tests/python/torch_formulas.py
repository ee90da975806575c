# SPDX-License-Identifier: MIT
"""Plain PyTorch formulas in fp64, the yardstick of the torch tests."""

from __future__ import annotations

import torch
from torch import Tensor

# The tensors here are tiny: PyTorch's own threads only wait for each other, above all on a busy machine.
torch.set_num_threads(1)


def relative(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected|| in fp64."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300))


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    tiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, Hk, K]; v [B, T, Hv, V]; g (log), beta [B, T, Hv]; state [B, Hv, K, V] -> o, final state (fp64)."""
    q, k, v = q.double(), k.double(), v.double()
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    batch, tokens, hv, dv = v.shape
    hk, dk = k.shape[2:]
    heads = torch.arange(hv) % hk if tiled else torch.arange(hv) // (hv // hk)
    q, k = q[:, :, heads], k[:, :, heads]
    g = torch.zeros(batch, tokens, hv).double() if g is None else g.double()
    beta = torch.ones(batch, tokens, hv).double() if beta is None else beta.double()
    s = torch.zeros(batch, hv, dk, dv).double() if state is None else state.double().clone()
    o = torch.empty_like(v)
    for t in range(tokens):
        s = s * g[:, t, :, None, None].exp()
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t]))
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        o[:, t] = torch.einsum("bhkv,bhk->bhv", s, q[:, t]) * (dk**-0.5 if scale is None else scale)
    return o, s


def raw_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    x = a.double() if dt_bias is None else a.double() + dt_bias.double()
    return -A_log.double().exp() * torch.nn.functional.softplus(x)


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, silu: bool) -> Tensor:
    """x [D, T], weight [D, W], state [D, >= W - 1] or None -> y [D, T] (fp64)."""
    width = weight.shape[1]
    left = torch.zeros(x.shape[0], width - 1).double() if state is None else state.double()
    context = torch.cat([left[:, left.shape[1] - (width - 1) :], x.double()], dim=1)
    y = sum(weight[:, j, None].double() * context[:, j : j + x.shape[1]] for j in range(width))
    if bias is not None:
        y = y + bias[:, None].double()
    return y * y.sigmoid() if silu else y


def inputs(
    batch: int = 2,
    tokens: int = 37,
    hk: int = 2,
    hv: int = 4,
    dk: int = 32,
    dv: int = 48,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Unit keys, decay as in a trained model, beta in [0, 1], random state; K != V so that no layout can hide."""
    r = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=r)

    return {
        "q": l2norm(randn(batch, tokens, hk, dk)).to(dtype),
        "k": l2norm(randn(batch, tokens, hk, dk)).to(dtype),
        "v": randn(batch, tokens, hv, dv).to(dtype),
        "g": torch.nn.functional.logsigmoid(randn(batch, tokens, hv)) / 8,
        "beta": torch.rand(batch, tokens, hv, generator=r).to(dtype),
        "state": randn(batch, hv, dk, dv) * 0.3,
    }
