# SPDX-License-Identifier: MIT
"""gdn.torch: values, dtypes, strides, in-place states, pools."""

from __future__ import annotations

import pytest
import torch

import gdn
import gdn.torch as ops
from torch_formulas import conv, inputs, l2norm, raw_gate, recurrence, relative

RULES = {"chunk_forward": ops.chunk_forward, "recurrent": ops.recurrent}
# Bounds of docs/math.md: (o, state).
BOUNDS = {torch.float32: (5e-6, 5e-6), torch.bfloat16: (5e-3, 4.5e-3), torch.float16: (5e-3, 4.5e-3)}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("layout", ["k_first", "v_first"])
def test_rule(rule: str, dtype: torch.dtype, layout: str) -> None:
    x = inputs(tokens=150, dtype=dtype)
    want_o, want_s = recurrence(x["q"], x["k"], x["v"], x["g"], x["beta"], x["state"])
    state = x["state"] if layout == "k_first" else x["state"].transpose(2, 3).contiguous()
    o, s = RULES[rule](
        x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=state, output_final_state=True, state_layout=layout
    )
    assert o.dtype == dtype and s.dtype == torch.float32 and o.is_contiguous() and s.is_contiguous()
    bound_o, bound_s = BOUNDS[dtype]
    assert relative(o, want_o) <= bound_o
    assert relative(s if layout == "k_first" else s.transpose(2, 3), want_s) <= bound_s


def test_dtype_mixture() -> None:
    """q, k bf16, v fp16, g fp32, beta bf16, state bf16: each tensor its own dtype; o has v's."""
    x = inputs(tokens=40)
    q, k, v = x["q"].bfloat16(), x["k"].bfloat16(), x["v"].half()
    beta, state = x["beta"].bfloat16(), x["state"].bfloat16()
    want_o, want_s = recurrence(q, k, v, x["g"], beta, state)
    for rule in RULES.values():
        o, s = rule(q, k, v, x["g"], beta, initial_state=state, output_final_state=True)
        assert o.dtype == torch.float16 and s.dtype == torch.float32
        assert relative(o, want_o) <= 5e-3 and relative(s, want_s) <= 4.5e-3


def test_float64_goes_to_the_reference() -> None:
    x = {name: t.double() for name, t in inputs(tokens=9).items()}
    want_o, want_s = recurrence(x["q"], x["k"], x["v"], x["g"], x["beta"], x["state"])
    o, s = ops.chunk_forward(
        x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=x["state"], output_final_state=True
    )
    assert o.dtype == s.dtype == torch.float64
    assert relative(o, want_o) < 1e-13 and relative(s, want_s) < 1e-13


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_interleaved_gate_views(ratio: int) -> None:
    """a and b as views with strides (2H, 2) of one projection."""
    hk = 2
    x = inputs(batch=1, tokens=21, hk=hk, hv=hk * ratio)
    ba = torch.randn(1, 21, 2 * hk * ratio, generator=torch.Generator().manual_seed(3))
    b, a = ba[..., 0::2], ba[..., 1::2]
    assert b.stride()[1:] == (2 * hk * ratio, 2)
    A_log, dt_bias = torch.linspace(-1, 1, hk * ratio), torch.linspace(0.2, 1, hk * ratio)
    want, _ = recurrence(x["q"], x["k"], x["v"], raw_gate(a, A_log, dt_bias), b.double().sigmoid())
    for rule in RULES.values():
        o, _ = rule(
            x["q"], x["k"], x["v"], a, b, A_log=A_log, dt_bias=dt_bias, gate="raw", beta_form="sigmoid"
        )  # fmt: skip
        assert relative(o, want) <= 5e-6


def test_strided_inputs() -> None:
    """Batch steps, packed q|k|v rows, padded state rows: same values as contiguous copies, inputs untouched."""
    x = inputs(batch=2, tokens=33)
    big = {n: torch.full((4, *t.shape[1:]), float("nan"), dtype=t.dtype) for n, t in x.items()}
    for name, t in x.items():
        big[name][::2] = t
    rows = torch.full((2, 4, 32, 2, 48), float("nan"))
    rows[..., 0, :] = x["state"]
    packed = torch.cat([x["q"].flatten(2), x["k"].flatten(2), x["v"].flatten(2)], dim=-1)
    q, k, v = packed.split([64, 64, 192], dim=-1)
    want_o, want_s = recurrence(x["q"], x["k"], x["v"], x["g"], x["beta"], x["state"])
    for rule in RULES.values():
        o, s = rule(
            *(big[n][::2] for n in ("q", "k", "v", "g", "beta")), initial_state=rows[..., 0, :], output_final_state=True
        )
        assert relative(o, want_o) <= 5e-6 and relative(s, want_s) <= 5e-6
        o, _ = rule(
            q.unflatten(-1, (2, 32)), k.unflatten(-1, (2, 32)), v.unflatten(-1, (4, 48)), x["g"], x["beta"],
            initial_state=x["state"],
        )  # fmt: skip
        assert relative(o, want_o) <= 5e-6
    assert rows[..., 1, :].isnan().all() and torch.equal(rows[..., 0, :], x["state"])


