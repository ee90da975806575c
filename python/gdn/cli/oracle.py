# SPDX-License-Identifier: MIT
"""The recurrence in fp64 NumPy: an oracle that shares no code with the library (`gdn verify --independent`)."""

from __future__ import annotations

import numpy as np

from .cases import Case, Inputs

_EPS = float(np.float32(1e-6))  # l2norm_eps and scale are floats in the C ABI


def covers(case: Case) -> bool:
    """Whether the case is a plain one: no slot pools, snapshots or checkpoints."""
    return not any(case[name] for name in ("slots", "snapshots", "checkpoint_every", "token_slots") if name in case)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _l2norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + _EPS)


def _operands(case: Case, x: Inputs) -> tuple[np.ndarray, ...]:
    """q, k, v, g (natural log), beta in fp64, as the recurrence consumes them."""
    wide = {name: None if a is None else a.astype(np.float64) for name, a in x.arrays.items()}
    q, k, v, g, beta = (wide[name] for name in ("q", "k", "v", "g", "beta"))
    if case.qk_l2norm:
        q, k = _l2norm(q), _l2norm(k)
        if case.round_qk:
            q = q.astype(x.arrays["q"].dtype).astype(np.float64)
            k = k.astype(x.arrays["k"].dtype).astype(np.float64)
    if case.gate_form == "raw":
        a = g if wide["dt_bias"] is None else g + wide["dt_bias"]
        g = -np.exp(wide["A_log"]) * np.where(a > 20, a, np.log1p(np.exp(np.minimum(a, 20))))
    elif g is None:
        g = np.zeros(v.shape[:3])
    elif case.gate_form == "linear":
        with np.errstate(divide="ignore"):
            g = np.log(g)
    if beta is None:
        beta = np.ones(v.shape[:3])
    elif case.beta_form != "value":
        beta = _sigmoid(beta) * (2 if case.beta_form == "sigmoid2" else 1)
        if case.round_beta:
            beta = beta.astype(x.arrays["beta"].dtype).astype(np.float64)
    return q, k, v, g, beta


def recurrence(case: Case, x: Inputs) -> dict[str, np.ndarray]:
    """o [B, T, Hv, V] (NaN past the last sequence) and final [N, Hv, K, V] of a plain case, fp64."""
    q, k, v, g, beta = _operands(case, x)
    heads = np.arange(case.Hv)
    heads = heads % case.Hk if case.head_map == "tiled" else heads // (case.Hv // case.Hk)
    scale = float(np.float32(case.scale)) or case.K**-0.5
    o = np.full(v.shape, np.nan)
    final = np.zeros((x.count, case.Hv, case.K, case.V))
    for n, (b, begin, length) in enumerate(x.spans()):
        state = final[n]
        if x.initial is not None and (case.has_initial is None or case.has_initial[n]):
            state[...] = x.initial[n]
        for t in range(begin, begin + length):
            key, query = k[b, t, heads], q[b, t, heads]
            state *= np.exp(g[b, t])[:, None, None]
            u = beta[b, t][:, None] * (v[b, t] - np.einsum("hk,hkv->hv", key, state))
            state += key[:, :, None] * u[:, None, :]
            o[b, t] = scale * np.einsum("hk,hkv->hv", query, state)
    return {"o": o, **({} if case.final == "none" else {"final": final})}
