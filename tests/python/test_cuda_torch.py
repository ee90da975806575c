# SPDX-License-Identifier: MIT
"""gdn.torch on CUDA tensors: results, streams, devices, graphs, no waits, no allocations, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gdn
import gdn.torch as ops
import test_torch_compile
from cuda_support import busy_gpu, capture, needs_cuda, to_cuda, torch_refuses_waits
from torch_formulas import conv, inputs, l2norm, raw_gate, recurrence, relative

pytestmark = needs_cuda


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


NAMES = ("q", "k", "v", "g", "beta")
SIZES = {"hk": 2, "hv": 4, "dk": 128, "dv": 128}


def _tuple(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(x[name] for name in NAMES)


def _packed(lens: list[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Tensor]:
    """One packed row on the CPU, and cu_seqlens."""
    x = inputs(batch=1, tokens=sum(lens), seed=seed, dtype=dtype, **SIZES)
    return x, torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32)


def _by_sequence(x: dict[str, Tensor], lens: list[int], state: Tensor | None) -> tuple[Tensor, Tensor]:
    """fp64 recurrence of packed sequences."""
    outputs, states, begin = [], [], 0
    for n, length in enumerate(lens):
        part = [x[name][:, begin : begin + length] for name in NAMES]
        o, s = recurrence(*part, None if state is None else state[n : n + 1])
        outputs.append(o)
        states.append(s)
        begin += length
    return torch.cat(outputs, 1), torch.cat(states)


# ---- results


# fp16: the token loop only rounds its outputs; on tensor cores T, P, R and U' are bf16, whatever the inputs are.
@pytest.mark.parametrize(
    ("function", "dtype", "bound"),
    [
        ("chunk_forward", torch.float32, 5e-6),
        ("chunk_forward", torch.bfloat16, 5e-3),
        ("chunk_forward", torch.float16, 5e-3),
        ("recurrent", torch.float32, 5e-6),
        ("recurrent", torch.bfloat16, 5e-3),
        ("recurrent", torch.float16, 1e-3),
    ],
)
def test_rule(function: str, dtype: torch.dtype, bound: float) -> None:
    x = inputs(batch=2, tokens=150, dtype=dtype, **SIZES)
    want = recurrence(*_tuple(x), x["state"])
    y = to_cuda(x)
    o, state = getattr(ops, function)(*_tuple(y), initial_state=y["state"], output_final_state=True)
    assert o.is_cuda and o.dtype == dtype and state.dtype == torch.float32
    assert relative(o.cpu(), want[0]) <= bound and relative(state.cpu(), want[1]) <= max(bound * 0.9, 5e-6)
    assert torch.equal(y["state"].cpu(), x["state"])


def test_packed_projection_and_pool_in_place() -> None:
    """q, k, v are views of one projection's row; states live in a V-first pool that is addressed by slots."""
    lens, slots = [70, 1, 0, 129], [5, 2, 7, 3]
    x, cu = _packed(lens)
    state = torch.randn(len(lens), 4, 128, 128, generator=torch.Generator().manual_seed(3))
    want_o, want_s = _by_sequence(x, lens, state)
    row = torch.cat([x[name].flatten(2) for name in ("q", "k", "v")], -1).cuda()
    q, k, v = (
        part.unflatten(-1, (heads, 128)) for part, heads in zip(row.split([256, 256, 512], -1), (2, 2, 4), strict=True)
    )
    assert not q.is_contiguous()
    pool = torch.full((9, 4, 128, 128), torch.nan, device="cuda")
    index = torch.tensor(slots, device="cuda")
    pool[index] = state.mT.cuda()
    o, returned = ops.chunk_forward(
        q, k, v, x["g"].cuda(), x["beta"].cuda(), cu_seqlens=cu.cuda(), initial_state=pool,
        initial_state_indices=index, state_layout="v_first", inplace=True,
    )  # fmt: skip
    assert returned is pool
    assert relative(o.cpu(), want_o) <= 5e-6 and relative(pool[index].mT.cpu(), want_s) <= 5e-6
    others = [slot for slot in range(9) if slot not in slots]
    assert pool[others].isnan().all()