def test_storage_rows() -> None:
    """Rows of storage[33, 2, 256][..., :128]."""
    r = torch.Generator().manual_seed(1)
    storage = [torch.randn(33, 2, 256, generator=r) * 0.1 for _ in range(3)]
    q, k, v = (s[..., :128].unsqueeze(0) for s in storage)
    want, _ = recurrence(q, k, v, None, None, qk_l2norm=True)
    for rule in RULES.values():
        assert relative(rule(q, k, v, qk_l2norm=True)[0], want) <= 5e-6


@pytest.mark.parametrize("tokens", [(4, 1), (1792, 508)])
def test_resumed(tokens: tuple[int, int]) -> None:
    """chunk(5) = chunk(4) + one step; 2300 tokens at once = 1792 + 508 carried."""
    first, rest = tokens
    x = inputs(batch=1, tokens=first + rest, hk=1, hv=2, dk=64, dv=64)
    names = ("q", "k", "v", "g", "beta")
    whole, want = ops.chunk_forward(*(x[n] for n in names), output_final_state=True)
    o1, state = ops.chunk_forward(*(x[n][:, :first] for n in names), output_final_state=True)
    second = ops.recurrent if rest == 1 else ops.chunk_forward
    o2, same = second(*(x[n][:, first:] for n in names), initial_state=state, inplace=True)
    assert same is state
    assert relative(torch.cat([o1, o2], 1), whole) <= 5e-6 and relative(state, want) <= 5e-6


def test_varlen() -> None:
    lens = [0, 5, 64, 0, 1, 70]
    x = inputs(batch=1, tokens=sum(lens) + 3)
    cu = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()])
    states = torch.randn(len(lens), 4, 32, 48, generator=torch.Generator().manual_seed(5))
    names = ("q", "k", "v", "g", "beta")
    for rule in RULES.values():
        for index_dtype in (torch.int32, torch.int64):
            o, s = rule(
                *(x[n] for n in names), cu_seqlens=cu.to(index_dtype), initial_state=states, output_final_state=True
            )
            for n, (a, b) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
                want_o, want_s = recurrence(*(x[name][:, a:b] for name in names), states[n : n + 1])
                assert relative(s[n], want_s[0]) <= 5e-6
                assert a == b or relative(o[:, a:b], want_o) <= 5e-6


def test_pool_inplace() -> None:
    """A decode batch with null slots reads and writes rows of a pool and nothing else."""
    x = inputs(batch=4, tokens=1)
    pool = torch.randn(9, 4, 32, 48, generator=torch.Generator().manual_seed(2))
    pool[0] = float("nan")
    before = pool.clone()
    slots = torch.tensor([3, -1, 7, -1], dtype=torch.int32)
    names = ("q", "k", "v", "g", "beta")
    o, returned = ops.recurrent(*(x[n] for n in names), initial_state=pool, initial_state_indices=slots, inplace=True)
    assert returned is pool
    for n, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert torch.count_nonzero(o[n]) == 0
            continue
        want_o, want_s = recurrence(*(x[name][n : n + 1] for name in names), before[slot : slot + 1])
        assert relative(o[n], want_o[0]) <= 5e-6 and relative(pool[slot], want_s[0]) <= 5e-6
    untouched = [0, 1, 2, 4, 5, 6, 8]
    assert torch.equal(pool[untouched].nan_to_num(7.0), before[untouched].nan_to_num(7.0))


