# SPDX-License-Identifier: MIT
"""The shared case list: loading, drawing inputs, and what the fp64 recurrence says must come out (NumPy only)."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .recurrence import l2norm, raw_gate, recurrence, sigmoid

CASES_PATH = Path(__file__).resolve().parent.parent / "cases.json"
DTYPES: dict[str, Any] = {
    "f64": np.float64,
    "f32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
}
_ORACLE_SEQUENCES = 64  # sequences of one length that the oracle advances together


class Case(dict):
    """A case with the list's defaults filled in; fields are attributes, None where a field has no default."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    return json.loads(CASES_PATH.read_text())


def load_cases() -> list[Case]:
    """All cases, in the order of the file."""
    document = _document()
    return [Case({**document["defaults"], **case}) for case in document["cases"]]


def make_case(**fields: Any) -> Case:
    """A case that is not in the list, with the list's defaults."""
    return Case({**_document()["defaults"], "id": "unnamed", "class": "unlisted", "why": "", **fields})


def get_case(case_id: str, **changes: Any) -> Case:
    """One case by id, with some fields changed."""
    case = next(c for c in load_cases() if c.id == case_id)
    return Case({**case, **changes})


def contract(case: Case) -> dict[str, float]:
    """Bounds of a case's contract by name: o, state, and recurrent or loop_ratio where it has them."""
    return _document()["contracts"][case.contract]