def test_null_and_out_of_range_slots() -> None:
    """Both read and write nothing; their rows of o are zero."""
    y = to_cuda(inputs(batch=4, tokens=1, **SIZES))
    pool = torch.randn(5, 4, 128, 128, device="cuda")
    before = pool.clone()
    o, _ = ops.recurrent(
        *_tuple(y), initial_state=pool, initial_state_indices=torch.tensor([2, -1, 99, 4], device="cuda"), inplace=True
    )
    assert not o[1].any() and not o[2].any() and o[0].any() and o[3].any()
    assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]]) and not torch.equal(pool[2], before[2])


def test_rows_past_the_last_sequence_are_zero() -> None:
    x, _ = _packed([40])
    y = to_cuda(x)
    o, _ = ops.chunk_forward(*_tuple(y), cu_seqlens=torch.tensor([0, 7, 30], device="cuda"))
    assert not o[:, 30:].any() and relative(o[:, :30].cpu(), _by_sequence(x, [7, 23], None)[0]) <= 5e-6


def test_longest_length_changes_no_bits() -> None:
    x, cu = _packed([70, 1, 0, 129], dtype=torch.bfloat16)
    y, cu = to_cuda(x), cu.cuda()
    o, state = ops.chunk_forward(*_tuple(y), cu_seqlens=cu, output_final_state=True)
    for longest in (129, 200, 1 << 40):
        o2, state2 = ops.chunk_forward(*_tuple(y), cu_seqlens=cu, output_final_state=True, max_seqlen=longest)
        assert torch.equal(o, o2) and torch.equal(state, state2)


@pytest.mark.parametrize("options", [{}, {"split_exact": True}, {"split_threshold": 20.0}], ids=str)
def test_split(options: dict[str, Any]) -> None:
    """Segments of any length, with heads that forget nothing and heads that forget at once; alike in a graph."""
    lens = [1500, 1, 0, 700]
    x, cu = _packed(lens, dtype=torch.bfloat16)
    x["g"][..., 0] = 0
    x["g"][..., 1] = -1
    state = torch.randn(len(lens), 4, 128, 128, generator=torch.Generator().manual_seed(3)) * 0.1
    want_o, want_s = _by_sequence(x, lens, state)
    y, cu, state = to_cuda(x), cu.cuda(), state.cuda()
    for split in ("auto", "off", 64, 256):

        def call(split: str | int = split) -> tuple[Tensor, Tensor | None]:
            return ops.chunk_forward(
                *_tuple(y), cu_seqlens=cu, initial_state=state, output_final_state=True, max_seqlen=1500, split=split,
                **options,
            )  # fmt: skip

        o, s = call()
        assert relative(o.cpu(), want_o) <= 5e-3 and relative(s.cpu(), want_s) <= 4.5e-3
        graph, replayed = capture(call)
        graph.replay()
        assert torch.equal(replayed[0], o) and torch.equal(replayed[1], s)


