# SPDX-License-Identifier: MIT
"""Classes of public reports that need more than one call: resumed runs, verify, repeats, index width, drift, memory.

Duplicate write slots (GDN_CHECK=1) are tested in tests/cpp/test_debug_check.cpp, refusals in test_validate_*.cpp.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from pathlib import Path

import numpy as np
import pytest

from harness import (
    OPS,
    Call,
    capi,
    describe_worst,
    effective,
    implementations,
    inputs_and_oracle,
    relative_error,
    run_case,
)
from oracle.cases import DTYPES, Case, Inputs, draw, expected, get_case, make_case
from oracle.recurrence import recurrence


def call_once(case: Case, x: Inputs, op: str, **kw: int) -> Call:
    call = Call(case, x, op, **kw)
    call.run()
    return call


def part(x: Inputs, begin: int, end: int, state: np.ndarray | None) -> Inputs:
    """Tokens [begin, end) of a batch, with a state."""
    rows = slice(begin, end)
    return Inputs(
        q=x.q[:, rows], k=x.k[:, rows], v=x.v[:, rows], g=x.g[:, rows], beta=x.beta[:, rows],
        A_log=x.A_log, dt_bias=x.dt_bias, initial=state,
    )  # fmt: skip


def outputs(call: Call) -> list[bytes]:
    return [b.view.tobytes() for b in call.outputs.values()]


# ---------------------------------------------------------------- rounding switches
@pytest.mark.parametrize("switch", ["round_qk", "round_beta"])
@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_rounding_switches_do_what_they_say(switch: str, on: bool, op: str) -> None:
    """bf16 q, k and logits with an fp32 output and state, so that the switch itself (1e-3) is not lost in a bf16 bound.

    Implementations on 16-bit matrix units round more than the switch: they are left to the case list.
    """
    fields = {"qk_l2norm": True, "keys": "normal"} if switch == "round_qk" else {"beta_form": "sigmoid"}
    case = make_case(
        id=f"{switch}_{on}",
        contract="fp32",
        T=130,
        K=128,
        V=64,
        dtype="bf16",
        v_dtype="f32",
        o_dtype="f32",
        gate_dtype="bf16",
        **fields,
        **{switch: on},
    )
    x, want = inputs_and_oracle(case)
    other = expected(Case({**case, switch: not on}), x)
    # With rounding, a norm computed in fp32 may put an element of a key on the other side of a boundary than fp64 does;
    # one such element moves o by 1e-4 here (measured: 1.08e-4 with every fp32 implementation, 3e-8 with the fp64 one).
    bound = 2e-4 if on else 5e-6
    for name in implementations(case, op):
        if "amx" in name:
            continue
        call = Call(case, x, op, impl=name)
        call.run()
        o = call.outputs["o"].view.astype(np.float64)
        assert relative_error(o, want["o"].value) <= bound, f"{name}: {describe_worst(o, want['o'].value)}"
        assert relative_error(o, other["o"].value) >= 5e-4, f"{name}: {switch} = {on} makes no difference"


# ---------------------------------------------------------------- resumed runs
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("total", "cut"), [(5, 4), (2300, 1792), (300, 1), (300, 257)])
def test_cut_and_carried(total: int, cut: int, dtype: str) -> None:
    """chunk(5) = chunk(4) + one recurrent step; T = 2300 at once = 1792 + 508 carried."""
    case = make_case(id=f"carried_{total}_{cut}", contract="fp32", T=total, Hv=2, K=64, V=48, dtype=dtype)
    x, want = inputs_and_oracle(case)
    head = call_once(case, part(x, 0, cut, x.initial), "chunk_forward")
    tail_op = "recurrent" if total - cut == 1 else "chunk_forward"
    tail = call_once(case, part(x, cut, total, head.outputs["final_state"].view.copy()), tail_op)
    o = np.concatenate([head.outputs["o"].view, tail.outputs["o"].view], axis=1).astype(np.float64)
    bound = 5e-6 if dtype == "f32" else 5e-3
    assert relative_error(o, want["o"].value) <= bound, describe_worst(o, want["o"].value)
    final = tail.outputs["final_state"].view.astype(np.float64)
    assert relative_error(final, want["final"].value) <= (5e-6 if dtype == "f32" else 4.5e-3)


def test_back_to_back_calls_share_a_pool() -> None:
    """Eight calls on one pool, slots in changing order, nothing in between: the serial recurrence of every slot."""
    rng = np.random.default_rng(3)
    slots, steps = 6, 8
    case = make_case(id="shared_pool", contract="fp32", B=3, T=7, Hk=2, Hv=4, K=32, V=48, slots=slots, final="in_place")
    pool = rng.standard_normal((slots, 4, 32, 48)).astype(np.float32)
    truth = pool.astype(np.float64)
    for step in range(steps):
        chosen = [int(s) for s in rng.permutation(slots)[:3]]
        now = Case({**case, "id": f"shared_pool_{step}", "read": chosen})
        x = draw(now)
        x.initial = pool
        call = call_once(now, x, "chunk_forward" if step % 2 else "recurrent")
        pool = call.outputs["final_state"].view.copy()
        e = effective(now, x)
        _, truth[chosen] = recurrence(e["q"], e["k"], e["v"], e["g"], e["beta"], 32**-0.5, truth[chosen])
    assert relative_error(pool.astype(np.float64), truth) <= 5e-6, describe_worst(pool.astype(np.float64), truth)


# ---------------------------------------------------------------- verify and continue
@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("layout", ["k_first", "v_first"])
def test_snapshots_accept_and_continue(accepted: int, layout: str) -> None:
    """SGLang's way: verify 4 tokens without touching the pool, commit the accepted prefix, go on: serial decode."""
    batch, drafts, more = 8, 4, 3
    base = make_case(
        id=f"accept_{accepted}", contract="fp32", B=batch, T=drafts + more, Hk=2, Hv=4, K=64, V=32, state_layout=layout
    )
    x = draw(base)
    verify = Case({**base, "final": "none", "snapshots": drafts})
    first = call_once(verify, part(x, 0, drafts, x.initial), "recurrent")
    assert np.array_equal(first.inputs["initial_state"].view, x.initial), "the pool was touched"
    snapshots = first.outputs["snapshots"].view
    state = x.initial.copy() if accepted == 0 else snapshots[:, accepted - 1].copy()
    rest = call_once(base, part(x, drafts, drafts + more, state), "recurrent")
    # Serial decode of the accepted drafts and what follows: bits may not depend on how tokens are grouped into calls.
    serial, serial_o = x.initial, []
    for t in [*range(accepted), *range(drafts, drafts + more)]:
        step = call_once(base, part(x, t, t + 1, serial), "recurrent")
        serial = step.outputs["final_state"].view.copy()
        serial_o.append(step.outputs["o"].view.copy())
    o = np.concatenate([first.outputs["o"].view[:, :accepted], rest.outputs["o"].view], axis=1)
    want = np.concatenate(serial_o, axis=1)
    assert relative_error(o.astype(np.float64), want.astype(np.float64)) <= 1e-6, describe_worst(o, want)
    final = rest.outputs["final_state"].view
    assert relative_error(final.astype(np.float64), serial.astype(np.float64)) <= 1e-6


