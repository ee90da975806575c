# SPDX-License-Identifier: MIT
"""Inputs of the named cases (data/cases.json), and a call of the C ABI on them.

A field that a case does not name has the value in the file's `defaults`. Names of the fields are those of gdn.h where
there is one; the others say how inputs are drawn: keys unit | cosine | positive | normal | one_hot | tiny | zero_rows |
burst, g model | zero | half_zero | const | uniform | very_negative | strong_then_weak | absent.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import _capi
from .calls import Struct, numpy_type, tensor_of
from .console import UsageError

_DATA = Path(__file__).resolve().parent.parent / "data" / "cases.json"
_DTYPES = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "f64": "fp64", "i32": "i32", "i64": "i64"}


class Case(dict):
    """One case: fields as attributes, None for what neither the case nor the defaults name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


def load(path: Path | None = None) -> tuple[list[Case], dict[str, dict[str, float]]]:
    """The cases of a file (the package's own without one) and the bounds of their contracts."""
    path = path or _DATA
    try:
        document = json.loads(path.read_text())
        cases = [Case({**document["defaults"], **case}) for case in document["cases"]]
        contracts = document["contracts"]
        unknown = [case.id for case in cases if case.contract not in contracts]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"verify: argument '--cases': cannot read {path} ({error!r}), expected a case list such as {_DATA.name}"
        ) from None
    if unknown:
        raise UsageError(f"verify: argument '--cases': {path}: case {unknown[0]} has a contract that 'contracts' lacks")
    return cases, contracts


def dtype(name: str) -> Any:
    """NumPy's type of a case's f32 | bf16 | f16 | f64 | i32 | i64."""
    return numpy_type(_DTYPES[name])


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-30)


def _correlated(rng: np.random.Generator, shape: tuple[int, ...], cosine: float) -> np.ndarray:
    """Unit vectors [B, T, H, K] of one pairwise cosine within each head."""
    axis = _unit(rng.standard_normal((1, 1, *shape[2:])))
    across = rng.standard_normal(shape)
    across = _unit(across - (across * axis).sum(-1, keepdims=True) * axis)
    return np.sqrt(cosine) * axis + np.sqrt(1 - cosine) * across