def test_conv_gate_norm_rope() -> None:
    """The memory-bound operators: GPU against fp64 or the CPU's own result."""
    r = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=r) for shape in ((2, 33, 96), (96, 4), (96,)))
    state = torch.randn(2, 96, 3, generator=r)
    carried = state.cuda()
    y, _ = ops.causal_conv1d(
        x.cuda().mT, weight.cuda(), bias.cuda(), activation="silu", initial_state=carried, inplace=True
    )
    assert y.stride(1) == 1  # token-major stays token-major
    for n in range(2):
        assert relative(y[n].cpu(), conv(x[n].T, weight, bias, state[n], True)) <= 2e-6
    assert torch.equal(carried.cpu(), x.mT[:, :, -3:])

    a, b, A_log, dt_bias = (torch.randn(*shape, generator=r) for shape in ((2, 5, 6), (2, 5, 6), (6,), (6,)))
    g, beta = ops.gate(a.cuda(), b.cuda(), A_log.cuda(), dt_bias.cuda())
    assert relative(g.cpu(), raw_gate(a, A_log, dt_bias)) <= 2e-6 and relative(beta.cpu(), b.double().sigmoid()) <= 2e-6

    x, z, weight = (torch.randn(*shape, generator=r) for shape in ((7, 3, 128), (7, 3, 128), (128,)))
    found = ops.rmsnorm_gated(x.cuda(), z.cuda(), weight.cuda())
    assert relative(found.cpu(), ops.rmsnorm_gated(x, z, weight)) <= 1e-6

    q, k = torch.randn(2, 9, 4, 128, generator=r), torch.randn(2, 9, 2, 64, generator=r)
    options = {"theta": 1e4, "rotary_dim": 32, "q_has_gate": True}
    positions = torch.arange(9).expand(2, 9)
    want = ops.qk_rmsnorm_rope(q, k, positions=positions, **options)
    found = ops.qk_rmsnorm_rope(q.cuda(), k.cuda(), positions=positions, **options)  # positions from the CPU
    assert all(relative(f.cpu(), w) <= 2e-6 for f, w in zip(found, want, strict=True))


# ---- devices


def test_index_tensors_may_be_on_the_cpu() -> None:
    x, cu = _packed([33, 0, 70])
    y = to_cuda(x)
    slots = torch.tensor([3, 1, 0])
    pools = [torch.ones(4, 4, 128, 128, device="cuda") for _ in range(2)]
    options = {"inplace": True, "output_final_state": False}
    found = ops.chunk_forward(
        *_tuple(y), cu_seqlens=cu, initial_state=pools[0], initial_state_indices=slots, **options
    )[0]
    want = ops.chunk_forward(
        *_tuple(y), cu_seqlens=cu.cuda(), initial_state=pools[1], initial_state_indices=slots.cuda(), **options
    )[0]
    assert torch.equal(found, want) and torch.equal(*pools)


def test_a_mixture_of_devices_is_refused_by_name() -> None:
    x = inputs(**SIZES)
    y = to_cuda(x)
    for name in ("k", "beta"):
        mixed = _tuple(y | {name: x[name]})
        with pytest.raises(gdn.InvalidArgumentError, match=rf"chunk_forward: argument '{name}'.*CPU.*CUDA"):
            ops.chunk_forward(*mixed)
    with pytest.raises(gdn.InvalidArgumentError, match=r"recurrent: argument 'initial_state'.*CPU.*CUDA"):
        ops.recurrent(*_tuple(y), initial_state=x["state"], inplace=True)
    with pytest.raises(gdn.InvalidArgumentError, match=r"recurrent: argument '\w+'.*CUDA"):
        ops.recurrent(*_tuple(x), initial_state=y["state"], inplace=True)
    with pytest.raises(gdn.InvalidArgumentError, match=r"argument 'weight'.*CPU.*CUDA"):
        ops.causal_conv1d(torch.randn(1, 8, 5, device="cuda"), torch.randn(8, 4))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_another_device_than_the_current_one() -> None:
    x = inputs(tokens=70, **SIZES)
    y = {name: t.to("cuda:1") for name, t in x.items()}
    with torch.cuda.device(0):
        o, state = ops.chunk_forward(*_tuple(y), initial_state=y["state"], output_final_state=True)
        assert torch.cuda.current_device() == 0 and o.device == state.device == torch.device("cuda", 1)
    want = recurrence(*_tuple(x), x["state"])
    assert relative(o.cpu(), want[0]) <= 5e-6 and relative(state.cpu(), want[1]) <= 5e-6
    with pytest.raises(gdn.InvalidArgumentError, match="argument 'k'"):
        ops.chunk_forward(y["q"], x["k"].to("cuda:0"), y["v"])


