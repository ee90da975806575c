# SPDX-License-Identifier: MIT
"""Convolution, gate, norms and rotary against their formulas in fp64, in the same guarded memory as the delta rule."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from harness import Buffer, capi, describe_worst, relative_error
from oracle.cases import DTYPES
from oracle.recurrence import raw_gate, sigmoid

# Relative L2 of one rounding to the output dtype, doubled: an operator may round nothing but its result.
BOUND = {"f32": 1e-6, "bf16": 4e-3, "f16": 5e-4}


class OpCall:
    """Arguments of an elementwise operator or the convolution, all in guarded buffers."""

    def __init__(self, struct: type, function: str, **scalars: Any) -> None:
        self.args, self._function, self._keep = struct(), getattr(capi.lib, function), []
        self.args.struct_size = ctypes.sizeof(struct)
        self.inputs: dict[str, Buffer] = {}
        self.outputs: dict[str, Buffer] = {}
        for name, value in scalars.items():
            setattr(self.args, name, value)

    def _attach(self, field: str, buffer: Buffer) -> None:
        tensor = buffer.tensor()
        self._keep.append(tensor)
        setattr(self.args, field, ctypes.pointer(tensor))

    def input(self, field: str, value: Any, dtype: str, **layout: Any) -> np.ndarray:
        """Adds an input; returns the rounded values in fp64."""
        if value is None:
            return None
        value = np.asarray(value).astype(DTYPES[dtype])
        self.inputs[field] = Buffer(value.shape, value.dtype, name=field, **layout).set(value)
        self._attach(field, self.inputs[field])
        return value.astype(np.float64)

    def output(self, field: str, shape: tuple[int, ...], dtype: str, value: Any = None, **layout: Any) -> Buffer:
        buffer = Buffer(shape, DTYPES[dtype], name=field, **layout)
        if value is not None:
            buffer.set(value)
        self.outputs[field] = buffer
        self._attach(field, buffer)
        return buffer

    def alias(self, field: str, buffer: Buffer) -> None:
        self._attach(field, buffer)

    def run(self, written: dict[str, np.ndarray] | None = None) -> None:
        for buffer in (*self.inputs.values(), *self.outputs.values()):
            buffer.remember()
        capi.check(self._function(ctypes.byref(self.args)))
        for buffer in self.inputs.values():
            buffer.assert_kept()
        for field, buffer in self.outputs.items():
            mask = (written or {}).get(field)
            buffer.assert_kept(np.ones(buffer.shape, bool) if mask is None else mask)


def check(buffer: Buffer, want: np.ndarray, dtype: str, what: str) -> None:
    got = buffer.view.astype(np.float64)
    error = relative_error(got, want)
    assert error <= BOUND[dtype], f"{what}: relative L2 error {error:.2e} > {BOUND[dtype]}; {describe_worst(got, want)}"


# ---------------------------------------------------------------- convolution
def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def conv_oracle(x: np.ndarray, w: np.ndarray, bias: Any, context: np.ndarray, act: bool) -> np.ndarray:
    """x [D, T], context [D, W-1] (older inputs) -> y [D, T]."""
    full, width = np.concatenate([context, x], axis=1), w.shape[1]
    y = sum(w[:, j : j + 1] * full[:, j : j + x.shape[1]] for j in range(width))
    y = y if bias is None else y + bias[:, None]
    return silu(y) if act else y


CONV_LAYOUTS = {
    "channel_first": {},
    "token_major": {"order": (0, 2, 1)},
    "token_major_packed": {"order": (0, 2, 1), "pads": {1: 24}, "offset": 3},
    "strided": {"steps": {-1: 2}, "offset": 1},
}


@pytest.mark.parametrize("layout", CONV_LAYOUTS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(
    ("width", "channels", "tokens"), [(4, 96, 70), (4, 37, 1), (2, 64, 3), (3, 5, 130), (1, 16, 9), (16, 20, 40)]
)
def test_conv_prefill(layout: str, dtype: str, width: int, channels: int, tokens: int) -> None:
    rng = np.random.default_rng(width + channels)
    for act, has_bias, length in ((True, False, None), (False, True, width - 1), (True, True, width + 2)):
        if length == 0:
            continue
        call = OpCall(capi.Conv1dArgs, "gdn_causal_conv1d", activation=int(act))
        x = call.input("x", rng.standard_normal((2, channels, tokens)), dtype, **CONV_LAYOUTS[layout])
        w = call.input("weight", rng.standard_normal((channels, width)) * 0.5, dtype)
        bias = call.input("bias", rng.standard_normal(channels), "f32") if has_bias else None
        state = np.zeros((2, channels, width - 1))
        if length:
            state = call.input("initial_state", rng.standard_normal((2, channels, length)), dtype)
            final = call.output("final_state", (2, channels, length), dtype)
        y = call.output("y", x.shape, dtype, **CONV_LAYOUTS[layout])
        call.run()
        context = state[:, :, state.shape[2] - (width - 1) :]
        want = np.stack([conv_oracle(x[b], w, bias, context[b], act) for b in range(2)])
        check(y, want, dtype, f"y, W {width}, bias {has_bias}")
        if length:
            carried = np.concatenate([state, x], axis=2)[:, :, -length:]
            assert np.array_equal(final.view.astype(np.float64), carried), "the new state is not the last inputs"


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_conv_varlen_pool(dtype: str) -> None:
    """Empty and one-token rows, fresh and carried, a null slot, rows past the end, in place in a pool."""
    lens, D, W, T = [5, 0, 1, 40, 3], 48, 4, 52
    read, has_initial = [4, 1, 3, 6, -1], [1, 1, 0, 1, 1]
    rng = np.random.default_rng(7)
    call = OpCall(capi.Conv1dArgs, "gdn_causal_conv1d", activation=1)
    x = call.input("x", rng.standard_normal((1, D, T)), dtype, order=(0, 2, 1))
    w = call.input("weight", rng.standard_normal((D, W)) * 0.5, "f32")
    begin = np.concatenate([[0], np.cumsum(lens)])
    call.input("cu_seqlens", begin, "i64")
    call.input("initial_state_indices", read, "i32")
    call.input("has_initial_state", has_initial, "u8")
    start = rng.standard_normal((8, D, W - 1)).astype(DTYPES[dtype])
    start[0] = np.nan
    pool = call.output("final_state", start.shape, dtype, value=start, pads={0: 1})
    call.alias("initial_state", pool)
    y = call.output("y", x.shape, dtype, order=(0, 2, 1))
    slots, rows = np.zeros(8, bool), np.zeros((1, D, T), bool)
    slots[[4, 1, 3, 6]] = True
    rows[:, :, : begin[-1]] = True
    call.run({"final_state": slots, "y": rows})
    before = start.astype(np.float64)
    for n in range(len(lens)):
        part = x[0][:, begin[n] : begin[n + 1]]
        got = y.view[0][:, begin[n] : begin[n + 1]].astype(np.float64)
        if read[n] < 0:
            assert not got.any(), "a null sequence gives zeros"
            continue
        context = before[read[n]] * has_initial[n] if has_initial[n] else np.zeros((D, W - 1))
        want = conv_oracle(part, w, None, context, True)
        assert relative_error(got, want) <= BOUND[dtype], f"sequence {n}: {describe_worst(got, want)}"
        carried = np.concatenate([context, part], axis=1)[:, -(W - 1) :]
        assert np.array_equal(pool.view[read[n]].astype(np.float64), carried), f"state of sequence {n}"


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_conv_state_over_eight_steps(dtype: str) -> None:
    """B = 2, one token at a time: the same as all tokens at once, and the state is the last inputs."""
    rng = np.random.default_rng(9)
    B, D, W, steps = 2, 40, 4, 8
    whole = rng.standard_normal((B, D, steps)).astype(DTYPES[dtype])
    weight = rng.standard_normal((D, W)).astype(np.float32)
    state = np.zeros((B, D, W - 1), DTYPES[dtype])
    got = []
    for t in range(steps):
        call = OpCall(capi.Conv1dArgs, "gdn_causal_conv1d", activation=1)
        call.input("x", whole[:, :, t : t + 1], dtype)
        call.input("weight", weight, "f32")
        pool = call.output("final_state", state.shape, dtype, value=state)
        call.alias("initial_state", pool)
        y = call.output("y", (B, D, 1), dtype)
        call.run()
        state = pool.view.copy()
        got.append(y.view.astype(np.float64))
    x, w = whole.astype(np.float64), weight.astype(np.float64)
    want = np.stack([conv_oracle(x[b], w, None, np.zeros((D, W - 1)), True) for b in range(B)])
    assert relative_error(np.concatenate(got, axis=2), want) <= BOUND[dtype]
    assert np.array_equal(state.astype(np.float64), x[:, :, -(W - 1) :])


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_conv_speculative_window(accepted: int) -> None:
    """vLLM's window: context from column accepted - 1, the new columns hold the context without its oldest and x."""
    rng = np.random.default_rng(accepted)
    D, W, T = 20, 4, 3
    L = W - 2 + T + 1
    call = OpCall(capi.Conv1dArgs, "gdn_causal_conv1d", activation=1)
    x = call.input("x", rng.standard_normal((1, D, T)), "f32")
    w = call.input("weight", rng.standard_normal((D, W)), "f32")
    call.input("num_accepted", [accepted], "i32")
    start = rng.standard_normal((1, D, L)).astype(np.float32)
    pool = call.output("final_state", start.shape, "f32", value=start)
    call.alias("initial_state", pool)
    y = call.output("y", x.shape, "f32")
    written = np.zeros((1, D, L), bool)
    written[:, :, : W - 2 + T] = True
    call.run({"final_state": written})
    context = start[0].astype(np.float64)[:, accepted - 1 : accepted - 1 + W - 1]
    check(y, conv_oracle(x[0], w, None, context, True)[None], "f32", "y")
    want = np.concatenate([context[:, 1:], x[0]], axis=1)
    assert np.array_equal(pool.view[0, :, : W - 2 + T].astype(np.float64), want)