@pytest.mark.parametrize("accepted", range(1, 6))
def test_token_slots_accept_and_continue(accepted: int) -> None:
    """vLLM's way: every token's state to its own slot; the next step starts from slot num_accepted - 1."""
    width, more = 5, 5
    base = make_case(
        id=f"slots_{accepted}",
        contract="fp32",
        B=2,
        T=width + more,
        Hk=2,
        Hv=4,
        K=32,
        V=64,
        slots=11,
        state_layout="v_first",
        null_slots="non_positive",
        final="in_place",
    )
    x = draw(base)
    table = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    start = x.initial.copy()
    one = Case({**base, "token_slots": table, "num_accepted": [1, 1]})
    first = call_once(one, part(x, 0, width, start), "recurrent")
    pool = first.outputs["final_state"].view.copy()
    two = Case({**base, "token_slots": table, "num_accepted": [accepted, accepted]})
    second = call_once(two, part(x, width, width + more, pool), "recurrent")
    serial = start[[1, 6]]
    plain = make_case(**{**base, "slots": None, "final": "separate", "null_slots": "negative"})
    for t in [*range(accepted), *range(width, width + more)]:
        step = call_once(plain, part(x, t, t + 1, serial), "recurrent")
        serial = step.outputs["final_state"].view.copy()
    got = second.outputs["final_state"].view[[5, 10]].astype(np.float64)
    assert relative_error(got, serial.astype(np.float64)) <= 1e-6, describe_worst(got, serial.astype(np.float64))
    assert np.array_equal(second.outputs["final_state"].view[0], start[0]), "slot 0 was touched"


