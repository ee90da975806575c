# SPDX-License-Identifier: MIT
"""The recurrence of docs/math.md, literally, in NumPy at a chosen precision (fp64: the oracle)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

OnState = Callable[[int, np.ndarray], None]


def key_heads(num_k_heads: int, num_v_heads: int, head_map: str) -> np.ndarray:
    """Key head of every value head. -> [Hv] int."""
    h = np.arange(num_v_heads)
    return h % num_k_heads if head_map == "tiled" else h // (num_v_heads // num_k_heads)


def recurrence(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    scale: float,
    state: np.ndarray,
    head_map: str = "grouped",
    on_state: OnState | None = None,
    dtype: type = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """q, k [n, T, Hk, K]; v [n, T, Hv, V]; g (natural log), beta [n, T, Hv]; state [n, Hv, K, V], all of n sequences of
    one length. on_state(t, S) is called after every token. -> (o [n, T, Hv, V], S [n, Hv, K, V])."""
    heads = key_heads(q.shape[2], v.shape[2], head_map)
    q, k, v, g, beta = (np.asarray(x, dtype=dtype) for x in (q, k, v, g, beta))
    s = np.array(state, dtype=dtype)
    alpha = np.exp(g)
    o = np.empty(v.shape, dtype=dtype)
    for t in range(v.shape[1]):
        k_t, q_t = k[:, t, heads], q[:, t, heads]  # [n, Hv, K]
        s *= alpha[:, t, :, None, None]
        u = beta[:, t, :, None] * (v[:, t] - np.matmul(k_t[:, :, None, :], s)[:, :, 0])
        s += k_t[..., :, None] * u[..., None, :]
        o[:, t] = dtype(scale) * np.matmul(q_t[:, :, None, :], s)[:, :, 0]
        if on_state is not None:
            on_state(t, s)
    return o, s


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + e^x), the identity above 20 as PyTorch has it."""
    return np.where(x > 20.0, x, np.log1p(np.exp(np.minimum(x, 20.0))))


def raw_gate(a: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray | None) -> np.ndarray:
    """g = -exp(A_log) softplus(a + dt_bias) in fp64. a [.., Hv]; A_log, dt_bias [Hv]."""
    a = a.astype(np.float64)
    return -np.exp(a_log.astype(np.float64)) * softplus(a if dt_bias is None else a + dt_bias.astype(np.float64))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x) in fp64 without overflow."""
    x = x.astype(np.float64)
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def l2norm(x: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """x * rsqrt(sum x^2 + eps) over the last axis in fp64."""
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + eps)