def test_verify_then_commit() -> None:
    """Verify 4 drafts with per-token slots, accept 2, continue: equals serial decode."""
    x = inputs(batch=2, tokens=4)
    names = ("q", "k", "v", "g", "beta")
    pool = torch.zeros(12, 4, 32, 48)
    slots = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    pool[1], pool[5] = x["state"][0], x["state"][1]
    o, _ = ops.recurrent(
        *(x[n] for n in names), initial_state=pool, inplace=True, token_state_indices=slots,
        num_accepted=torch.tensor([1, 1]),
    )  # fmt: skip
    want_o, _ = recurrence(*(x[n] for n in names), x["state"])
    assert relative(o, want_o) <= 5e-6
    y = inputs(batch=2, tokens=4, seed=9)
    o2, _ = ops.recurrent(
        *(y[n] for n in names), initial_state=pool, inplace=True, token_state_indices=slots,
        num_accepted=torch.tensor([2, 2]),
    )  # fmt: skip
    _, kept = recurrence(*(x[n][:, :2] for n in names), x["state"])
    want_o2, _ = recurrence(*(y[n] for n in names), kept)
    assert relative(o2, want_o2) <= 5e-6


def test_snapshots_without_commit() -> None:
    x = inputs(batch=2, tokens=3)
    names = ("q", "k", "v", "g", "beta")
    state, snapshots = x["state"].clone(), torch.full((2, 3, 4, 32, 48), float("nan"))
    ops.recurrent(*(x[n] for n in names), initial_state=state, inplace=True, snapshots=snapshots, commit=False)
    assert torch.equal(state, x["state"])
    for t in range(3):
        _, want = recurrence(*(x[n][:, : t + 1] for n in names), x["state"])
        assert relative(snapshots[:, t], want) <= 5e-6


def test_checkpoints() -> None:
    x = inputs(batch=1, tokens=130)
    names = ("q", "k", "v", "g", "beta")
    state, checkpoints = x["state"].clone(), torch.full((2, 4, 32, 48), float("nan"))
    ops.chunk_forward(
        *(x[n] for n in names), initial_state=state, inplace=True, checkpoints=checkpoints, checkpoint_every=64
    )
    for m in range(2):
        _, want = recurrence(*(x[n][:, : 64 * (m + 1)] for n in names), x["state"])
        assert relative(checkpoints[m], want[0]) <= 5e-6


def test_options() -> None:
    """Linear gate, doubled sigmoid, tiled heads, scale."""
    x = inputs(tokens=20)
    logits = torch.randn(2, 20, 4, generator=torch.Generator().manual_seed(8))
    want, _ = recurrence(
        x["q"], x["k"], x["v"], x["g"], 2 * logits.double().sigmoid(), scale=0.7, tiled=True, qk_l2norm=True
    )
    for rule in RULES.values():
        o, none = rule(
            x["q"], x["k"], x["v"], x["g"].exp(), logits, gate="linear", beta_form="sigmoid2", head_map="tiled",
            scale=0.7, qk_l2norm=True,
        )  # fmt: skip
        assert none is None
        assert relative(o, want) <= 5e-6


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_conv(token_major: bool, dtype: torch.dtype) -> None:
    r = torch.Generator().manual_seed(0)
    shape = (2, 19, 24) if token_major else (2, 24, 19)
    x = torch.randn(shape, generator=r).to(dtype)
    x = x.transpose(1, 2) if token_major else x
    weight, bias = torch.randn(24, 4, generator=r), torch.randn(24, generator=r)
    state = torch.randn(2, 24, 3, generator=r).to(dtype)
    y, final = ops.causal_conv1d(x, weight, bias, activation="silu", initial_state=state, final_state_len=3)
    assert y.dtype == dtype and (y.stride(1) == 1) == token_major
    want = torch.stack([conv(x[i], weight, bias, state[i], silu=True) for i in range(2)])
    assert relative(y, want) <= (2e-6 if dtype == torch.float32 else 4e-3)
    assert torch.equal(final, x[..., -3:])


