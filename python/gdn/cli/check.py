# SPDX-License-Identifier: MIT
"""The named cases through the fast path, against the fp64 reference of the library."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .. import _capi
from . import oracle
from .calls import OPS
from .cases import Call, Case, Inputs, prepare
from .device import explain_on, run_on

# Axes of an output that select what is written as one: a token's row, a slot, a snapshot.
_LEADING = {"o": 2, "final": 1, "checkpoints": 1, "snapshots": 2}
_ROUNDED = {"o": 5e-3, "state": 4.5e-3}  # a 16-bit output has at least the bound of 16-bit data
_FP32_LOOP = 5e-6
_INDEPENDENT = 1e-9  # two fp64 recurrences that differ in the order of their sums only


@dataclass
class Result:
    """One case, one operator."""

    case: str
    op: str
    impl: str
    errors: dict[str, float]
    bounds: dict[str, float]
    problems: list[str]

    @property
    def worst(self) -> tuple[str, float]:
        """The output nearest to its bound (or furthest past it), and error / bound."""
        ratios = {name: self.errors[name] / self.bounds[name] for name in self.errors}
        name = max(ratios, key=ratios.__getitem__, default="o")
        return name, ratios.get(name, 0.0)

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "ok": not self.problems}


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """||found - expected|| / ||expected|| in fp64; infinite where found is not finite."""
    if found.size == 0:
        return 0.0
    if not np.isfinite(found).all():
        return float("inf")
    error, norm = np.linalg.norm(found - expected), np.linalg.norm(expected)
    return float(error / norm) if norm else (0.0 if error == 0 else float("inf"))


def describe_worst(found: np.ndarray, expected: np.ndarray) -> str:
    """Index of the largest difference, and both values."""
    difference = np.abs(found - expected)
    at = np.unravel_index(int(np.argmax(np.where(np.isnan(difference), np.inf, difference))), found.shape)
    return f"worst at {[int(i) for i in at]}: found {found[at]:.9g}, expected {expected[at]:.9g}"


def _invoke(call: Call, op: str, device: int | None = None) -> None:
    function = _capi.lib.gdn_chunk_forward if op == "chunk_forward" else _capi.lib.gdn_recurrent
    run_on(device, function, call.struct.args)


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a == b) | ((a != a) & (b != b))


def _unchanged(name: str, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Per row, slot or snapshot: whether every element has its old value."""
    return _same(before, after).all(tuple(range(_LEADING[name], after.ndim)))


def run_oracle(case: Case, x: Inputs, op: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """fp64 outputs, and which rows the call writes."""
    call = prepare(case, x, "reference_fp64", oracle=True)
    before = {name: a.copy() for name, a in call.outputs.items()}
    _invoke(call, op)
    return call.outputs, {name: ~_unchanged(name, before[name], a) for name, a in call.outputs.items()}


def _bound(case: Case, contract: dict[str, float], op: str, impl: str, name: str, output: np.ndarray) -> float:
    kind = "o" if name == "o" else "state"
    limit = contract[kind]
    if "recurrent" in contract and (op == "recurrent" or impl.startswith("reference")):
        limit = contract["recurrent"]
    return max(limit, _ROUNDED[kind]) if output.dtype.itemsize == 2 else limit


_last_recurrence: tuple[Inputs, dict[str, np.ndarray]] | None = None


def _recurrence(case: Case, x: Inputs) -> dict[str, np.ndarray]:
    """The NumPy recurrence; both operators of a case share one run."""
    global _last_recurrence
    if _last_recurrence is None or _last_recurrence[0] is not x:
        _last_recurrence = (x, oracle.recurrence(case, x))
    return _last_recurrence[1]


def _independent_problems(
    case: Case, x: Inputs, want: dict[str, np.ndarray], written: dict[str, np.ndarray]
) -> list[str]:
    problems = []
    for name, value in _recurrence(case, x).items():
        rows = written[name]
        error = relative_error(want[name][rows], value[rows])
        if error > _INDEPENDENT:
            problems.append(
                f"{name}: reference_fp64 is {error:.2e} from the NumPy recurrence, bound {_INDEPENDENT:.0e}"
            )
    return problems


def run_case(
    case: Case,
    x: Inputs,
    op: str,
    contracts: dict[str, dict[str, float]],
    impl: str | None = None,
    independent: bool = False,
    device: int | None = None,
) -> Result:
    """Runs one case through one operator and compares everything that it writes, and everything it must not.

    device: number of the GPU that it runs on; the oracle always is the CPU's.
    """
    want, written = run_oracle(case, x, op)
    problems = _independent_problems(case, x, want, written) if independent and oracle.covers(case) else []
    call = prepare(case, x, impl)
    plan = explain_on(device, OPS[op], call.struct.args)
    if plan.get("impl") is None:
        return Result(case.id, op, "-", {}, {}, [f"refused: {plan['error']}"])
    before = {name: a.copy() for name, a in call.outputs.items()}
    _invoke(call, op, device)
    contract = contracts[case.contract]
    loop = _loop_outputs(case, x, op) if "loop_ratio" in contract else {}
    errors, bounds = {}, {}
    for name, output in call.outputs.items():
        rows = written[name]
        found, expected = output[rows].astype(np.float64), want[name][rows]
        errors[name] = relative_error(found, expected)
        if loop:
            bounds[name] = max(contract["loop_ratio"] * relative_error(loop[name][rows], expected), _FP32_LOOP)
        else:
            bounds[name] = _bound(case, contract, op, plan["impl"], name, output)
        if not errors[name] <= bounds[name]:
            problems.append(
                f"{name}: relative L2 error {errors[name]:.2e}, bound {bounds[name]:.1e}; "
                f"{describe_worst(found, expected)}"
            )
        stray = ~_unchanged(name, before[name], output) & ~rows
        if stray.any():
            problems.append(f"{name}: {int(stray.sum())} rows or slots changed that the call must leave alone")
    return Result(case.id, op, plan["impl"], errors, bounds, problems)


def _loop_outputs(case: Case, x: Inputs, op: str) -> dict[str, np.ndarray]:
    """The fp32 token loop: the yardstick where the recurrence itself expands."""
    call = prepare(case, x, "reference_fp32")
    _invoke(call, op)
    return {name: a.astype(np.float64) for name, a in call.outputs.items()}
