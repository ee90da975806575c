# SPDX-License-Identifier: MIT
"""The chunked formula of docs/math.md in plain PyTorch: the yardstick of an implementation's error (at most twice)."""

from __future__ import annotations

import numpy as np
import torch

from .recurrence import key_heads


def chunk_formula(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    scale: float,
    state: np.ndarray,
    head_map: str = "grouped",
    chunk: int = 64,
    operands: torch.dtype = torch.float32,
) -> tuple[np.ndarray, np.ndarray]:
    """Shapes as in recurrence(). fp32 arithmetic; `operands` = bfloat16 rounds both sides of every product, as a
    kernel on 16-bit matrix units must. -> (o [n, T, Hv, V], S [n, Hv, K, V]) in fp32."""
    heads = key_heads(q.shape[2], v.shape[2], head_map)
    f32 = [
        torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
        for x in (q[:, :, heads], k[:, :, heads], v, g, beta)
    ]
    queries, keys, values = (x.transpose(1, 2) for x in f32[:3])  # [n, Hv, T, D]
    gate, betas = (x.transpose(1, 2) for x in f32[3:])  # [n, Hv, T]
    s = torch.from_numpy(np.array(state, dtype=np.float32))
    out = torch.empty_like(values)

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.to(operands).float() @ y.to(operands).float()

    for begin in range(0, values.shape[2], chunk):
        rows = slice(begin, min(begin + chunk, values.shape[2]))
        qc, kc, vc, bc = queries[:, :, rows], keys[:, :, rows], values[:, :, rows], betas[:, :, rows]
        total = gate[:, :, rows].clamp(min=-104).double().cumsum(-1)  # G in double, as math.md asks for fp32 inputs
        size = qc.shape[2]
        lower = torch.ones(size, size, dtype=torch.bool).tril()
        gamma = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp().float()
        decay = total.exp().float()[..., None]
        tail = (total[..., -1:] - total).exp().float()[..., None]
        kt = kc.transpose(-1, -2)
        system = torch.eye(size) + (bc[..., None] * product(kc, kt) * gamma).tril(-1)
        inverse = torch.linalg.solve_triangular(system, torch.diag_embed(bc), upper=False, unitriangular=True)
        u = product(inverse, vc - decay * product(kc, s))
        out[:, :, rows] = scale * (decay * product(qc, s) + product(product(qc, kt) * gamma, u))
        s = decay[:, :, -1:] * s + product((tail * kc).transpose(-1, -2), u)
    return out.transpose(1, 2).numpy(), s.numpy()