def _queries_keys(rng: np.random.Generator, case: Case, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    q, k = _unit(rng.standard_normal(shape)), _unit(rng.standard_normal(shape))
    kind, norm = case["keys"], case.key_norm
    if kind == "unit":
        return q, norm * k
    if kind == "cosine":
        return q, norm * _correlated(rng, shape, case.cosine)
    if kind == "positive":
        return np.abs(q), norm * np.abs(k)
    if kind == "normal":
        return norm * rng.standard_normal(shape), norm * rng.standard_normal(shape)
    if kind == "one_hot":
        k = np.zeros(shape)
        heads = np.arange(shape[2])
        k[:, :, heads, heads % shape[3]] = 1
        return k.copy(), k
    if kind == "tiny":
        return 1e-3 * q, 1e-3 * k
    if kind == "zero_rows":
        q[:, 1:4] = k[:, 1:4] = 0
        return q, k
    if kind == "burst":
        k[:, 128:192] = norm * _correlated(rng, shape, 0.9)[:, 128:192]
        return q, k
    raise UsageError(f"verify: case {case.id}: field 'keys': found {kind!r}")


def _log_gate(rng: np.random.Generator, case: Case, shape: tuple[int, ...]) -> np.ndarray:
    model = -np.logaddexp(0, -rng.standard_normal(shape)) / 16
    draw = {
        "model": lambda: model,
        "zero": lambda: np.zeros(shape),
        "half_zero": lambda: np.where(rng.random(shape) < 0.5, 0.0, model),
        "const": lambda: np.full(shape, float(case.g_lo)),
        "uniform": lambda: rng.uniform(case.g_lo, case.g_hi, shape),
        "very_negative": lambda: rng.choice([-1e4, -104.0, -88.0, -1e-3], shape, p=[0.1, 0.1, 0.1, 0.7]),
        "strong_then_weak": lambda: np.where(np.arange(shape[1])[:, None] % 64 < 10, -80.0, -1e-3) + np.zeros(shape),
    }.get(case.g)
    if draw is None:
        raise UsageError(f"verify: case {case.id}: field 'g': found {case.g!r}")
    return draw()


@dataclass
class Inputs:
    """Arrays in the call's dtypes, shapes as in gdn.h (states K-first); None: absent."""

    arrays: dict[str, np.ndarray | None]
    initial: np.ndarray | None
    lens: list[int] | None
    count: int  # sequences
    longest: int = 0
    num_states: int = 0  # rows of the state tensors

    def spans(self) -> list[tuple[int, int, int]]:
        """(batch row, first token, length) of every sequence."""
        if self.lens is None:
            return [(b, 0, self.longest) for b in range(self.count)]
        starts = np.cumsum([0, *self.lens])
        return [(0, int(starts[n]), length) for n, length in enumerate(self.lens)]


def draw(case: Case, seed: int = 0) -> Inputs:
    """Inputs of a case: the same for the same id and seed."""
    rng = np.random.default_rng([zlib.crc32(case.id.encode()), seed])
    lens = None
    if case.lens_random:
        count, low, high = case.lens_random
        lens = [int(x) for x in rng.integers(low, high + 1, count)]
    elif case.lens is not None:
        lens = list(case.lens)
    tokens = (
        max(case.T, sum(lens)) if lens is not None and not case.lens_random else case.T if lens is None else sum(lens)
    )
    shape, gate_shape = (case.B, tokens, case.Hk, case.K), (case.B, tokens, case.Hv)
    q, k = _queries_keys(rng, case, shape)
    arrays: dict[str, np.ndarray | None] = {
        "q": q.astype(dtype(case.q_dtype or case.dtype)),
        "k": k.astype(dtype(case.k_dtype or case.dtype)),
        "v": (rng.standard_normal((*gate_shape, case.V)) * case.v_scale).astype(dtype(case.v_dtype or case.dtype)),
        "A_log": None,
        "dt_bias": None,
        "g": None,
        "beta": None,
    }
    gate_type = dtype(case.gate_dtype)
    if case.gate_form == "raw":
        arrays["g"] = (rng.standard_normal(gate_shape) * case.a_scale).astype(gate_type)
        arrays["A_log"] = np.full(case.Hv, case.A_log, np.float32)
        if case.dt_bias != "absent":
            arrays["dt_bias"] = rng.standard_normal(case.Hv).astype(np.float32)
    elif case.g != "absent":
        log_gate = _log_gate(rng, case, gate_shape)
        arrays["g"] = (np.exp(log_gate) if case.gate_form == "linear" else log_gate).astype(gate_type)
    if case.beta_form != "value":
        arrays["beta"] = (rng.standard_normal(gate_shape) * case.a_scale).astype(gate_type)
    elif case.beta != "absent":
        arrays["beta"] = rng.uniform(case.beta_lo, case.beta_hi, gate_shape).astype(gate_type)
    count = case.B if lens is None else len(lens)
    rows, initial = case.slots or count, None
    if case.initial == "random":
        initial = rng.standard_normal((rows, case.Hv, case.K, case.V)) * 0.1 * case.v_scale
        for slot in case.poison or []:
            initial[slot] = np.nan
        initial = initial.astype(dtype(case.state_dtype))
    longest = tokens if lens is None else max(lens, default=0)
    return Inputs(arrays, initial, lens, count, longest, rows)


def _with_layout(array: np.ndarray, layout: str) -> np.ndarray:
    """A view with the same values and the strides that a case's layout asks for; the gaps hold NaN."""
    pad = {"padded": 3, "storage_rows": 128 if array.ndim == 4 else 0, "misaligned": 1}.get(layout, 0)
    step = 2 if layout == "strided" or (layout == "gates_interleaved" and array.ndim == 3) else 1
    if layout == "batch_step":
        memory = np.full((array.shape[0] * 2, *array.shape[1:]), np.nan, array.dtype)
        view = memory[::2]
    elif layout == "head_major":
        memory = np.full((array.shape[0], array.shape[2], array.shape[1], *array.shape[3:]), np.nan, array.dtype)
        view = memory.swapaxes(1, 2)
    elif layout == "misaligned":
        memory = np.full(array.size + 1, np.nan, array.dtype)
        view = memory[1:].reshape(array.shape)
    elif pad or step > 1:
        memory = np.full((*array.shape[:-1], array.shape[-1] * step + pad), np.nan, array.dtype)
        view = memory[..., : array.shape[-1] * step : step]
    else:
        return array
    view[...] = array
    return view


def _packed(arrays: dict[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    """q, k, v as views of one [q | k | v] row per token."""
    parts = {name: arrays[name] for name in "qkv"}
    row = np.concatenate([x.reshape(*x.shape[:2], -1) for x in parts.values()], -1)
    views, begin = {}, 0
    for name, x in parts.items():
        end = begin + x.shape[2] * x.shape[3]
        views[name] = row[:, :, begin:end].reshape(x.shape) if x.size == 0 else _split(row, begin, x.shape)
        begin = end
    return views


def _split(row: np.ndarray, begin: int, shape: tuple[int, ...]) -> np.ndarray:
    strides = (row.strides[0], row.strides[1], shape[3] * row.itemsize, row.itemsize)
    return np.lib.stride_tricks.as_strided(row[:, :, begin:], shape, strides)


@dataclass
class Call:
    """One prepared call: its struct and its outputs (NaN until written), states K-first."""

    struct: Struct
    outputs: dict[str, np.ndarray] = field(default_factory=dict)


def _states(case: Case, leading: tuple[int, ...], state_type: Any) -> np.ndarray:
    """NaN-filled states, seen K-first, with the memory order and padding of the case."""
    v_first = case.state_layout == "v_first"
    inner = (case.V, case.K) if v_first else (case.K, case.V)
    heads = case.Hv + (2 if case.state_pad == "slot" else 0)
    columns = inner[1] + (5 if case.state_pad == "row" else 0)
    memory = np.full((*leading, heads, inner[0], columns), np.nan, state_type)
    view = memory[..., : case.Hv, :, : inner[1]]
    return view.swapaxes(-1, -2) if v_first else view


def prepare(case: Case, x: Inputs, impl: str | None, oracle: bool = False, num_threads: int = 0) -> Call:
    """The call of a case. `oracle`: outputs in fp64 and no special layouts, for reference_fp64."""
    v_first = case.state_layout == "v_first"
    arrays = dict(x.arrays)
    if not oracle:
        if case.layout == "packed":
            arrays.update(_packed(arrays))
        for name in ("q", "k", "v", "g", "beta"):
            if arrays[name] is not None and case.layout != "packed":
                arrays[name] = _with_layout(arrays[name], case.layout)
    index_type = dtype(case.index_dtype)
    f64 = np.dtype(np.float64)
    indices = {
        "has_initial_state": case.has_initial,
        "initial_state_indices": None if case.token_slots else case.read,
        "final_state_indices": None if case.token_slots else case.write,
        "token_state_indices": case.token_slots,
        "num_accepted": case.num_accepted,
        "checkpoint_indices": case.checkpoint_rows,
        "cu_seqlens": None if x.lens is None else np.cumsum([0, *x.lens]),
    }
    struct = Struct(
        _capi.RuleArgs,
        **arrays,
        **{name: None if value is None else np.asarray(value, index_type) for name, value in indices.items()},
        gate_form=_capi.GATE_FORMS[case.gate_form],
        beta_form=_capi.BETA_FORMS[case.beta_form],
        head_map=_capi.HEAD_MAPS[case.head_map],
        state_layout=_capi.STATE_LAYOUTS[case.state_layout],
        null_slots=_capi.NULL_SLOTS[case.null_slots],
        qk_l2norm=int(case.qk_l2norm),
        round_qk=int(case.round_qk),
        round_beta=int(case.round_beta),
        scale=float(case.scale),
        batch_invariant=int(case.batch_invariant),
        checkpoint_every=case.checkpoint_every or 0,
        num_threads=num_threads,
        impl=impl,
    )
    call = Call(struct)

    def attach(name: str, array: np.ndarray, output: str | None) -> None:
        tensor = tensor_of(array, swap_last=v_first and output != "o")
        struct._keep.append(array)
        struct.set(**{name: tensor})
        if output is not None:
            call.outputs[output] = array

    o_type = f64 if oracle else dtype(case.o_dtype or case.dtype)
    o = np.full(x.arrays["v"].shape, np.nan, o_type)
    attach("o", o if oracle else _with_layout(o, "contiguous" if case.layout == "packed" else case.layout), "o")
    state_type = f64 if oracle else dtype(case.state_dtype)
    if x.initial is not None:
        initial = _states(case, x.initial.shape[:1], state_type)
        initial[...] = x.initial
        in_place = case.final == "in_place"
        attach("initial_state", initial, "final" if in_place else None)
        if in_place:
            attach("final_state", initial, "final")
    if case.final == "separate":
        final_type = f64 if oracle else dtype(case.final_dtype or case.state_dtype)
        attach("final_state", _states(case, (x.num_states,), final_type), "final")
    if case.snapshots:
        attach("snapshots", _states(case, (x.count, case.snapshots), state_type), "snapshots")
    if case.checkpoint_every:
        rows = case.checkpoint_slots or max(sum(n // case.checkpoint_every for _, _, n in x.spans()), 1)
        kind = f64 if oracle else dtype(case.checkpoint_dtype or case.state_dtype)
        attach("checkpoints", _states(case, (rows,), kind), "checkpoints")
    return call
