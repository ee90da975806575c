# SPDX-License-Identifier: MIT
"""Every case of the shared list against the fp64 recurrence, and both peers' formulas on the same inputs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from harness import Call, effective, inputs_and_oracle, relative_error, run_case
from oracle.cases import Case, load_cases
from oracle.chunk_torch import chunk_formula
from oracle.transformers_peer import torch_chunk

CASES = load_cases()


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """Small products: torch's threads would only fight over the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _params(cases: list[Case], ops: bool = True) -> list:
    marks = {True: pytest.mark.slow, False: ()}
    if not ops:
        return [pytest.param(c, id=c.id, marks=marks[c.slow]) for c in cases]
    return [pytest.param(c, op, id=f"{c.id}-{op}", marks=marks[c.slow]) for c in cases for op in c.ops]


@pytest.mark.parametrize(("case", "op"), _params(CASES))
def test_case(case: Case, op: str) -> None:
    run_case(case, op)


def _plain(case: Case) -> bool:
    """Cases whose call is one batch of whole sequences, so that the other formulas take them as they are."""
    named = ("lens", "lens_random", "slots", "checkpoint_every", "snapshots", "token_slots")
    return (
        "chunk_forward" in case.ops
        and all(case[x] is None for x in named if x in case)
        and case.contract != "expanding"
        and case.layout == "contiguous"
        and case.final == "separate"
        and 32 <= case["T"] <= 1024
    )


@pytest.mark.parametrize("case", _params([c for c in CASES if _plain(c)], ops=False))
def test_at_most_twice_the_plain_formula(case: Case) -> None:
    """Never more than twice the error of the same chunk formula in plain PyTorch at the same precision."""
    x, want = inputs_and_oracle(case)
    result = run_case(case, "chunk_forward")
    e = effective(case, x)
    state = np.zeros(want["final"].value.shape) if x.initial is None else x.initial.astype(np.float64)
    operands = torch.bfloat16 if result.isa == "amx" else torch.float32
    scale = case.scale or e["k"].shape[3] ** -0.5
    plain = chunk_formula(e["q"], e["k"], e["v"], e["g"], e["beta"], scale, state, case.head_map, operands=operands)
    for name, theirs in zip(("o", "final"), plain, strict=True):
        theirs = theirs.astype(result.values[name].dtype)  # stored in the same dtype as ours
        error = relative_error(theirs.astype(np.float64), want[name].value)
        # Below one rounding of the inputs' products both are noise: fp32 epsilon is the floor of the comparison.
        assert result.errors[name] <= max(2 * error, 2.4e-7), (
            f"{case.id} {name} ({result.impl}): error {result.errors[name]:.2e}, plain PyTorch formula {error:.2e}"
        )


def _transformers_takes(case: Case) -> bool:
    return (
        _plain(case)
        and case.head_map == "grouped"
        and not case.scale
        and not case.round_qk
        and case.g != "very_negative"
    )


@pytest.mark.parametrize("case", _params([c for c in CASES if _transformers_takes(c)], ops=False))
def test_agrees_with_transformers(case: Case) -> None:
    """The installed peer computes the same function: distances at most the sum of both errors' bounds."""
    x, want = inputs_and_oracle(case)
    result = run_case(case, "chunk_forward")
    e = effective(case, x)
    q, k, v, g, beta = (
        torch.from_numpy(np.ascontiguousarray(e[n], dtype=np.float32)) for n in ("q", "k", "v", "g", "beta")
    )
    state = None if x.initial is None else torch.from_numpy(x.initial.astype(np.float32))
    o, s = torch_chunk(q, k, v, g, beta, state)
    for name, theirs in (("o", o), ("final", s)):
        distance = relative_error(result.values[name].astype(np.float64), theirs.astype(np.float64))
        peer_error = relative_error(theirs.astype(np.float64), want[name].value)
        if not np.isfinite(peer_error):
            pytest.fail(f"{case.id}: Transformers' result is not finite")
        assert distance <= (result.errors[name] + peer_error) * 1.01 + 1e-7, f"{case.id} {name}: {distance:.2e}"


def test_every_reported_class_has_cases() -> None:
    classes = {c["class"] for c in CASES}
    wanted = set("gate inverse l2norm lengths dims layout dtypes pools strides checkpoints verify".split())
    assert wanted <= classes, f"no case of {sorted(wanted - classes)}"
    assert len({c.id for c in CASES}) == len(CASES)


def test_harness_sees_a_touched_guard() -> None:
    """The harness itself: a byte outside the view, an unwritten element or a changed input must be found."""
    case = next(c for c in CASES if c.id == "varlen_ends_early")
    x, want = inputs_and_oracle(case)
    for spoil in (
        lambda call: call.outputs["o"].view.__setitem__((0, 10, 0, 0), 1.0),
        lambda call: call.outputs["o"].raw.__setitem__(10, 0),
        lambda call: call.inputs["q"].view.__setitem__((0, 0, 0, 0), 9.0),
        lambda call: call.inputs["q"].raw.__setitem__(-1, 0),
    ):
        call = Call(case, x, "chunk_forward")
        run = call.run
        call.run = lambda call=call, run=run, spoil=spoil: (run(), spoil(call))
        with pytest.raises(AssertionError, match="bytes changed"):
            call.run_checked(want)
