# SPDX-License-Identifier: MIT
"""FLA's functions: signatures of release 0.6.0, semantics against the fp64 recurrence."""

from __future__ import annotations

import inspect

import pytest
import torch

import gdn
from gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from torch_formulas import inputs, raw_gate, recurrence, relative

FUNCTIONS = {"chunk": chunk_gated_delta_rule, "recurrent": fused_recurrent_gated_delta_rule}
# Positional order of fla-core 0.6.0; calls that pass arguments by position depend on it.
SIGNATURES = {
    "chunk": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
    "allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context kwargs",
    "recurrent": "q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
    "A_log dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens kwargs",
}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature(name: str) -> None:
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    assert list(parameters) == SIGNATURES[name].split()
    defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert all(value in (None, False) for value in defaults.values())


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("v_first", [False, True])
def test_values(name: str, dtype: torch.dtype, v_first: bool) -> None:
    x = inputs(tokens=70, dtype=dtype)
    want_o, want_s = recurrence(x["q"], x["k"], x["v"], x["g"], x["beta"], x["state"], scale=0.3, qk_l2norm=True)
    state = x["state"].mT.contiguous() if v_first else x["state"]
    before = state.clone()
    o, s = FUNCTIONS[name](
        x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], scale=0.3, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, state_v_first=v_first,
    )  # fmt: skip
    assert o.dtype == dtype and s.dtype == torch.float32 and torch.equal(state, before)
    bound = 5e-6 if dtype == torch.float32 else 4.5e-3
    assert relative(o, want_o) <= bound and relative(s.mT if v_first else s, want_s) <= bound


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("neg", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_beta_in_kernel(name: str, neg: bool, bias: bool) -> None:
    x = inputs(tokens=20)
    r = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 20, 4, generator=r), torch.randn(2, 20, 4, generator=r)
    A_log, dt_bias = torch.randn(4, generator=r), torch.randn(4, generator=r) if bias else None
    beta = b.double().sigmoid() * (2 if neg else 1)
    want, _ = recurrence(x["q"], x["k"], x["v"], raw_gate(a, A_log, dt_bias), beta)
    o, none = FUNCTIONS[name](
        x["q"], x["k"], x["v"], g=a, beta=b, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=neg,
    )  # fmt: skip
    assert none is None and relative(o, want) <= 5e-5


@pytest.mark.parametrize("name", FUNCTIONS)
def test_varlen(name: str) -> None:
    x = inputs(batch=1, tokens=21)
    cu = torch.tensor([0, 4, 4, 21])
    states = torch.randn(3, 4, 32, 48, generator=torch.Generator().manual_seed(7))
    o, s = FUNCTIONS[name](
        x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], initial_state=states, output_final_state=True, cu_seqlens=cu
    )
    assert torch.equal(s[1], states[1])
    for n, (a, b) in enumerate([(0, 4), (4, 4), (4, 21)]):
        want_o, want_s = recurrence(*(x[i][:, a:b] for i in ("q", "k", "v", "g", "beta")), states[n : n + 1])
        assert relative(s[n], want_s[0]) <= 5e-6
        assert a == b or relative(o[:, a:b], want_o) <= 5e-6


def test_positional_call_and_accepted_extras() -> None:
    x = inputs(tokens=8)
    args = (x["q"], x["k"], x["v"], x["g"], x["beta"])
    want, want_s = chunk_gated_delta_rule(*args, initial_state=x["state"], output_final_state=True)
    o, s = chunk_gated_delta_rule(*args, None, x["state"], True, chunk_size=32, A_log=torch.ones(4))
    assert torch.equal(o, want) and torch.equal(s, want_s)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        _, s = chunk_gated_delta_rule(
            *args, initial_state=x["state"].mT, output_final_state=True, transpose_state_layout=True
        )
    assert torch.equal(s.mT, want_s)
    one = inputs(batch=1, tokens=8)
    args = (one["q"], one["k"], one["v"], one["g"], one["beta"])
    cpu = torch.tensor([0, 3, 8], dtype=torch.int32)
    o, _ = chunk_gated_delta_rule(*args, cu_seqlens=cpu.long(), cu_seqlens_cpu=cpu, chunk_indices=torch.zeros(2, 2))
    assert torch.equal(o, chunk_gated_delta_rule(*args, cu_seqlens=cpu)[0])


def test_recurrent_defaults() -> None:
    """g and beta are optional there: the ungated rule with beta = 1 (or sigmoid(1))."""
    x = inputs(tokens=9)
    o, _ = fused_recurrent_gated_delta_rule(x["q"], x["k"], x["v"])
    assert relative(o, recurrence(x["q"], x["k"], x["v"], None, None)[0]) <= 5e-6
    o, _ = fused_recurrent_gated_delta_rule(x["q"], x["k"], x["v"], use_beta_sigmoid_in_kernel=True)
    beta = torch.ones(2, 9, 4).double().sigmoid()
    assert relative(o, recurrence(x["q"], x["k"], x["v"], None, beta)[0]) <= 5e-6


def test_refusals() -> None:
    x = inputs(tokens=3)
    args = (x["q"], x["k"], x["v"], x["g"], x["beta"])
    with pytest.raises(gdn.UnsupportedError, match="chunk_gated_delta_rule: argument 'cp_context'"):
        chunk_gated_delta_rule(*args, cp_context=object())
    with pytest.raises(DeprecationWarning, match="head_first"):
        chunk_gated_delta_rule(*args, head_first=False)
    with pytest.raises(gdn.InvalidArgumentError, match="'chunk_size': found 48"):
        chunk_gated_delta_rule(*args, chunk_size=48)
    with pytest.raises(gdn.InvalidArgumentError, match="'A_log': found None with use_gate_in_kernel=True"):
        chunk_gated_delta_rule(*args, use_gate_in_kernel=True)
    with pytest.raises(gdn.InvalidArgumentError, match="allow_neg_eigval"):
        chunk_gated_delta_rule(*args, allow_neg_eigval=True)
    with pytest.raises(TypeError, match="'sclae'"):
        chunk_gated_delta_rule(*args, sclae=1.0)
    for name in ("gk", "gv"):
        with pytest.raises(gdn.UnsupportedError, match=f"fused_recurrent_gated_delta_rule: argument '{name}'"):
            fused_recurrent_gated_delta_rule(*args[:4], beta=args[4], **{name: torch.zeros(1)})
    with pytest.raises(ValueError, match="initial_state"):
        chunk_gated_delta_rule(*args, initial_state=torch.zeros(3, 4, 32, 48))
