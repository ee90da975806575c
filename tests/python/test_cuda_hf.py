# SPDX-License-Identifier: MIT
"""gdn.hf, gdn.nn, the demo and the commands on a GPU."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import gdn
from cuda_support import busy_gpu, capture, needs_cuda, torch_refuses_waits
from gdn import hf
from gdn.cli.model import exact_products
from gdn.nn import GatedDeltaNet, GatedDeltaNetConfig
from tiny_models import build, byte_tokens
from torch_formulas import relative

pytestmark = needs_cuda
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _exact():
    exact_products()
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_logits_and_greedy_tokens(family: str) -> None:
    model, tokens = build(family).cuda(), byte_tokens(70).cuda()
    logits = model(tokens).logits
    generated = model.generate(tokens, max_new_tokens=12, do_sample=False)
    hf.enable(model)
    try:
        assert relative(model(tokens).logits, logits) <= 1e-5
        assert torch.equal(model.generate(tokens, max_new_tokens=12, do_sample=False), generated)
        taken = hf.stats(model)
        assert taken["chunk_forward"] == 6 and taken["recurrent"] == taken["causal_conv1d_update"] == 3 * 11
        assert taken["qk_rmsnorm_rope"] and taken["rmsnorm_gated"] and taken["rmsnorm"]
    finally:
        hf.disable(model)
    assert torch.equal(model(tokens).logits, logits)


def test_bf16_is_as_close_to_fp32_as_transformers() -> None:
    tokens = byte_tokens(70).cuda()
    exact = build("qwen3_5").cuda()(tokens).logits
    model = build("qwen3_5", torch.bfloat16).cuda()
    theirs = relative(model(tokens).logits, exact)
    hf.enable(model)
    assert relative(model(tokens).logits, exact) <= 1.1 * theirs


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_graph_decode(family: str) -> None:
    """Replayed steps give the tokens and logits of the usual path, cache after cache; a full cache is refused."""
    import transformers

    model, steps = hf.enable(build(family).cuda()), 6
    if family != "qwen3_5":
        model.set_experts_implementation("batched_mm")  # PyTorch's grouped product of fp32 reads its offsets back
    step = hf.graph_decode(model)
    for count, batch in ((20, 1), (33, 1), (12, 3)):
        prompt = byte_tokens(count, batch, seed=count).cuda()
        want = model.generate(prompt, max_new_tokens=steps + 1, do_sample=False)
        cache = transformers.StaticCache(config=model.config, max_cache_len=count + steps)
        logits = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        found = [logits[:, -1].argmax(-1, keepdim=True)]
        for _ in range(steps):
            logits = step(found[-1], cache)
            found.append(logits[:, -1].argmax(-1, keepdim=True))
        assert torch.equal(torch.cat(found, 1), want[:, count:])
        assert relative(logits[:, -1], model(want[:, :-1]).logits[:, -1]) <= 1e-5
        with pytest.raises(gdn.InvalidArgumentError, match="found a full StaticCache"):
            step(found[-1], cache)


def test_graph_decode_refusals() -> None:
    import transformers

    model, token = build("qwen3_5").cuda(), byte_tokens(1).cuda()
    with pytest.raises(gdn.InvalidArgumentError, match="graph_decode: argument 'model'"):
        hf.graph_decode(model)
    step = hf.graph_decode(hf.enable(model))
    cache = model(byte_tokens(9).cuda(), use_cache=True).past_key_values
    for wrong in (cache, transformers.StaticCache(config=model.config, max_cache_len=8)):
        with pytest.raises(gdn.InvalidArgumentError, match="graph_decode: argument 'past_key_values'"):
            step(token, wrong)
    with pytest.raises(gdn.InvalidArgumentError, match="graph_decode: argument 'input_ids'"):
        step(token.cpu(), cache)


def test_packed_sequences() -> None:
    """cu_seq_lens_q on the GPU: each prompt's own result, without reading the lengths back."""
    model = hf.enable(build("qwen3_5").cuda())
    layer = model.model.layers[0].linear_attn
    a, b = (torch.randn(1, n, 96, generator=torch.Generator().manual_seed(n)).cuda() for n in (21, 44))
    want = torch.cat([layer(a), layer(b)], 1)
    cu = torch.tensor([0, 21, 65], device="cuda", dtype=torch.int32)
    x = torch.cat([a, b], 1)
    with torch_refuses_waits():
        found = layer(x, cu_seq_lens_q=cu)
    assert relative(found, want) <= 1e-5