def test_runs_on_the_current_stream() -> None:
    """The stream first sleeps, then writes the inputs: a launch on any other stream reads what was there before."""
    x = inputs(tokens=70, **SIZES)
    want = recurrence(*_tuple(x), x["state"])
    ready = to_cuda(x)
    for function in (ops.chunk_forward, ops.recurrent):
        y = {name: torch.zeros_like(t) for name, t in ready.items()}
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            for name, t in y.items():
                t.copy_(ready[name])
            o, state = function(*_tuple(y), initial_state=y["state"], output_final_state=True)
        stream.synchronize()
        assert relative(o.cpu(), want[0]) <= 5e-6 and relative(state.cpu(), want[1]) <= 5e-6


# ---- graphs, waits, memory


def _calls() -> dict[str, Callable[[], Any]]:
    """One prepared call of every operator; everything is on the GPU."""
    y = to_cuda(inputs(batch=2, tokens=200, dtype=torch.bfloat16, **SIZES))
    packed = {name: t.reshape(1, 400, *t.shape[2:]) for name, t in y.items() if name in NAMES}
    cu = torch.tensor([0, 130, 400], device="cuda")
    step = {name: t[:, :1] for name, t in y.items() if name in NAMES}
    pool, slots = torch.zeros(6, 4, 128, 128, device="cuda"), torch.tensor([4, 1], device="cuda")
    x, weight = torch.randn(2, 200, 64, device="cuda").mT, torch.randn(64, 4, device="cuda")
    conv_state = torch.zeros(2, 64, 3, device="cuda")
    A_log, norm = torch.zeros(4, device="cuda"), torch.ones(128, device="cuda")
    positions = torch.arange(200, device="cuda")[None]
    checkpoints = torch.zeros(6, 4, 128, 128, device="cuda")
    return {
        "chunk_forward": lambda: ops.chunk_forward(*_tuple(y), initial_state=y["state"], output_final_state=True),
        "chunk_forward packed": lambda: ops.chunk_forward(
            *_tuple(packed), cu_seqlens=cu, initial_state=pool, initial_state_indices=slots, inplace=True,
            checkpoints=checkpoints, checkpoint_every=64,
        ),
        "recurrent": lambda: ops.recurrent(
            *_tuple(step), initial_state=pool, initial_state_indices=slots, inplace=True, qk_l2norm=True
        ),
        "causal_conv1d": lambda: ops.causal_conv1d(x, weight, activation="silu", final_state_len=3),
        "causal_conv1d update": lambda: ops.causal_conv1d(x[..., :1], weight, initial_state=conv_state, inplace=True),
        "gate": lambda: ops.gate(y["g"], y["beta"], A_log),
        "rmsnorm_gated": lambda: ops.rmsnorm_gated(y["v"], y["v"], norm),
        "qk_rmsnorm_rope": lambda: ops.qk_rmsnorm_rope(y["q"], y["k"], positions=positions, theta=1e4, rotary_dim=64),
    }  # fmt: skip


def test_no_call_waits_for_the_gpu() -> None:
    calls = _calls()
    for call in calls.values():  # the first use of a kernel loads it
        call()
    torch.cuda.synchronize()
    with torch_refuses_waits():
        for call in calls.values():
            call()
    for name, call in calls.items():
        with busy_gpu() as busy:
            call()
            assert busy(), f"{name}: the call waited for the GPU"


def test_no_memory_beyond_the_results() -> None:
    """After the first calls neither PyTorch's allocator nor libgdn takes memory from the device."""
    calls = _calls()
    for _ in range(3):
        for call in calls.values():
            call()
    torch.cuda.synchronize()
    free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    for name, call in calls.items():
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        assert (torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()) == (free, reserved), name