# ---------------------------------------------------------------- races, invariance
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_hundred_repeats_are_bit_identical(op: str, dtype: str) -> None:
    """At least 256 units of work, 100 times, several thread counts: the same bits."""
    case = make_case(
        id="repeats", contract="fp32", B=8, T=70 if op == "chunk_forward" else 3, Hk=16, Hv=32, K=32, V=32, dtype=dtype
    )
    x = draw(case)
    first = outputs(call_once(case, x, op))
    call = Call(case, x, op)
    for repeat in range(100):
        for buffer in call.outputs.values():
            buffer.view[...] = np.nan
        call.args.num_threads = (0, 1, 2, 3, 8)[repeat % 5]
        call.run()
        assert outputs(call) == first, f"repeat {repeat} with num_threads {call.args.num_threads} differs"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("long", [1, 5, 64, 200])
def test_batch_invariant(op: str, dtype: str, long: int) -> None:
    """One sequence alone against the same in a batch of 62: equal bits."""
    rng = np.random.default_rng(long)
    lens = [int(n) for n in rng.integers(0, 90, 61)]
    where = 23
    lens.insert(where, long)
    case = make_case(
        id=f"invariant_{long}",
        contract="fp32",
        lens=lens,
        T=sum(lens),
        Hk=1,
        Hv=2,
        K=64,
        V=64,
        dtype=dtype,
        batch_invariant=True,
    )
    x = draw(case)
    together = call_once(case, x, op)
    begin = sum(lens[:where])
    alone_case = Case({**case, "lens": [long], "T": long})
    alone_x = part(x, begin, begin + long, x.initial[where : where + 1])
    alone_x.lens, alone_x.varlen = [long], True
    alone = call_once(alone_case, alone_x, op)
    o = together.outputs["o"].view[:, begin : begin + long]
    assert alone.outputs["o"].view.tobytes() == np.ascontiguousarray(o).tobytes(), "o differs in bits"
    final = together.outputs["final_state"].view[where]
    assert alone.outputs["final_state"].view[0].tobytes() == np.ascontiguousarray(final).tobytes(), (
        "state differs in bits"
    )


@pytest.mark.parametrize("op", OPS)
def test_no_initial_state_equals_a_zero_one(op: str) -> None:
    case = make_case(id="zero_state", contract="fp32", T=100, Hv=2, K=64, V=32)
    x = draw(case)
    x.initial = np.zeros_like(x.initial)
    zero = outputs(call_once(case, x, op))
    x.initial = None
    assert outputs(call_once(case, x, op)) == zero


def test_gate_dtypes_alternate_in_one_process() -> None:
    """g fp32, then bf16, then fp32: no choice is cached across calls."""
    for gate_dtype in ("f32", "bf16", "f16", "f32", "bf16"):
        run_case(get_case("len_128", gate_dtype=gate_dtype, id=f"alternate_{gate_dtype}"), "chunk_forward")
        run_case(get_case("len_2", gate_dtype=gate_dtype, id=f"alternate_{gate_dtype}"), "recurrent")


@pytest.mark.parametrize("op", OPS)
def test_zero_gate_equals_no_gate(op: str) -> None:
    case = get_case("gate_half_zero_k100_bf16", g="zero")
    x = draw(case)
    with_gate = outputs(call_once(case, x, op))
    x.g = None
    assert outputs(call_once(case, x, op)) == with_gate


