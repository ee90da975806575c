# SPDX-License-Identifier: MIT
"""Random shapes and features through the whole harness (guards, unchanged inputs, fp64 oracle, contract bounds)."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import Call, capi, run_case
from oracle.cases import Case, draw, make_case

SETTINGS = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,  # the same examples on every machine and run
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
DTYPES = ["f32", "bf16", "f16"]


@st.composite
def rule_cases(draw_from: Any) -> tuple[Case, str]:
    """A legal case with any combination of features, and an operator."""
    pick = lambda *xs: draw_from(st.sampled_from(xs))  # noqa: E731
    flag = lambda: draw_from(st.booleans())  # noqa: E731
    hk, ratio = pick(1, 2, 3), pick(1, 2, 3, 4)
    op = pick("chunk_forward", "recurrent")
    dtype = pick(*DTYPES)
    f: dict[str, Any] = {
        "Hk": hk, "Hv": hk * ratio, "K": draw_from(st.integers(1, 140)), "V": draw_from(st.integers(1, 140)),
        "dtype": dtype, "gate_dtype": pick(*DTYPES), "state_dtype": pick(*DTYPES), "o_dtype": pick(*DTYPES),
        "head_map": pick("grouped", "tiled"), "state_layout": pick("k_first", "v_first"),
        "index_dtype": pick("i32", "i64"),
        "null_slots": pick("negative", "non_positive"), "state_pad": pick("none", "slot", "row"),
        "layout": pick("contiguous", "misaligned", "padded", "strided", "head_major", "packed", "gates_interleaved"),
        "keys": pick("unit", "positive"), "g": pick("model", "zero", "half_zero", "very_negative", "absent"),
        "beta": pick("uniform", "absent"), "batch_invariant": flag(), "initial": pick("random", "random", "none"),
    }  # fmt: skip
    if f["g"] != "absent":
        f["gate_form"] = pick("log", "linear", "raw")
    if f["beta"] != "absent":
        f["beta_form"] = pick("value", "sigmoid")
    if flag():
        f["qk_l2norm"], f["keys"], f["round_qk"] = True, "normal", flag()
    if flag():
        lens = draw_from(st.lists(st.integers(0, 75), min_size=1, max_size=5))
        f["lens"], f["T"] = lens, sum(lens) + draw_from(st.integers(0, 3))
    else:
        f["B"], f["T"] = draw_from(st.integers(1, 3)), draw_from(st.integers(0, 140))
    count = len(f["lens"]) if "lens" in f else f["B"]
    floor = 1 if f["null_slots"] == "non_positive" else 0
    if f["initial"] == "random":
        if flag():
            f["slots"] = 2 * count + 2
            slots = draw_from(st.permutations(range(floor, f["slots"])))
            f["read"] = [-1 if draw_from(st.integers(0, 4)) == 0 else slots[n] for n in range(count)]
        f["final"] = pick("in_place", "separate", "none")
        if "read" not in f and f["final"] != "none" and flag():
            f["has_initial"] = [int(flag()) for _ in range(count)]
    else:
        f["final"] = pick("separate", "none")
    if flag():
        f["checkpoint_every"] = draw_from(st.integers(1, 70))
    if op == "recurrent" and flag():
        f["snapshots"] = max(f.get("lens") or [f["T"]], default=0) + draw_from(st.integers(0, 2)) or 1
        f["T"] = f["T"] if "lens" in f else min(f["T"], 20)
    f["contract"] = "fp32" if dtype == "f32" else "bf16"
    seed = draw_from(st.integers(0, 2**16))
    return make_case(id=f"random_{seed}", **f), op


@SETTINGS
@given(rule_cases())
def test_random_calls(drawn: tuple[Case, str]) -> None:
    case, op = drawn
    # Rounded q, k, beta (16-bit inputs) and 16-bit states are the contract's own bounds; see harness.bound_of.
    run_case(case, op)


@SETTINGS
@given(st.integers(0, 200), st.integers(1, 6), st.integers(1, 100), st.integers(1, 100), st.integers(1, 9))
def test_threads_never_change_bits(tokens: int, heads: int, k: int, v: int, threads: int) -> None:
    case = make_case(id=f"threads_{tokens}", contract="fp32", T=tokens, Hk=1, Hv=heads, K=k, V=v)
    x = draw(case)
    results = []
    for n in (1, threads):
        call = Call(case, x, "chunk_forward", num_threads=n)
        call.run()
        results.append([b.view.tobytes() for b in call.outputs.values()])
    assert results[0] == results[1]


@SETTINGS
@given(
    st.sampled_from(["q", "k", "v", "g", "beta", "o", "initial_state", "final_state"]),
    st.sampled_from(["shape", "strides", "dtype", "ndim", "data", "device_type"]),
    st.integers(-3, 9),
    st.integers(0, 3),
)
def test_a_wrong_field_is_refused_before_anything_is_written(tensor: str, field: str, value: int, axis: int) -> None:
    """One field of one tensor changed: the refusal names function and argument, and nothing was written."""
    case = make_case(id="refused", contract="fp32", T=5, Hk=2, Hv=4, K=6, V=3)
    call = Call(case, draw(case), "chunk_forward")
    t = getattr(call.args, tensor).contents
    if field in ("shape", "strides"):
        if axis >= t.ndim or (field == "strides" and value >= 0):
            return  # unused entries, legal strides and overlaps: the last are test_overlap.cpp's
        if getattr(t, field)[axis] == value:
            return
        getattr(t, field)[axis] = value
    elif field == "data":
        t.data = None
    elif getattr(t, field) == value or (field == "dtype" and value in (1, 2, 3, 4)):
        return
    else:
        setattr(t, field, value)
    before = {name: b.raw.copy() for name, b in call.outputs.items()}
    try:
        call.run()
    except capi.Error as error:
        message = str(error)
        assert message.startswith("chunk_forward: argument '") and ": found " in message and ", expected " in message, (
            message
        )
        for name, b in call.outputs.items():
            assert np.array_equal(b.raw, before[name]), f"{name} was written although the call was refused"
    else:
        raise AssertionError(f"{tensor}.{field} = {value} was accepted")
