# SPDX-License-Identifier: MIT
"""causal-conv1d's functions against the naive formula."""

from __future__ import annotations

import inspect

import pytest
import torch

import gdn
from gdn import causal_conv1d_fn, causal_conv1d_update
from torch_formulas import conv, relative


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def data():
    r = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(3, 20, 11, generator=r),
        "weight": torch.randn(20, 4, generator=r),
        "bias": torch.randn(20, generator=r),
        "state": torch.randn(3, 20, 3, generator=r),
        "wide": torch.randn(3, 20, 6, generator=r),
    }


def _want(x, weight, bias, states, silu):
    rows = range(x.shape[0])
    return torch.stack([conv(x[i], weight, bias, None if states is None else states[i], silu) for i in rows])


def test_signatures() -> None:
    assert list(inspect.signature(causal_conv1d_fn).parameters) == [
        "x", "weight", "bias", "seq_idx", "initial_states", "return_final_states", "final_states_out", "activation",
    ]  # fmt: skip
    assert list(inspect.signature(causal_conv1d_update).parameters) == [
        "x", "conv_state", "weight", "bias", "activation", "cache_seqlens", "conv_state_indices",
    ]  # fmt: skip


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_fn(data, activation, width, bias) -> None:
    weight, b = data["weight"][:, :width], data["bias"] if bias else None
    y = causal_conv1d_fn(data["x"], weight, b, activation=activation)
    assert relative(y, _want(data["x"], weight, b, None, activation is not None)) <= 2e-6


@pytest.mark.parametrize("tokens", [1, 2, 11])
def test_fn_states(data, tokens) -> None:
    x, out = data["x"][..., :tokens], torch.full((3, 20, 3), float("nan"))
    y, final = causal_conv1d_fn(
        x, data["weight"], initial_states=data["state"], return_final_states=True, final_states_out=out
    )
    assert final is out
    assert relative(y, _want(x, data["weight"], None, data["state"], False)) <= 2e-6
    assert torch.equal(final, torch.cat([data["state"], x], -1)[..., -3:])
    _, final = causal_conv1d_fn(x, data["weight"], return_final_states=True)
    assert torch.equal(final, torch.cat([torch.zeros(3, 20, 3), x], -1)[..., -3:])


def test_fn_seq_idx(data) -> None:
    """Sequences do not see each other; negative indices are padding."""
    seq_idx = torch.tensor([[0] * 4 + [1] * 6 + [-1], [5] * 11, [-1] * 2 + [0] + [1] * 8], dtype=torch.int32)
    y = causal_conv1d_fn(data["x"], data["weight"], data["bias"], seq_idx=seq_idx, activation="silu")
    for row, runs in enumerate([[(0, 4), (4, 10)], [(0, 11)], [(2, 3), (3, 11)]]):
        for a, b in runs:
            want = conv(data["x"][row][:, a:b], data["weight"], data["bias"], None, True)
            assert relative(y[row][:, a:b], want) <= 2e-6
    assert torch.count_nonzero(y[0, :, 10:]) == 0 and torch.count_nonzero(y[2, :, :2]) == 0


def test_fn_refusals(data) -> None:
    x, w = data["x"], data["weight"]
    idx = torch.zeros(3, 11, dtype=torch.int32)
    with pytest.raises(gdn.UnsupportedError, match="'seq_idx': not supported together with 'initial_states'"):
        causal_conv1d_fn(x, w, seq_idx=idx, initial_states=data["state"])
    with pytest.raises(gdn.UnsupportedError, match="comes back after another"):
        causal_conv1d_fn(x, w, seq_idx=torch.tensor([[0, 1, 0] + [0] * 8] * 3))
    with pytest.raises(gdn.InvalidArgumentError, match="'seq_idx': found shape"):
        causal_conv1d_fn(x, w, seq_idx=idx[:, :5])
    with pytest.raises(gdn.UnsupportedError, match="'activation': found 'gelu'"):
        causal_conv1d_fn(x, w, activation="gelu")
    with pytest.raises(gdn.InvalidArgumentError, match="final_states_out"):
        causal_conv1d_fn(x, w, final_states_out=data["state"])


@pytest.mark.parametrize("state_len", [3, 6])
def test_update(data, state_len) -> None:
    """8 steps of one token, then one of 3 tokens: the state follows the stream."""
    state = data["wide"][..., :state_len].clone()
    stream = torch.cat([state, data["x"]], -1)
    for t in range(8):
        y = causal_conv1d_update(data["x"][..., t], state, data["weight"], data["bias"], "silu")
        assert y.shape == (3, 20)
        seen = stream[..., : state_len + t]
        want = _want(data["x"][..., t : t + 1], data["weight"], data["bias"], seen, True)[..., 0]
        assert relative(y, want) <= 2e-6
        assert torch.equal(state, stream[..., t + 1 : t + 1 + state_len])
    y = causal_conv1d_update(data["x"][..., 8:], state, data["weight"])
    assert relative(y, _want(data["x"][..., 8:], data["weight"], None, stream[..., : state_len + 8], False)) <= 2e-6
    assert torch.equal(state, stream[..., -state_len:])


def test_update_indices(data) -> None:
    pool = torch.randn(7, 20, 3, generator=torch.Generator().manual_seed(5))
    before, rows = pool.clone(), torch.tensor([6, 0, 3], dtype=torch.int32)
    y = causal_conv1d_update(data["x"][..., :1], pool, data["weight"], conv_state_indices=rows)
    assert relative(y, _want(data["x"][..., :1], data["weight"], None, before[rows.long()], False)) <= 2e-6
    assert torch.equal(pool[rows.long()], torch.cat([before[rows.long()][..., 1:], data["x"][..., :1]], -1))
    assert torch.equal(pool[[1, 2, 4, 5]], before[[1, 2, 4, 5]])


@pytest.mark.parametrize("indexed", [False, True])
def test_update_circular(data, indexed) -> None:
    """cache_seqlens: conv_state is a ring; the same numbers as the shifted form."""
    rows = torch.tensor([4, 1, 2], dtype=torch.int32) if indexed else None
    ring, shifted = torch.zeros(5 if indexed else 3, 20, 6), torch.zeros(3, 20, 3)
    lengths = torch.tensor([0, 4, 11], dtype=torch.int32)
    for step, (a, b) in enumerate([(0, 1), (1, 2), (2, 5), (5, 6)]):
        x = data["x"][..., a:b]
        y = causal_conv1d_update(
            x, ring, data["weight"], data["bias"], "silu", cache_seqlens=lengths, conv_state_indices=rows
        )
        want = causal_conv1d_update(x, shifted, data["weight"], data["bias"], "silu")
        assert relative(y, want) <= 1e-6, step
        lengths += b - a
    position = (int(lengths[1]) - 1) % 6
    assert torch.equal(ring[1, :, position], data["x"][1, :, 5])


def test_bf16(data) -> None:
    x, w = data["x"].bfloat16(), data["weight"].bfloat16()
    y = causal_conv1d_fn(x, w, activation="silu")
    assert y.dtype == torch.bfloat16 and relative(y, _want(x, w, None, None, True)) <= 4e-3