def test_conv_in_place_over_x() -> None:
    """y may be exactly x, on long rows that several threads share."""
    rng = np.random.default_rng(1)
    D, T, W = 24, 5000, 4
    call = OpCall(capi.Conv1dArgs, "gdn_causal_conv1d", activation=1)
    start = rng.standard_normal((1, D, T)).astype(np.float32)
    w = call.input("weight", rng.standard_normal((D, W)), "f32")
    y = call.output("y", start.shape, "f32", value=start, order=(0, 2, 1))
    call.alias("x", y)
    call.run()
    check(y, conv_oracle(start[0].astype(np.float64), w, None, np.zeros((D, W - 1)), True)[None], "f32", "y over x")


# ---------------------------------------------------------------- gate
@pytest.mark.parametrize("rows", [1, 17, 1000])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("sigmoid2", [False, True])
def test_gate(rows: int, dtype: str, form: int, sigmoid2: bool) -> None:
    """Logits of +-100, A_log of +-10: beta in [0, 1] (or 2), g <= 0, alpha in [0, 1]; a and b are (2H, 2) views."""
    rng = np.random.default_rng(rows)
    H = 12
    call = OpCall(capi.GateArgs, "gdn_gate", gate_form=form, beta_form=2 if sigmoid2 else 1)
    a = call.input("a", rng.uniform(-100, 100, (rows, H)), dtype, steps={-1: 2})
    b = call.input("b", rng.uniform(-100, 100, (rows, H)), dtype, steps={-1: 2})
    a_log = call.input("A_log", np.linspace(-10, 10, H), "f32")
    dt_bias = call.input("dt_bias", rng.standard_normal(H), "f32")
    g, beta = call.output("g", (rows, H), "f32"), call.output("beta", (rows, H), "f32")
    call.run()
    want = raw_gate(a, a_log, dt_bias)
    top = 2.0 if sigmoid2 else 1.0
    assert (beta.view >= 0).all() and (beta.view <= top).all()
    if form == 0:
        assert (g.view <= 0).all()
        # Elementwise: large and tiny gates both count.
        close = np.abs(g.view - want) <= 1e-5 * np.abs(want) + 1e-30
        assert close.all(), describe_worst(np.where(close, want, g.view.astype(np.float64)), want)
    else:
        assert (g.view >= 0).all() and (g.view <= 1).all()
        # alpha = exp(g): a relative error of g of 4e-7 becomes |g| times that.
        alpha = np.exp(np.maximum(want, -104))
        close = np.abs(g.view - alpha) <= alpha * (1e-6 + 4e-7 * np.abs(want)) + 1e-37
        assert close.all(), describe_worst(np.where(close, alpha, g.view.astype(np.float64)), alpha)
    want_beta = top * sigmoid(b)
    close = np.abs(beta.view - want_beta) <= 2e-6 * want_beta + 1e-37
    assert close.all(), describe_worst(np.where(close, want_beta, beta.view.astype(np.float64)), want_beta)


