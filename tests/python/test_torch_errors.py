# SPDX-License-Identifier: MIT
"""What the torch functions refuse, with which exception and which words; nothing is written when they do."""

from __future__ import annotations

import pytest
import torch

import gdn
import gdn.torch as ops
from torch_formulas import inputs


@pytest.fixture
def x():
    with torch.no_grad():
        yield inputs(batch=1, tokens=5)


def _run(x, rule=ops.chunk_forward, **changes):
    options = {n: changes.pop(n) for n in list(changes) if n not in ("q", "k", "v", "g", "beta")}
    values = {n: changes.get(n, x[n]) for n in ("q", "k", "v", "g", "beta")}
    return rule(*values.values(), **options)


INVALID = [
    ({"v": torch.zeros(1, 4, 4, 48)}, r"chunk_forward: argument 'v': found shape \[1, 4, 4, 48\], expected \[B, T, Hv"),
    ({"k": torch.zeros(1, 5, 2, 31)}, "argument 'k'.*found shape"),
    ({"q": torch.zeros(5, 2, 32)}, r"argument 'q': found 3 dimensions, expected \[B, T, Hk, K\]"),
    ({"v": torch.zeros(1, 5, 3, 48)}, "argument 'v': found Hv = 3, expected a multiple of Hk = 2"),
    ({"q": torch.zeros(1, 5, 2, 32, dtype=torch.int8)}, "argument 'q': found torch dtype int8, expected float32"),
    ({"g": torch.zeros(1, 5, 4, dtype=torch.int32)}, "argument 'g'.*I32|argument 'g'"),
    ({"initial_state": torch.zeros(1, 4, 48, 32)}, r"'initial_state': found shape \[1, 4, 48, 32\]"),
    ({"cu_seqlens": torch.tensor([0, 3, 2])}, "argument 'cu_seqlens'"),
    ({"cu_seqlens": torch.tensor([0, 9])}, "argument 'cu_seqlens'"),
    ({"gate": "raw"}, "argument 'A_log'"),
    ({"gate": "exp"}, "argument 'gate': found 'exp', expected one of 'log', 'linear', 'raw'"),
    ({"state_layout": "vk"}, "argument 'state_layout': found 'vk'"),
    ({"scale": 0}, "argument 'scale': found 0"),
    ({"impl": "fastest"}, "argument 'impl': found 'fastest'"),
    ({"inplace": True}, "argument 'initial_state': found None with inplace=True"),
    ({"checkpoints": torch.zeros(1, 4, 32, 48)}, "argument 'checkpoints': found a tensor with inplace=False"),
]


@pytest.mark.parametrize(("changes", "message"), INVALID)
def test_invalid(x, changes, message) -> None:
    with pytest.raises(gdn.InvalidArgumentError, match=message) as error:
        _run(x, **changes)
    assert isinstance(error.value, ValueError) and isinstance(error.value, gdn.Error)


def test_state_index_out_of_range_writes_nothing(x) -> None:
    pool = torch.ones(3, 4, 32, 48)
    with pytest.raises(gdn.InvalidArgumentError, match=r"initial_state_indices\[0\] = 3"):
        _run(x, initial_state=pool, initial_state_indices=torch.tensor([3]), inplace=True)
    assert torch.equal(pool, torch.ones_like(pool))


def test_unsupported_head_size() -> None:
    q = torch.zeros(1, 2, 1, 600)
    with pytest.raises(gdn.UnsupportedError, match="'q': found K = 600") as error, torch.no_grad():
        ops.chunk_forward(q, q, q[..., :8])
    assert isinstance(error.value, NotImplementedError)


def test_inputs_that_require_grad() -> None:
    x = inputs(batch=1, tokens=5)
    message = "gdn: backward is not implemented yet; .*: argument '{}' requires grad"
    for name in ("q", "v", "beta"):
        leaf = x[name].clone().requires_grad_()
        for rule in (ops.chunk_forward, ops.recurrent):
            with pytest.raises(gdn.UnsupportedError, match=message.format(name)):
                _run(x, rule, **{name: leaf})
            with torch.no_grad():
                _run(x, rule, **{name: leaf})
            with torch.inference_mode():
                _run(x, rule, **{name: leaf})
    weight = torch.ones(8, 4, requires_grad=True)
    with pytest.raises(gdn.UnsupportedError, match=message.format("weight")):
        ops.causal_conv1d(torch.zeros(1, 8, 3), weight)
    with pytest.raises(gdn.UnsupportedError, match=message.format("A_log")):
        ops.gate(torch.zeros(4), torch.zeros(4), weight[0])
    with pytest.raises(gdn.UnsupportedError, match=message.format("weight")):
        ops.rmsnorm_gated(torch.zeros(2, 4), None, weight[0])
    with pytest.raises(gdn.UnsupportedError, match=message.format("q_weight")):
        ops.qk_rmsnorm_rope(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), weight[0])
    with pytest.raises(gdn.UnsupportedError, match=message.format("initial_state")):
        gdn.chunk_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=x["state"].requires_grad_())


def test_grad_mode_without_grad_inputs() -> None:
    x = inputs(batch=1, tokens=5)
    o, _ = _run(x)
    assert not o.requires_grad


def test_conv_norm_rotary_refusals() -> None:
    with torch.no_grad():
        with pytest.raises(gdn.InvalidArgumentError, match=r"'x': found 2 dimensions, expected \[B, D, T\]"):
            ops.causal_conv1d(torch.zeros(8, 3), torch.zeros(8, 4))
        with pytest.raises(gdn.InvalidArgumentError, match="causal_conv1d: argument 'weight'"):
            ops.causal_conv1d(torch.zeros(1, 8, 3), torch.zeros(7, 4))
        with pytest.raises(gdn.InvalidArgumentError, match="'activation': found 'gelu'"):
            ops.causal_conv1d(torch.zeros(1, 8, 3), torch.zeros(8, 4), activation="gelu")
        with pytest.raises(
            gdn.InvalidArgumentError, match="argument 'num_accepted': found a tensor with inplace=False"
        ):
            ops.causal_conv1d(torch.zeros(1, 8, 3), torch.zeros(8, 4), num_accepted=torch.ones(1, dtype=torch.int32))
        with pytest.raises(gdn.InvalidArgumentError, match="rmsnorm_gated: argument 'z'"):
            ops.rmsnorm_gated(torch.zeros(2, 8), torch.zeros(2, 7))
        with pytest.raises(gdn.InvalidArgumentError, match="qk_rmsnorm_rope: argument"):
            ops.qk_rmsnorm_rope(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), cos=torch.zeros(1, 2, 4))
        with pytest.raises(gdn.InvalidArgumentError, match="gate: argument 'b'"):
            ops.gate(torch.zeros(2, 8), torch.zeros(2, 7), torch.zeros(8))


def test_overlapping_state_is_refused(x) -> None:
    """An expanded state overlaps itself: it cannot be updated in place."""
    state = torch.zeros(1, 1, 32, 48).expand(1, 4, 32, 48)
    with pytest.raises(gdn.InvalidArgumentError, match="state"):
        _run(x, initial_state=state, inplace=True)