def test_every_operator_can_be_captured() -> None:
    for name, call in _calls().items():
        graph, found = capture(call)
        graph.replay()
        torch.cuda.synchronize()
        if "packed" in name or name in ("recurrent", "causal_conv1d update"):
            continue  # they change their state: replays of those are compared below
        found = found if isinstance(found, tuple) else (found,)
        want = call()
        want = want if isinstance(want, tuple) else (want,)
        for f, w in zip(found, want, strict=True):
            assert (f is None and w is None) or torch.equal(f, w), name


def test_replay_with_other_lengths_slots_and_data() -> None:
    """A prefill graph over a padded row: each replay reads what cu_seqlens, slots and data hold then."""
    room = 256
    y = to_cuda(inputs(batch=1, tokens=room, **SIZES))
    cu, slots = torch.tensor([0, 100, 200, 200], device="cuda"), torch.tensor([1, 4, 0], device="cuda")
    pool = torch.zeros(6, 4, 128, 128, device="cuda")

    def call() -> Tensor:
        return ops.chunk_forward(
            *_tuple(y), cu_seqlens=cu, initial_state=pool, initial_state_indices=slots, inplace=True
        )[0]

    graph, o = capture(call)
    for seed, lens, rows in ((1, [64, 0, 192], [5, 0, 2]), (2, [1, 1, 1], [3, 1, 2]), (3, [200, 55, 1], [0, 1, 2])):
        x, ends = _packed(lens, seed)
        state = torch.randn(6, 4, 128, 128, generator=torch.Generator().manual_seed(seed))
        for name in NAMES:
            y[name].fill_(torch.nan)
            y[name][:, : sum(lens)].copy_(x[name])
        cu.copy_(ends)
        slots.copy_(torch.tensor(rows))
        pool.copy_(state)
        graph.replay()
        want_o, want_s = _by_sequence(x, lens, state[rows])
        assert relative(o[:, : sum(lens)].cpu(), want_o) <= 5e-6
        assert relative(pool[rows].cpu(), want_s) <= 5e-6
        others = [row for row in range(6) if row not in rows]
        assert torch.equal(pool[others].cpu(), state[others])


def test_replay_of_a_decode_step() -> None:
    """conv update, then the rule on its output, both in place; 5 replays equal 5 eager steps."""
    r = torch.Generator().manual_seed(0)
    weight = torch.randn(1024, 4, generator=r).cuda()
    x = torch.randn(2, 1024, 1, generator=r).cuda()
    g, beta = -torch.rand(2, 1, 4, generator=r).cuda(), torch.rand(2, 1, 4, generator=r).cuda()

    def step(conv_state: Tensor, state: Tensor) -> Tensor:
        mixed, _ = ops.causal_conv1d(x, weight, activation="silu", initial_state=conv_state, inplace=True)
        q, k, v = mixed.mT.split([256, 256, 512], -1)
        q, k, v = q.unflatten(-1, (2, 128)), k.unflatten(-1, (2, 128)), v.unflatten(-1, (4, 128))
        return ops.recurrent(q, k, v, g, beta, qk_l2norm=True, initial_state=state, inplace=True)[0]

    def states() -> tuple[Tensor, Tensor]:
        return torch.zeros(2, 1024, 3, device="cuda"), torch.zeros(2, 4, 128, 128, device="cuda")

    ours, theirs = states(), states()
    graph, o = capture(lambda: step(*ours))
    for t in ours:
        t.zero_()
    data = torch.randn(5, *x.shape, generator=r).cuda()
    for t in range(5):
        x.copy_(data[t])
        graph.replay()
        want = step(*theirs)
        assert torch.equal(o, want), f"step {t}"
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_same_bits_every_time() -> None:
    y = to_cuda(inputs(batch=4, tokens=300, dtype=torch.bfloat16, hk=16, hv=64, dk=128, dv=128))
    first = ops.chunk_forward(*_tuple(y), initial_state=y["state"], output_final_state=True)
    for _ in range(100):
        again = ops.chunk_forward(*_tuple(y), initial_state=y["state"], output_final_state=True)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


