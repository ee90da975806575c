# SPDX-License-Identifier: MIT
"""gdn.nn.GatedDeltaNet: against Transformers' layers, cache continuation, packed sequences."""

from __future__ import annotations

import pytest
import torch

import gdn
from gdn.nn import GatedDeltaNet, GatedDeltaNetCache, GatedDeltaNetConfig
from tiny_models import build
from torch_formulas import relative

CONFIG = GatedDeltaNetConfig(hidden_size=40, num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=24)


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_from_module(family: str) -> None:
    """Same output as the Transformers layer, whose parameters it shares (Qwen3.5) or reorders (Qwen3-Next)."""
    layer = build(family).model.layers[1].linear_attn
    module = GatedDeltaNet.from_module(layer)
    x = torch.randn(2, 37, 96)
    assert relative(module(x), layer(x)) <= 1e-5
    mask = torch.ones(2, 37)
    mask[1, :5] = 0
    assert relative(module(x, mask=mask), layer(x, attention_mask=mask)) <= 1e-5
    assert module.A_log is layer.A_log and module.out_proj is layer.out_proj
    assert (family == "qwen3_5") == (getattr(layer, "in_proj_qkv", None) is module.in_proj_qkv)
    assert not module.training


def test_state_dict_of_transformers_loads() -> None:
    model = build("qwen3_5")
    layer = model.model.layers[0].linear_attn
    module = GatedDeltaNet(model.config)
    module.load_state_dict(layer.state_dict())
    x = torch.randn(1, 9, 96)
    assert relative(module(x), layer(x)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prefill_and_decode(dtype: torch.dtype) -> None:
    """Prefill, a continued prefill and single steps give what one pass gives."""
    module = GatedDeltaNet(CONFIG, dtype=dtype)
    x = torch.randn(3, 20, 40).to(dtype)
    want = module(x)
    assert want.dtype == dtype and want.shape == x.shape
    cache = module.new_cache(3)
    parts = [module(x[:, a:b], cache) for a, b in [(0, 9), (9, 14), *((t, t + 1) for t in range(14, 20))]]
    assert relative(torch.cat(parts, 1), want) <= (1e-5 if dtype == torch.float32 else 2e-2)
    assert cache.state.dtype == torch.float32 and cache.conv_state.dtype == dtype
    branch = cache.clone()
    step = torch.randn(3, 1, 40).to(dtype)
    assert torch.equal(module(step, cache), module(step, branch))
    cache.reset()
    assert relative(module(x, cache), want) <= (1e-6 if dtype == torch.float32 else 2e-2)


def test_packed_sequences() -> None:
    module = GatedDeltaNet(CONFIG)
    x, cu = torch.randn(1, 17, 40), torch.tensor([0, 6, 6, 17])
    cache = module.new_cache(3)
    y = module(x, cache, cu_seqlens=cu)
    assert relative(y, torch.cat([module(x[:, :6]), module(x[:, 6:])], 1)) <= 1e-5
    step = torch.randn(3, 1, 40)
    second = GatedDeltaNetCache(cache.conv_state[2:].clone(), cache.state[2:].clone())
    out = module(step, cache)
    assert relative(out[2:], module(step[2:], second)) <= 1e-5
    assert relative(out[1:2], module(step[1:2])) <= 1e-5  # the empty sequence starts here


def test_compiles_to_one_graph() -> None:
    module = GatedDeltaNet(CONFIG)
    cache, twin = module.new_cache(1), module.new_cache(1)
    x = torch.randn(1, 5, 40)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert relative(compiled(x, cache), module(x, twin)) <= 1e-6
    assert relative(cache.state, twin.state) <= 1e-6


def test_refusals() -> None:
    with pytest.raises(
        gdn.InvalidArgumentError, match="'num_v_heads': found 3, expected a multiple of num_k_heads = 2"
    ):
        GatedDeltaNet(GatedDeltaNetConfig(hidden_size=8, num_k_heads=2, num_v_heads=3))
    with pytest.raises(gdn.InvalidArgumentError, match="found Linear without 'num_k_heads'"):
        GatedDeltaNet.from_module(torch.nn.Linear(2, 2))
    with torch.enable_grad(), pytest.raises(gdn.UnsupportedError, match="backward is not implemented yet"):
        GatedDeltaNet(CONFIG)(torch.zeros(1, 2, 40))