def _waits(model: Any, **kwargs: Any) -> int:
    """How many times PyTorch warns that a forward waits for the GPU."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model(**kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in seen)


def test_no_step_waits() -> None:
    """GDN layers never wait, in prefill and decode; the whole model waits no more often than Transformers' own path."""
    model, tokens = build("qwen3_5").cuda(), byte_tokens(20).cuda()
    step = tokens[:, :1]
    theirs = _waits(model, input_ids=step, past_key_values=model(tokens, use_cache=True).past_key_values)
    hf.enable(model)
    cache = model(tokens, use_cache=True).past_key_values
    model(step, past_key_values=cache, use_cache=True)
    layer = model.model.layers[0].linear_attn
    accepted = inspect.signature(type(layer).forward).parameters
    past = {"cache" if "cache" in accepted else "cache_params": cache}  # an older name of it
    for x in (torch.randn(1, 1, 96, device="cuda"), torch.randn(1, 30, 96, device="cuda")):
        layer(x, **past)
        with torch_refuses_waits():
            layer(x, **past)
        with busy_gpu() as busy:
            layer(x, **past)
            assert busy(), f"{x.shape[1]} tokens: the layer waited for the GPU"
    assert _waits(model, input_ids=step, past_key_values=cache) <= theirs


def test_layer_module() -> None:
    """gdn.nn.GatedDeltaNet: prefill and decode as on the CPU; its decode step can be captured."""
    torch.manual_seed(0)
    config = GatedDeltaNetConfig(96, num_k_heads=2, num_v_heads=4)
    layer = GatedDeltaNet(config)
    x = torch.randn(2, 50, 96)
    cpu_cache = layer.new_cache(2)
    want = torch.cat([layer(x[:, :49], cpu_cache), layer(x[:, 49:], cpu_cache)], 1)
    layer.cuda()
    y = x.cuda()
    cache = layer.new_cache(2)
    assert cache.state.is_cuda and cache.conv_state.is_cuda
    found = torch.cat([layer(y[:, :49], cache), layer(y[:, 49:], cache)], 1)
    assert relative(found.cpu(), want) <= 1e-5 and relative(cache.state.cpu(), cpu_cache.state) <= 1e-5

    token = torch.empty(2, 1, 96, device="cuda")
    graph, output = capture(lambda: layer(token, cache))
    cache.reset()
    layer(y[:, :49], cache)
    token.copy_(y[:, 49:])
    graph.replay()
    assert relative(output.cpu(), want[:, 49:]) <= 1e-5


def _run(*command: Any) -> dict[str, Any]:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    return json.loads(done.stdout)


def test_demo(tmp_path: Path) -> None:
    result = _run(
        ROOT / "demo" / "run.py", "--tiny", "--checkpoint", tmp_path / "c", "--tokens", 130, "--new-tokens", 6, "--json"
    )
    assert result["ok"] and result["comparison"]["tokens_equal"]
    for path in ("transformers", "libgdn"):
        info = result[path]
        assert info["device"].startswith("cuda:0") and info["gpu"] == torch.cuda.get_device_name(0)
        assert info["weight_bytes"] < info["peak_memory"] < 1 << 33
    assert result["libgdn"]["calls"]["chunk_forward"] == 3


def test_commands(tmp_path: Path) -> None:
    plan = _run("-m", "gdn.cli", "plan", "--explain", "--device", "cuda", "--json")
    assert plan["impl"] and {c["impl"] for c in plan["candidates"]} >= {"chunk_simt"}
    verified = _run("-m", "gdn.cli", "verify", "--device", "cuda", "-k", "pools", "--json")
    assert verified["ok"] and all(not r["impl"].startswith("reference") for r in verified["results"])
    bench = _run(
        "-m", "gdn.cli", "bench", "--device", "cuda", "--preset", "quick", "--dtype", "bf16", "--reps", 5, "--json"
    )
    assert len(bench["records"]) == 6 and bench["device"] == torch.cuda.get_device_name(0)
    assert all(0 < r["min_us"] <= r["median_us"] <= r["max_us"] < 1e5 for r in bench["records"])
    assert bench["peak"]["matmul_gflops"] > 1e3 and bench["peak"]["copy_gb_per_s"] > 10