def test_gate() -> None:
    a, b = torch.tensor([[-100.0, 0.5, 100.0]]), torch.tensor([[-100.0, 0.0, 100.0]])
    A_log, dt_bias = torch.tensor([-10.0, 0.3, 10.0]), torch.tensor([0.1, 0.2, 0.3])
    g, beta = ops.gate(a, b, A_log, dt_bias)
    assert relative(g, raw_gate(a, A_log, dt_bias)) <= 1e-6 and relative(beta, b.double().sigmoid()) <= 1e-6
    alpha, beta2 = ops.gate(a[:, :2], b[:, :2], A_log[:2], form="linear", beta_form="sigmoid2")
    assert relative(alpha, raw_gate(a[:, :2], A_log[:2], None).exp()) <= 1e-6
    assert relative(beta2, 2 * b[:, :2].double().sigmoid()) <= 1e-6


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid", None])
def test_rmsnorm(gate_first: bool, activation: str | None) -> None:
    r = torch.Generator().manual_seed(4)
    x, weight = torch.randn(2, 5, 3, 96, generator=r), torch.randn(96, generator=r)
    z = None if activation is None else torch.randn(2, 5, 3, 96, generator=r)
    act = 1.0 if z is None else {"silu": z.double() * z.double().sigmoid(), "sigmoid": z.double().sigmoid()}[activation]
    n = x.double() * act if gate_first else x.double()
    n = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + 1e-5)
    for zero_centered in (False, True):
        want = n * (weight.double() + zero_centered) * (1.0 if gate_first else act)
        out = ops.rmsnorm_gated(
            x, z, weight, eps=1e-5, activation=activation, gate_first=gate_first, zero_centered=zero_centered
        )
        assert relative(out, want) <= 1e-6


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    r = cos.shape[-1]
    x1, x2 = x[..., : r // 2], x[..., r // 2 : r]
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = torch.cat([x1, x2], -1) * cos + torch.cat([-x2, x1], -1) * sin
    return torch.cat([rotated, x[..., r:]], -1)


def test_qk_rmsnorm_rope() -> None:
    """cos/sin, positions and equal mRoPE positions agree with the formula; the gate half is split off."""
    r = torch.Generator().manual_seed(6)
    q, k = torch.randn(2, 7, 3, 128, generator=r), torch.randn(2, 7, 1, 64, generator=r)
    wq, wk = torch.randn(64, generator=r), torch.randn(64, generator=r)
    positions = torch.arange(7).expand(2, 7) + torch.tensor([[0], [100]])
    angles = positions.double()[..., None] * 1e7 ** (-torch.arange(0, 64, 2).double() / 64)
    cos, sin = (torch.cat([f, f], -1) for f in (angles.cos(), angles.sin()))

    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * (1 + w.double())

    want_q, want_k = _rotate(norm(q[..., :64], wq), cos, sin), _rotate(norm(k, wk), cos, sin)
    forms = (
        {"cos": cos.float(), "sin": sin.float()},
        {"positions": positions, "theta": 1e7, "rotary_dim": 64},
        {"positions": positions.expand(3, 2, 7), "theta": 1e7, "rotary_dim": 64, "mrope_section": (11, 11, 10)},
    )
    for form in forms:
        q_out, k_out, gate = ops.qk_rmsnorm_rope(q, k, wq, wk, q_has_gate=True, zero_centered=True, **form)
        assert relative(q_out, want_q) <= 1e-5 and relative(k_out, want_k) <= 1e-5
        assert torch.equal(gate, q[..., 64:])


def test_longest_length_is_a_hint() -> None:
    x = torch.full((1, 6, 1, 8), 0.5)
    cu = torch.tensor([0, 2, 5])
    for _ in range(3):
        torch.full((1, 6, 1, 8), torch.nan)  # what a new tensor may find in its memory
        o, _ = ops.chunk_forward(x, x, x, cu_seqlens=cu, qk_l2norm=True)
        assert not o[:, 5:].any() and o[:, :5].all()
        assert torch.equal(o, ops.chunk_forward(x, x, x, cu_seqlens=cu, qk_l2norm=True, max_seqlen=3)[0])
    with pytest.raises(gdn.InvalidArgumentError, match="'max_seqlen': found -1, expected a length, or 0 for unknown"):
        ops.chunk_forward(x, x, x, cu_seqlens=cu, max_seqlen=-1)


def test_empty_work() -> None:
    x = inputs(batch=2, tokens=0)
    names = ("q", "k", "v", "g", "beta")
    for rule in RULES.values():
        o, s = rule(*(x[n] for n in names), initial_state=x["state"], output_final_state=True)
        assert o.shape == (2, 0, 4, 48) and torch.equal(s, x["state"])
        _, s = rule(*(x[n] for n in names), output_final_state=True)
        assert torch.count_nonzero(s) == 0


def test_l2norm_eps_is_added_to_the_sum() -> None:
    k = torch.full((1, 1, 1, 128), (1e-6 / 128) ** 0.5)
    v = torch.ones(1, 1, 1, 8)
    _, s = ops.recurrent(k, k, v, qk_l2norm=True, output_final_state=True)
    assert relative(s[0, 0, :, 0], l2norm(k.double())[0, 0, 0]) <= 1e-6
    assert abs(float(s[0, 0, :, 0].norm()) - 0.5**0.5) < 1e-5