@dataclass
class Inputs:
    """Arrays in the call's dtypes, shapes as in gdn.h (states always K-first); None: absent."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray | None
    beta: np.ndarray | None
    A_log: np.ndarray | None = None
    dt_bias: np.ndarray | None = None
    initial: np.ndarray | None = None
    lens: list[int] = field(default_factory=list)
    varlen: bool = False

    def sequences(self) -> list[tuple[int, int, int]]:
        """(batch row, first token, length) of every sequence."""
        if not self.varlen:
            return [(b, 0, self.q.shape[1]) for b in range(self.q.shape[0])]
        starts = np.concatenate([[0], np.cumsum(self.lens)]).astype(int)
        return [(0, int(starts[n]), length) for n, length in enumerate(self.lens)]


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), 1e-30)


def _cosine(rng: np.random.Generator, shape: tuple[int, ...], cosine: float) -> np.ndarray:
    """Unit vectors of that pairwise cosine within a head. shape [B, T, H, K]."""
    base = _unit(rng.standard_normal((1, 1, shape[2], shape[3])))
    noise = rng.standard_normal(shape)
    noise = _unit(noise - (noise * base).sum(-1, keepdims=True) * base)
    return np.sqrt(cosine) * base + np.sqrt(1 - cosine) * noise


def _draw_keys(rng: np.random.Generator, case: Case, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    normal = rng.standard_normal(shape)
    queries = _unit(rng.standard_normal(shape))
    kind = case["keys"]
    if kind == "unit":
        return queries, case.key_norm * _unit(normal)
    if kind == "cosine":
        return queries, case.key_norm * _cosine(rng, shape, case.cosine)
    if kind == "positive":
        return _unit(np.abs(queries)), case.key_norm * _unit(np.abs(normal))
    if kind == "normal":
        return rng.standard_normal(shape) * case.key_norm, normal * case.key_norm
    if kind == "one_hot":
        heads = np.arange(shape[2]) % shape[3]
        k = np.zeros(shape)
        k[:, :, np.arange(shape[2]), heads] = 1
        return k.copy(), k
    if kind == "tiny":
        return queries * 1e-3, _unit(normal) * 1e-3
    if kind == "zero_rows":
        k = _unit(normal)
        k[:, 1:4] = 0
        queries[:, 1:4] = 0
        return queries, k
    if kind == "burst":
        k = _unit(normal)
        k[:, 128:192] = case.key_norm * _cosine(rng, shape, 0.9)[:, 128:192]
        return queries, k
    raise ValueError(f"{case.id}: keys {kind!r}")


def _draw_log_gate(rng: np.random.Generator, case: Case, shape: tuple[int, ...]) -> np.ndarray | None:
    model = -np.log1p(np.exp(-rng.standard_normal(shape))) / 16
    kind = case.g
    if kind == "absent":
        return None
    if kind == "model":
        return model
    if kind == "zero":
        return np.zeros(shape)
    if kind == "half_zero":
        return np.where(rng.random(shape) < 0.5, 0.0, model)
    if kind == "const":
        return np.full(shape, float(case.g_lo))
    if kind == "uniform":
        return rng.uniform(case.g_lo, case.g_hi, shape)
    if kind == "very_negative":
        return rng.choice(np.array([-1e4, -104.0, -88.0, -1e-3]), shape, p=[0.1, 0.1, 0.1, 0.7])
    if kind == "strong_then_weak":
        strong = (np.arange(shape[1]) % 64 < 10)[None, :, None]
        return np.broadcast_to(np.where(strong, -80.0, -1e-3), shape).copy()
    raise ValueError(f"{case.id}: g {kind!r}")


def draw(case: Case, seed: int = 0) -> Inputs:
    """Inputs of a case; the same for the same id and seed."""
    rng = np.random.default_rng([zlib.crc32(case.id.encode()), seed])
    lens, varlen = [], case.lens is not None or case.lens_random is not None
    B, T, Hk, Hv, K, V = (case[x] for x in ("B", "T", "Hk", "Hv", "K", "V"))
    if case.lens_random is not None:
        count, low, high = case.lens_random
        lens = [int(x) for x in rng.integers(low, high + 1, count)]
        T = sum(lens)
    elif case.lens is not None:
        lens = list(case.lens)

    def cast(x: np.ndarray | None, dtype: str) -> np.ndarray | None:
        return None if x is None else x.astype(DTYPES[dtype])

    q, k = _draw_keys(rng, case, (B, T, Hk, K))
    v = rng.standard_normal((B, T, Hv, V)) * case.v_scale
    a_log = dt_bias = None
    if case.gate_form == "raw":
        g = rng.standard_normal((B, T, Hv)) * case.a_scale
        a_log = np.full(Hv, case["A_log"], dtype=np.float32)
        dt_bias = None if case.dt_bias == "absent" else rng.standard_normal(Hv).astype(np.float32)
    else:
        g = _draw_log_gate(rng, case, (B, T, Hv))
        if case.gate_form == "linear":
            g = np.exp(g)
    if case.beta_form != "value":
        beta = rng.standard_normal((B, T, Hv)) * case.a_scale
    elif case.beta == "absent":
        beta = None
    else:
        beta = rng.uniform(case.beta_lo, case.beta_hi, (B, T, Hv))
    initial = None
    num_rows = case.slots or (len(lens) if varlen else B)
    if case.initial == "random":
        initial = rng.standard_normal((num_rows, Hv, K, V)) * 0.1 * case.v_scale
        for slot in case.poison or []:
            initial[slot] = np.nan
    return Inputs(
        q=cast(q, case.q_dtype or case.dtype),
        k=cast(k, case.k_dtype or case.dtype),
        v=cast(v, case.v_dtype or case.dtype),
        g=cast(g, case.gate_dtype),
        beta=cast(beta, case.gate_dtype),
        A_log=a_log,
        dt_bias=dt_bias,
        initial=cast(initial, case.state_dtype),
        lens=lens,
        varlen=varlen,
    )


def effective(case: Case, x: Inputs) -> dict[str, np.ndarray]:
    """What the recurrence itself consumes: q, k after the norm, natural-log g, beta; fp64."""
    q, k = x.q.astype(np.float64), x.k.astype(np.float64)
    if case.qk_l2norm:
        q, k = l2norm(q), l2norm(k)
        if case.round_qk:
            q = q.astype(x.q.dtype).astype(np.float64)
            k = k.astype(x.k.dtype).astype(np.float64)
    gate_shape = x.v.shape[:3]
    if case.gate_form == "raw":
        g = raw_gate(x.g, x.A_log, x.dt_bias)
    elif x.g is None:
        g = np.zeros(gate_shape)
    elif case.gate_form == "linear":
        with np.errstate(divide="ignore"):
            g = np.log(x.g.astype(np.float64))
    else:
        g = x.g.astype(np.float64)
    if x.beta is None:
        beta = np.ones(gate_shape)
    elif case.beta_form == "value":
        beta = x.beta.astype(np.float64)
    else:
        beta = sigmoid(x.beta) * (2 if case.beta_form == "sigmoid2" else 1)
        if case.round_beta:
            beta = beta.astype(x.beta.dtype).astype(np.float64)
    return {"q": q, "k": k, "v": x.v.astype(np.float64), "g": g, "beta": beta}


@dataclass
class Output:
    """Expected values and which elements the call writes; the others must keep their bits."""

    value: np.ndarray
    written: np.ndarray  # bool, leading axes of value that decide


@dataclass
class Plan:
    """Per sequence: slots and nullness, as gdn.h defines them."""

    read: list[int]  # -1: zeros
    write: list[int]  # -1: not written
    null: list[bool]


def plan_slots(case: Case, x: Inputs) -> Plan:
    """Resolves the indices of a case."""
    count = len(x.sequences())
    floor = 1 if case.null_slots == "non_positive" else 0
    rows = list(range(count))
    if case.token_slots is not None:
        accepted = case.num_accepted or [1] * count
        read = [case.token_slots[n][accepted[n] - 1] for n in rows]
        null = [r < floor for r in read]
        return Plan(read=[-1 if z else r for r, z in zip(read, null, strict=True)], write=[-1] * count, null=null)
    read = list(case.read) if case.read is not None else rows
    write = list(case.write) if case.write is not None else (read if case.final == "in_place" else rows)
    null = [False] * count
    if case.read is not None:
        null = [z or r < floor for z, r in zip(null, read, strict=True)]
    uses_write_slots = case.write is not None or (case.final == "in_place" and case.read is not None)
    if case.final != "none" and uses_write_slots:
        null = [z or w < floor for z, w in zip(null, write, strict=True)]
    fresh = [x.initial is None or (case.has_initial is not None and not case.has_initial[n]) for n in rows]
    return Plan(
        read=[-1 if fresh[n] or null[n] else read[n] for n in rows],
        write=[-1 if null[n] or case.final == "none" else write[n] for n in rows],
        null=null,
    )


def expected(case: Case, x: Inputs, dtype: type = np.float64) -> dict[str, Output]:
    """Outputs by name: o, final, checkpoints, snapshots (those the case asks for), computed at `dtype`."""
    e = effective(case, x)
    sequences, plan = x.sequences(), plan_slots(case, x)
    B, T, Hv, V = e["v"].shape
    K = e["k"].shape[3]
    scale = case.scale or K**-0.5
    out = {"o": Output(np.zeros((B, T, Hv, V), dtype), np.zeros((B, T), bool))}
    count, state_shape = len(sequences), (Hv, K, V)
    if case.final == "in_place":
        out["final"] = Output(x.initial.astype(dtype), np.zeros(len(x.initial), bool))
    elif case.final == "separate":
        rows = case.slots if case.write is not None else count
        out["final"] = Output(np.zeros((rows, *state_shape), dtype), np.zeros(rows, bool))
    every = case.checkpoint_every
    first_checkpoint: list[int] = []
    if every:
        counts = [length // every for _, _, length in sequences]
        first_checkpoint = [int(c) for c in np.concatenate([[0], np.cumsum(counts)])[:-1]]
        rows = case.checkpoint_slots or max(sum(counts), 1)
        out["checkpoints"] = Output(np.zeros((rows, *state_shape), dtype), np.zeros(rows, bool))
    if case.snapshots:
        shape = (count, case.snapshots)
        out["snapshots"] = Output(np.zeros((*shape, *state_shape), dtype), np.zeros(shape, bool))

    groups: dict[int, list[int]] = {}
    for n, (b, begin, length) in enumerate(sequences):
        if plan.null[n]:
            out["o"].written[b, begin : begin + length] = True
        else:
            groups.setdefault(length, []).append(n)
    for length, members in groups.items():
        for at in range(0, len(members), _ORACLE_SEQUENCES):
            _run_group(
                case, x, e, out, plan, members[at : at + _ORACLE_SEQUENCES], length, scale, first_checkpoint, dtype
            )
    return out


def _run_group(case, x, e, out, plan, members, length, scale, first_checkpoint, dtype) -> None:
    """Sequences of one length through the recurrence, results put where the call puts them."""
    sequences = x.sequences()
    state = np.zeros((len(members), *e["v"].shape[2:3], e["k"].shape[3], e["v"].shape[3]), dtype)
    for i, n in enumerate(members):
        if plan.read[n] >= 0:
            state[i] = x.initial[plan.read[n]].astype(dtype)
    rows = {
        name: np.stack([e[name][sequences[n][0], sequences[n][1] : sequences[n][1] + length] for n in members])
        for name in ("q", "k", "v", "g", "beta")
    }
    floor = 1 if case.null_slots == "non_positive" else 0

    def put(name: str, index: Any, value: np.ndarray) -> None:
        out[name].value[index] = value
        out[name].written[index] = True

    def on_state(t: int, s: np.ndarray) -> None:
        for i, n in enumerate(members):
            if case.snapshots:
                put("snapshots", (n, t), s[i])
            if case.token_slots is not None and "final" in out and case.token_slots[n][t] >= floor:
                put("final", case.token_slots[n][t], s[i])
            if case.checkpoint_every and (t + 1) % case.checkpoint_every == 0:
                m = first_checkpoint[n] + t // case.checkpoint_every
                row = m if case.checkpoint_rows is None else case.checkpoint_rows[m]
                if row >= floor or (case.checkpoint_rows is None):
                    put("checkpoints", row, s[i])

    needs_states = case.snapshots or case.token_slots is not None or case.checkpoint_every
    o, final = recurrence(
        rows["q"], rows["k"], rows["v"], rows["g"], rows["beta"], scale, state, case.head_map,
        on_state if needs_states else None, dtype,
    )  # fmt: skip
    for i, n in enumerate(members):
        b, begin, _ = sequences[n]
        put("o", (b, slice(begin, begin + length)), o[i])
        if plan.write[n] >= 0:
            put("final", plan.write[n], final[i])