# ---------------------------------------------------------------- index width
class Lazy:
    """An anonymous mapping of many GiB of which only touched pages exist."""

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self.map = mmap.mmap(-1, num_bytes, flags=flags)
        self.bytes = np.frombuffer(self.map, np.uint8)

    def view(self, dtype: object, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> np.ndarray:
        """Strides and offset in elements."""
        flat = self.bytes.view(dtype)[offset:]
        return np.lib.stride_tricks.as_strided(flat, shape, tuple(s * flat.itemsize for s in strides), writeable=True)


def tensor_of(a: np.ndarray) -> capi.Tensor:
    from harness import DTYPE_CODES

    t = capi.Tensor()
    t.data, t.device_type, t.dtype, t.ndim = a.ctypes.data, capi.CPU, DTYPE_CODES[a.dtype], a.ndim
    for i in range(a.ndim):
        t.shape[i], t.strides[i] = a.shape[i], a.strides[i] // a.itemsize
    return t


def rule_args(keep: list, **fields: object) -> capi.RuleArgs:
    args = capi.RuleArgs()
    args.struct_size = ctypes.sizeof(capi.RuleArgs)
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            tensor = tensor_of(value)
            keep.append(tensor)
            value = ctypes.pointer(tensor)
        setattr(args, name, value)
    return args


@pytest.mark.parametrize("function", ["gdn_chunk_forward", "gdn_recurrent"])
def test_row_stride_10240_with_209716_tokens(function: str) -> None:
    """Offsets pass 2^31 elements. Tokens in the middle are zero (no-ops with g = 0), so their pages never exist."""
    rows, stride, K, V, ends = 209_716, 10_240, 16, 8, 100
    bf16 = DTYPES["bf16"]
    assert rows * stride > 2**31
    lazy = Lazy(rows * stride * 2)
    q = lazy.view(bf16, (1, rows, 1, K), (rows * stride, stride, K, 1))
    k = lazy.view(bf16, (1, rows, 1, K), (rows * stride, stride, K, 1), 64)
    v = lazy.view(bf16, (1, rows, 1, V), (rows * stride, stride, V, 1), 128)
    case = make_case(
        id="wide_rows",
        contract="bf16",
        T=2 * ends,
        Hk=1,
        Hv=1,
        K=K,
        V=V,
        dtype="bf16",
        g="zero",
        beta_lo=0.5,
        beta_hi=0.5,
    )
    x, want = inputs_and_oracle(case)
    where = np.r_[0:ends, rows - ends : rows]
    for view, value in ((q, x.q), (k, x.k), (v, x.v)):
        for i, row in enumerate(where):
            view[0, row] = value[0, i]
    g, beta = np.zeros((1, rows, 1), np.float32), np.full((1, rows, 1), 0.5, np.float32)
    o, final, keep = np.full((1, rows, 1, V), np.nan, bf16), np.full((1, 1, K, V), np.nan, np.float32), []
    args = rule_args(keep, q=q, k=k, v=v, g=g, beta=beta, o=o, initial_state=x.initial, final_state=final)
    capi.check(getattr(capi.lib, function)(ctypes.byref(args)))
    got = o[0, where].astype(np.float64)
    assert relative_error(got, want["o"].value[0]) <= 5e-3, describe_worst(got, want["o"].value[0])
    assert relative_error(final.astype(np.float64), want["final"].value) <= 4.5e-3
    assert not np.any(o[0, ends : rows - ends].astype(np.float32)), "zero queries give zero"


@pytest.mark.parametrize("function", ["gdn_chunk_forward", "gdn_recurrent"])
def test_outputs_and_states_past_2_31_elements(function: str) -> None:
    """Batch stride of every tensor and slot stride of the pool beyond 2^31 elements."""
    big = 2**31 + 128
    T, K, V = 70, 16, 24
    case = make_case(id="far_outputs", contract="fp32", B=2, T=T, Hk=1, Hv=2, K=K, V=V)
    x, want = inputs_and_oracle(case)
    lazy, pool = Lazy((big + 2**20) * 4), Lazy((big + 2**20) * 4)
    arrays, at = {}, 0
    for name, value in (("q", x.q), ("k", x.k), ("v", x.v), ("g", x.g), ("beta", x.beta), ("o", x.v)):
        inner = [s // 4 for s in value.strides[1:]]
        arrays[name] = lazy.view(np.float32, value.shape, (big, *inner), at)
        at += value[0].size + 16
        if name != "o":
            arrays[name][...] = value
    states = pool.view(np.float32, (2, 2, K, V), (big, K * V, V, 1))
    states[...] = x.initial
    keep: list = []
    args = rule_args(keep, **arrays, initial_state=states, final_state=states)
    capi.check(getattr(capi.lib, function)(ctypes.byref(args)))
    got = arrays["o"].astype(np.float64)
    assert relative_error(got, want["o"].value) <= 5e-6, describe_worst(got, want["o"].value)
    assert relative_error(states.astype(np.float64), want["final"].value) <= 5e-6


# ---------------------------------------------------------------- drift
# Stated drift of a state kept in bf16 between steps, against the fp64 recurrence: every step rounds it once.
BF16_STATE_DRIFT = 2e-2


@pytest.mark.parametrize(("state_dtype", "bound"), [("f32", 5e-6), ("bf16", BF16_STATE_DRIFT)])
def test_drift_over_4096_decode_steps(state_dtype: str, bound: float) -> None:
    steps = 4096
    case = make_case(
        id="drift", contract="fp32", B=1, T=steps, Hk=2, Hv=2, K=64, V=64, state_dtype=state_dtype, final="in_place"
    )
    x = draw(case)
    e = effective(case, x)
    o64, s64 = recurrence(e["q"], e["k"], e["v"], e["g"], e["beta"], 64**-0.5, x.initial.astype(np.float64))
    call = Call(case, part(x, 0, 1, x.initial), "recurrent")
    o = np.empty(x.v.shape, np.float64)
    for t in range(steps):
        for name, value in (("q", x.q), ("k", x.k), ("v", x.v), ("g", x.g), ("beta", x.beta)):
            call.inputs[name].view[0, 0] = value[0, t]
        call.run()
        o[:, t] = call.outputs["o"].view[:, 0]
    assert call.outputs["final_state"].view.dtype == DTYPES[state_dtype]
    final = call.outputs["final_state"].view.astype(np.float64)
    assert relative_error(final, s64) <= bound, f"{relative_error(final, s64):.2e}; {describe_worst(final, s64)}"
    halves = [relative_error(o[:, h], o64[:, h]) for h in (slice(0, steps // 2), slice(steps // 2, steps))]
    assert max(halves) <= bound, f"o drifts: {halves}"
    assert halves[1] <= 2 * halves[0] + 1e-7, f"the drift grows with the number of steps: {halves}"


def test_bf16_inputs_keep_an_fp32_state_for_100_steps() -> None:
    case = make_case(id="steps100", contract="fp32", B=1, T=100, Hk=1, Hv=2, K=64, V=32, dtype="bf16")
    x, want = inputs_and_oracle(case)
    state = x.initial
    for t in range(100):
        state = call_once(case, part(x, t, t + 1, state), "recurrent").outputs["final_state"].view.copy()
    assert state.dtype == np.float32
    # Nothing but fp32 rounding: a state rounded to bf16 once would be off by 1e-3.
    assert relative_error(state.astype(np.float64), want["final"].value) <= 5e-6


# ---------------------------------------------------------------- cost and memory
def test_short_sequences_cost_about_as_much_as_whole_chunks() -> None:
    """Sequences of 32 or 63 tokens against as many of 64: no more time (30 % for the noise of a shared machine)."""
    calls = {}
    for length in (32, 63, 64):
        lens = [length] * 256
        case = make_case(id=f"cost_{length}", contract="fp32", lens=lens, T=sum(lens), Hk=2, Hv=4, K=64, V=64)
        calls[length] = Call(case, draw(case), "chunk_forward", num_threads=1)
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(7):
        for length, call in calls.items():
            begin = time.thread_time()
            call.run()
            best[length] = min(best[length], time.thread_time() - begin)
    assert max(best[32], best[63]) <= 1.3 * best[64], best


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_no_memory_growth_over_repeated_calls() -> None:
    case = make_case(id="leak", contract="fp32", B=2, T=1024, Hk=4, Hv=16, K=64, V=64)
    call = Call(case, draw(case), "chunk_forward")
    for _ in range(5):
        call.run()
    before = resident_bytes()
    for _ in range(100):
        call.run()
    assert resident_bytes() - before <= 4 << 20


def test_peak_memory_beyond_inputs_and_outputs() -> None:
    """Below 2 % of inputs and outputs at T = 65,536: nothing of size T is ever copied."""
    case = make_case(id="peak", contract="fp32", T=65536, Hk=1, Hv=2, K=64, V=64)
    call = Call(case, draw(case), "chunk_forward")
    for buffer in call.outputs.values():
        buffer.view[...] = 0
    total = sum(b.view.nbytes for b in (*call.inputs.values(), *call.outputs.values()))
    capi.release_memory()
    status = Path("/proc/self/clear_refs")
    try:
        status.write_text("5")  # the peak starts over
    except OSError as error:
        pytest.skip(f"the kernel does not let the peak start over: {error}")

    def peak() -> int:
        line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
        return int(line.split()[1]) << 10

    before = peak()
    call.run()
    assert peak() - before <= 0.02 * total, f"{(peak() - before) >> 10} KiB beyond {total >> 20} MiB"
