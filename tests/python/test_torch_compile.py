# SPDX-License-Identifier: MIT
"""opcheck, fake kernels, torch.compile(fullgraph=True), torch.export."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gdn
import gdn.torch as ops
from gdn import _capi
from torch_formulas import inputs

NONE = (None, None, None)
OPTIONS = (0.0, 0.0, 1 << 7, None)  # scale, l2norm_eps, flags (qk_l2norm), impl


def _rule_inputs(dtype: torch.dtype = torch.float32) -> tuple:
    x = inputs(batch=2, tokens=6, dtype=dtype)
    return tuple(x[n] for n in ("q", "k", "v", "g", "beta")), x["state"]


def _samples() -> list:
    (q, k, v, g, beta), state = _rule_inputs()
    head = (q, k, v, g, beta, *NONE)
    packed = tuple(t.reshape(1, 12, *t.shape[2:]) for t in (q, k, v, g, beta))
    cu = torch.tensor([0, 5, 12])
    raw = (q, k, v, g, beta, torch.ones(4), torch.ones(4), None)
    pool, slots = torch.zeros(5, 4, 32, 48), torch.tensor([3, 1])
    x, weight = torch.randn(2, 8, 6), torch.randn(8, 4)
    r = torch.ops.gdn
    return [
        pytest.param(r.chunk_forward, (*head, state, None, None, True, *OPTIONS), id="chunk_forward"),
        pytest.param(r.chunk_forward, (*packed, None, None, cu, None, None, None, False, *OPTIONS), id="chunk_varlen"),
        pytest.param(r.recurrent, (*raw, None, None, None, True, 0.5, 1e-6, 2 | 1 << 2 | 1 << 5, None), id="recurrent"),
        pytest.param(r.chunk_forward_, (*head, pool, slots, *NONE, None, 0, *OPTIONS), id="chunk_forward_"),
        pytest.param(r.recurrent_, (*head, state, None, *NONE, None, None, True, *OPTIONS), id="recurrent_"),
        pytest.param(
            r.recurrent_,
            (*head, state, None, *NONE, None, torch.zeros(2, 6, 4, 32, 48), False, *OPTIONS),
            id="recurrent_snapshots",
        ),
        pytest.param(r.causal_conv1d, (x, weight, None, None, *NONE, 3, 1, 0), id="conv"),
        pytest.param(r.causal_conv1d, (x.mT.contiguous().mT, weight, weight[:, 0], None, *NONE, 0, 0, 0), id="conv_tm"),
        pytest.param(r.causal_conv1d_, (x, weight, None, None, torch.randn(2, 8, 4), *NONE, None, 1, 0), id="conv_"),
        pytest.param(r.gate, (g, beta, torch.ones(4), None, 0, 1), id="gate"),
        pytest.param(r.rmsnorm_gated, (v, v, v[0, 0, 0], 1e-6, 1, False, False, True), id="rmsnorm_gated"),
        pytest.param(r.add_rmsnorm, (v, v + 1, v[0, 0, 0], 1e-6, True), id="add_rmsnorm"),
        pytest.param(r.glu, (v, v + 1, 1), id="glu"),
        pytest.param(
            r.qk_rmsnorm_rope,
            (q, k, None, None, *NONE[:2], torch.arange(6)[None], 1e-6, 1e4, 32, 0, 0, 0, False, True),
            id="qk_rmsnorm_rope",
        ),
    ]


@pytest.mark.parametrize(("op", "args"), _samples())
def test_opcheck(op, args) -> None:
    torch.library.opcheck(op.default, args)


def _decode_step(x, weight, conv_state, q, k, a, b, A_log, dt_bias, state, z, norm):
    mixed, _ = ops.causal_conv1d(x, weight, activation="silu", initial_state=conv_state, inplace=True)
    v = mixed.transpose(1, 2).unflatten(-1, (4, 48))
    o, _ = ops.recurrent(
        q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, gate="raw", beta_form="sigmoid", qk_l2norm=True,
        initial_state=state, inplace=True,
    )  # fmt: skip
    return ops.rmsnorm_gated(o, z, norm).sum(-1) * 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph(backend: str) -> None:
    """A decode step with in-place states compiles to one graph and updates the states the same way."""
    r = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=r)

    args = [randn(2, 192, 1), randn(192, 4), randn(2, 192, 3), randn(2, 1, 2, 32), randn(2, 1, 2, 32), randn(2, 1, 4)]
    args += [randn(2, 1, 4), randn(4), randn(4), randn(2, 4, 32, 48), randn(2, 1, 4, 48), randn(48)]
    eager_args, compiled_args = [t.clone() for t in args], [t.clone() for t in args]
    compiled = torch.compile(_decode_step, fullgraph=True, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            # Inductor adds up the final sum of 48 in another order; the operators are compared bit by bit below.
            torch.testing.assert_close(compiled(*compiled_args), _decode_step(*eager_args), rtol=1e-5, atol=1e-5)
    for name, i in (("conv state", 2), ("state", 9)):
        assert torch.equal(compiled_args[i], eager_args[i]), name
        assert not torch.equal(compiled_args[i], args[i]), name


def test_compile_prefill_with_dynamic_length() -> None:
    fn = torch.compile(
        lambda q, k, v, g, b: gdn.chunk_gated_delta_rule(q, k, v, g, b, output_final_state=True),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    with torch.no_grad():
        for tokens in (7, 12):
            x = inputs(tokens=tokens)
            args = tuple(x[n] for n in ("q", "k", "v", "g", "beta"))
            want = gdn.chunk_gated_delta_rule(*args, output_final_state=True)
            for found, expected in zip(fn(*args), want, strict=True):
                assert torch.equal(found, expected)


def test_export() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, g, beta):
            return ops.chunk_forward(q, k, v, g, beta, output_final_state=True)

    args, _ = _rule_inputs()
    with torch.no_grad():
        exported = torch.export.export(Layer(), args).module()(*args)
        want = ops.chunk_forward(*args, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(exported, want, strict=True))


def test_fake_kernels_match() -> None:
    """Shape, stride and dtype of every result, on meta tensors."""
    (q, k, v, g, beta), _ = _rule_inputs(torch.bfloat16)
    x = torch.randn(2, 6, 8).transpose(1, 2)
    calls = [
        lambda m: ops.chunk_forward(m(q), m(k), m(v), m(g), m(beta), output_final_state=True, state_layout="v_first"),
        lambda m: ops.recurrent(m(q), m(k), m(v), m(g), m(beta), output_final_state=True),
        lambda m: ops.causal_conv1d(m(x), m(torch.ones(8, 4)), final_state_len=3),
        lambda m: ops.gate(m(g), m(beta), m(torch.ones(4))),
        lambda m: (ops.rmsnorm_gated(m(v)),),
        lambda m: ops.add_rmsnorm(m(v), m(v)),
        lambda m: (ops.glu(m(v.mT), m(v.mT)),),
    ]
    with torch.no_grad():
        for call in calls:
            for real, fake in zip(call(lambda t: t), call(lambda t: t.to("meta")), strict=True):
                assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


def test_fake_results_are_on_the_device_of_the_inputs() -> None:
    """A build without the CUDA backend refuses by name instead."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        q = torch.empty(1, 4, 2, 16, device="cuda:1")
        if _capi.has_cuda():
            o, state = ops.chunk_forward(q, q, q, output_final_state=True)
            assert o.device == state.device == q.device
        else:
            with pytest.raises(gdn.UnsupportedError, match="'q'.*cuda.*this build has no CUDA backend"):
                ops.chunk_forward(q, q, q)