# ---------------------------------------------------------------- gated norm
NORM_LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {}, "misaligned": {"offset": 1}, "rows_padded": {"pads": {-1: 7}}, "strided": {"steps": {-1: 2}},
}  # fmt: skip


@pytest.mark.parametrize("layout", NORM_LAYOUTS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("dim", [1, 64, 100, 128, 513])
def test_rmsnorm_gated(layout: str, dtype: str, dim: int) -> None:
    rng = np.random.default_rng(dim)
    for activation, first, centered, weighted in ((1, 0, 0, True), (2, 0, 0, True), (0, 0, 1, True), (1, 1, 0, False)):
        call = OpCall(
            capi.RmsnormGatedArgs,
            "gdn_rmsnorm_gated",
            eps=1e-6,
            activation=activation,
            gate_first=first,
            zero_centered=centered,
        )
        shape = (2, 9, 3, dim)
        x = call.input("x", rng.standard_normal(shape) * 3, dtype, **NORM_LAYOUTS[layout])
        z = call.input("z", rng.standard_normal(shape), dtype, **NORM_LAYOUTS[layout]) if activation else None
        w = call.input("weight", rng.standard_normal(dim), "f32") if weighted else np.ones(dim)
        out = call.output("out", shape, dtype, **NORM_LAYOUTS[layout])
        call.run()
        act = {0: lambda v: 1.0, 1: silu, 2: sigmoid}[activation](z)
        base = x * act if first else x
        n = base / np.sqrt((base * base).mean(-1, keepdims=True) + np.float32(1e-6)) * (1 + w if centered else w)
        check(
            out,
            n if first else n * act,
            dtype,
            f"activation {activation}, gate_first {first}, zero_centered {centered}",
        )


def test_rmsnorm_rounds_before_the_weight() -> None:
    """round_before_weight, with data that shows it: bf16 in, fp32 out."""
    rng = np.random.default_rng(5)
    call = OpCall(capi.RmsnormGatedArgs, "gdn_rmsnorm_gated", eps=1e-6, activation=0, round_before_weight=1)
    x = call.input("x", rng.standard_normal((50, 128)), "bf16")
    w = call.input("weight", rng.standard_normal(128), "f32")
    out = call.output("out", x.shape, "f32")
    call.run()
    n = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-6))
    want = n.astype(DTYPES["bf16"]).astype(np.float64) * w
    # n computed in fp32 may fall on the other side of a rounding boundary: one in a few thousand elements.
    differs = np.abs(out.view - want) > 1e-6 * np.abs(want)
    assert differs.mean() < 2e-3, f"{differs.mean():.1%} of the elements are not rounded before the weight"
    assert np.abs(out.view - want).max() <= 0.01 * np.abs(want).max()


