# SPDX-License-Identifier: MIT
"""add_rmsnorm and glu against their definitions in fp64, on the CPU and (where there is one) on a GPU."""

from __future__ import annotations

import pytest
import torch

import gdn
from cuda_support import needs_cuda
from gdn import numpy as np_ops
from gdn import torch as ops
from torch_formulas import relative

DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# Every kernel: a lane group per row, a block per row, rows that are not whole vectors, rows past the longest.
WIDTHS = [1, 64, 100, 1024, 1032, 4096, 5120, 8192, 8200]


def _randn(*shape: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float, zero_centered: bool) -> torch.Tensor:
    w = 1.0 if weight is None else weight.double() + zero_centered
    return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * w


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("dim", WIDTHS)
def test_add_rmsnorm(device: str, dtype: torch.dtype, dim: int) -> None:
    for rows, zero_centered, weight_dtype in (((3, 7), True, dtype), ((1,), False, torch.float32), ((5,), True, None)):
        x, residual = (_randn(*rows, dim, dtype=dtype, device=device, seed=s) for s in (1, 2))
        weight = None if weight_dtype is None else _randn(dim, dtype=weight_dtype, device=device, seed=3) * 0.2
        out, total = ops.add_rmsnorm(x, residual, weight, eps=1e-5, zero_centered=zero_centered)
        assert out.dtype == total.dtype == dtype and out.is_contiguous() and total.is_contiguous()
        assert torch.equal(total, x + residual)
        assert relative(out, _normed(total, weight, 1e-5, zero_centered)) <= BOUNDS[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", WIDTHS)
def test_long_rows_without_residual(device: str, dim: int) -> None:
    for dtype, bound in BOUNDS.items():
        x, weight = _randn(9, dim, dtype=dtype, device=device, seed=1), _randn(dim, dtype=dtype, device=device, seed=2)
        found = ops.rmsnorm_gated(x, None, weight, zero_centered=True)
        assert relative(found, _normed(x, weight, 1e-6, True)) <= bound


@pytest.mark.parametrize("device", DEVICES)
def test_add_rmsnorm_views_and_dtypes(device: str) -> None:
    """Rows of a packed tensor, adjacent or not, unaligned; the sum has x's dtype."""
    packed = _randn(2, 5, 3 * 136, dtype=torch.bfloat16, device=device, seed=1)
    a, b, c = packed.split(136, -1)
    weight = _randn(136, dtype=torch.float32, device=device, seed=2)
    other = c.transpose(0, 1).contiguous().transpose(0, 1)
    for x, residual in ((a, c), (a[..., 1:], b[..., :-1]), (a[..., ::2], b[..., ::2]), (a, other)):
        w = weight[: x.shape[-1]]
        out, total = ops.add_rmsnorm(x, residual, w)
        assert torch.equal(total, x + residual) and relative(out, _normed(total, w, 1e-6, False)) <= 4e-3
    x, residual = a.float(), b
    out, total = ops.add_rmsnorm(x, residual, weight)
    assert torch.equal(total, x + residual) and relative(out, _normed(total, weight, 1e-6, False)) <= 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_glu(device: str, dtype: torch.dtype, activation: str) -> None:
    for shape in ((1,), (5, 100), (2, 3, 4, 256), (1, 12288), (700, 1536), (3, 513), (0, 8)):
        x, z = (_randn(*shape, dtype=dtype, device=device, seed=s) * 3 for s in (1, 2))
        gate = z.double().sigmoid() * (z.double() if activation == "silu" else 1.0)
        found = ops.glu(x, z, activation=activation)
        assert found.dtype == dtype and found.shape == x.shape
        if x.numel():
            assert relative(found, x.double() * gate) <= BOUNDS[dtype]


@pytest.mark.parametrize("device", DEVICES)
def test_glu_views(device: str) -> None:
    """An attention layer's output gate: half of each head of the projection. And anything else."""
    heads = _randn(2, 9, 4, 2 * 64, dtype=torch.bfloat16, device=device, seed=1)
    out = _randn(2, 9, 4, 64, dtype=torch.bfloat16, device=device, seed=2)
    for x, z in ((out, heads[..., 64:]), (out.mT, heads[..., 1:65].mT), (out.float(), heads[..., ::2])):
        want = x.double() * z.double().sigmoid()
        assert relative(ops.glu(x, z, activation="sigmoid"), want) <= (1e-6 if x.dtype == torch.float32 else 4e-3)


def test_extremes() -> None:
    z = torch.tensor([-float("inf"), -1e4, -100.0, -1.0, 0.0, 100.0, 1e4])
    found = ops.glu(torch.full_like(z, 2.0), z)
    assert torch.equal(found[[1, 2, 4]].abs() <= 1e-38, torch.ones(3, dtype=torch.bool)) and found[-1] == 2e4
    out, total = ops.add_rmsnorm(torch.zeros(2, 40), torch.zeros(2, 40))
    assert not out.any() and not total.any()


def test_in_place_numpy() -> None:
    """residual_out over residual or x, out over x: as without."""
    for dim in (96, 1500):
        a, b = (_randn(6, dim, dtype=torch.float32, device="cpu", seed=s).numpy() for s in (1, 2))
        want_out, want_sum = np_ops.add_rmsnorm(a, b)
        x, residual = a.copy(), b.copy()
        np_ops.add_rmsnorm(x, residual, out=x, residual_out=residual)
        assert (x == want_out).all() and (residual == want_sum).all()
        x = a.copy()
        out, total = np_ops.add_rmsnorm(x, b, residual_out=x)
        assert total is x and (x == want_sum).all() and (out == want_out).all()
        x = a.copy()
        assert np_ops.glu(x, b, out=x) is x and (x == np_ops.glu(a, b)).all()


def test_refusals() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(gdn.InvalidArgumentError, match="rmsnorm_gated: argument 'residual': found shape"):
        ops.add_rmsnorm(x, torch.zeros(2, 7))
    with pytest.raises(gdn.InvalidArgumentError, match="glu: argument 'z': found shape"):
        ops.glu(x, torch.zeros(3, 8))
    with pytest.raises(gdn.InvalidArgumentError, match="glu: argument 'activation'"):
        ops.glu(x, x, activation="relu")
    with pytest.raises(gdn.InvalidArgumentError, match="argument 'out': found memory that overlaps 'residual_out'"):
        array = x.numpy()
        np_ops.add_rmsnorm(array.copy(), array, out=array, residual_out=array)
    with torch.enable_grad(), pytest.raises(gdn.UnsupportedError, match="argument 'residual' requires grad"):
        ops.add_rmsnorm(x, torch.zeros(2, 8, requires_grad=True))
    with torch.enable_grad(), pytest.raises(gdn.UnsupportedError, match="argument 'z' requires grad"):
        ops.glu(x, torch.zeros(2, 8, requires_grad=True))