# ---- torch.library and torch.compile


@pytest.mark.parametrize(("op", "args"), test_torch_compile._samples())
def test_opcheck(op: Any, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(op.default, to_cuda(args))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_fullgraph(backend: str) -> None:
    r = torch.Generator().manual_seed(0)
    shapes = [(2, 192, 1), (192, 4), (2, 192, 3), (2, 1, 2, 32), (2, 1, 2, 32), (2, 1, 4), (2, 1, 4), (4,), (4,)]
    shapes += [(2, 4, 32, 48), (2, 1, 4, 48), (48,)]
    args = [torch.randn(*shape, generator=r).cuda() for shape in shapes]
    eager_args, compiled_args = [t.clone() for t in args], [t.clone() for t in args]
    step = test_torch_compile._decode_step
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(compiled(*compiled_args), step(*eager_args), rtol=1e-5, atol=1e-5)
    for i in (2, 9):
        assert torch.equal(compiled_args[i], eager_args[i]) and not torch.equal(compiled_args[i], args[i])


# ---- the functions of other packages


def test_fla_functions() -> None:
    lens = [65, 0, 64, 3]
    x, cu = _packed(lens)
    state = torch.randn(4, 4, 128, 128, generator=torch.Generator().manual_seed(5))
    y, q = to_cuda(x), 3 * x["q"]
    want = _by_sequence(x | {"q": l2norm(q)}, lens, state)
    for function in (gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule):
        kwargs = {"initial_state": state.cuda(), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        o, final = function(
            q.cuda(), y["k"], y["v"], g=y["g"], beta=y["beta"], cu_seqlens=cu.long().cuda(), **kwargs
        )  # fmt: skip
        assert relative(o.cpu(), want[0]) <= 1e-5 and relative(final.cpu(), want[1]) <= 1e-5
    both = gdn.chunk_gated_delta_rule(
        *_tuple(y), cu_seqlens=cu.cuda(), cu_seqlens_cpu=cu, initial_state=state.cuda(), output_final_state=True
    )
    assert relative(both[1].cpu(), _by_sequence(x, lens, state)[1]) <= 5e-6


def test_causal_conv1d_functions() -> None:
    r = torch.Generator().manual_seed(0)
    x, weight, bias = torch.randn(2, 64, 21, generator=r), torch.randn(64, 4, generator=r), torch.randn(64, generator=r)
    args = to_cuda((x, weight, bias))
    y, final = gdn.causal_conv1d_fn(*args, return_final_states=True, activation="silu")
    for n in range(2):
        assert relative(y[n].cpu(), conv(x[n], weight, bias, None, True)) <= 2e-6
    assert torch.equal(final.cpu(), x[:, :, -3:])
    seq_idx = torch.tensor([[0] * 9 + [1] * 12, [0] * 20 + [-1]], dtype=torch.int32)
    found = gdn.causal_conv1d_fn(*args, seq_idx=seq_idx.cuda())
    assert relative(found.cpu(), gdn.causal_conv1d_fn(x, weight, bias, seq_idx=seq_idx)) <= 2e-6
    for options in ({}, {"cache_seqlens": torch.tensor([3, 8])}, {"conv_state_indices": torch.tensor([2, 0])}):
        states = [torch.randn(3 if "conv_state_indices" in options else 2, 64, 5, generator=r)]
        states.append(states[0].cuda())
        want = gdn.causal_conv1d_update(x[:, :, 0], states[0], weight, bias, "silu", **options)
        found = gdn.causal_conv1d_update(args[0][:, :, 0], states[1], *args[1:], "silu", **to_cuda(options))
        assert relative(found.cpu(), want) <= 2e-6 and torch.equal(states[1].cpu(), states[0])