# ---------------------------------------------------------------- q/k norm and rotary
def rotary(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [B, T, H, D]; cos, sin [B, T, R] (both halves)."""
    R = cos.shape[-1]
    c, s = cos[:, :, None], sin[:, :, None]
    head = x[..., :R]
    turned = np.concatenate([-head[..., R // 2 :], head[..., : R // 2]], axis=-1)
    return np.concatenate([head * c + turned * s, x[..., R:]], axis=-1)


def angles(positions: np.ndarray, theta: float, R: int, section: Any) -> np.ndarray:
    """positions [axes, B, T] -> [B, T, R/2]."""
    index = np.arange(R // 2)
    axis = np.zeros(R // 2, int)
    if section:
        axis[(index % 3 == 1) & (index < 3 * section[1])] = 1
        axis[(index % 3 == 2) & (index < 3 * section[2])] = 2
    inverse = theta ** (-2.0 * index / R)
    return np.moveaxis(positions[axis], 0, -1) * inverse


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("mode", ["cos_sin", "positions", "mrope"])
@pytest.mark.parametrize(("D", "R"), [(256, 64), (64, 64), (40, 12)])
def test_qk_rmsnorm_rope(dtype: str, mode: str, D: int, R: int) -> None:
    rng = np.random.default_rng(D)
    B, T, Hq, Hkv, eps = 2, 9, 4, 2, 1e-6
    section = {64: [11, 11, 10], 12: [2, 2, 2]}[R] if mode == "mrope" else None
    call = OpCall(capi.QkRmsnormRopeArgs, "gdn_qk_rmsnorm_rope", eps=eps, zero_centered=1, q_has_gate=1)
    q = call.input("q", rng.standard_normal((B, T, Hq, 2 * D)), dtype)
    k = call.input("k", rng.standard_normal((B, T, Hkv, D)), dtype)
    wq = call.input("q_weight", rng.standard_normal(D) * 0.1, "f32")
    wk = call.input("k_weight", rng.standard_normal(D) * 0.1, "f32")
    if mode == "cos_sin":
        angle = np.concatenate([rng.uniform(-3, 3, (B, T, R // 2))] * 2, axis=-1)
        cos, sin = call.input("cos", np.cos(angle), "f32"), call.input("sin", np.sin(angle), "f32")
    else:
        shape = (3, B, T) if section else (B, T)
        positions = rng.integers(0, 5000, shape)
        call.input("positions", positions, "i64")
        call.args.theta, call.args.rotary_dim = 1e7, R
        if section:
            call.args.mrope_section[:] = section
        half = angles(positions.reshape(-1, B, T).astype(np.float64), 1e7, R, section)
        angle = np.concatenate([half, half], axis=-1)
        cos, sin = np.cos(angle), np.sin(angle)
    q_out, k_out = call.output("q_out", (B, T, Hq, D), dtype), call.output("k_out", (B, T, Hkv, D), dtype)
    gate = call.output("gate_out", (B, T, Hq, D), dtype)
    call.run()

    def norm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        n = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * (1 + w)
        return n.astype(DTYPES[dtype]).astype(np.float64)

    # Angles of thousands of radians in fp32 are good to 1e-4 of a turn at best.
    bound = {"f32": 1e-6 if mode == "cos_sin" else 3e-4, "bf16": 5e-3}[dtype]
    for buffer, x, w in ((q_out, q[..., :D], wq), (k_out, k, wk)):
        want = rotary(norm(x, w), cos, sin)
        got = buffer.view.astype(np.float64)
        assert relative_error(got, want) <= bound, (
            f"{buffer.name}: {relative_error(got, want):.2e}; {describe_worst(got, want)}"
        )
    assert np.array_equal(gate.view.astype(np.float64), q[..., D:]), "the gate is copied as it is"
