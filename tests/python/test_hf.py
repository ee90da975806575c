# SPDX-License-Identifier: MIT
"""gdn.hf on tiny models of Transformers' own classes: equality, isolation, exact undo."""

from __future__ import annotations

import copy
import gc
import sys

import pytest
import torch

import gdn
from gdn import hf
from tiny_models import build, byte_tokens
from torch_formulas import relative

FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]
PATCHED = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "apply_rotary_pos_emb",
)


def _modeling(model):
    return sys.modules[type(model).__module__]


def _functions(model):
    return {name: getattr(_modeling(model), name) for name in PATCHED}


def _own_forwards(model):
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    with torch.no_grad():
        yield build(request.param)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def test_logits_and_greedy_tokens(model) -> None:
    tokens = byte_tokens(70)
    logits = model(tokens).logits
    generated = model.generate(tokens, max_new_tokens=12, do_sample=False)
    hf.enable(model)
    try:
        ours = model(tokens).logits
        assert relative(ours, logits) <= 1e-5
        first = hf.stats(model)
        # 3 linear layers, 1 attention layer; 2 norms per layer and the last one; 4 MLPs and the output gate
        assert first == {
            "chunk_forward": 3, "causal_conv1d_fn": 3, "rmsnorm_gated": 3, "qk_rmsnorm_rope": 1, "rmsnorm": 9, "glu": 5,
        }  # fmt: skip
        assert torch.equal(model.generate(tokens, max_new_tokens=12, do_sample=False), generated)
        taken = hf.stats(model)
        assert taken["chunk_forward"] == 6 and taken["recurrent"] == taken["causal_conv1d_update"] == 3 * 11
    finally:
        hf.disable(model)
    assert torch.equal(model(tokens).logits, logits) and hf.stats(model) == {}


def test_left_padded_batch(model) -> None:
    tokens = byte_tokens(40, batch=2)
    mask = torch.ones_like(tokens)
    mask[1, :13] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = model.generate(tokens, **options)
    logits = model(tokens, attention_mask=mask).logits
    hf.enable(model)
    try:
        assert relative(model(tokens, attention_mask=mask).logits, logits) <= 1e-5
        assert torch.equal(model.generate(tokens, **options), want)
    finally:
        hf.disable(model)


def test_prompt_in_two_parts() -> None:
    """A cached state that is continued by more than one token: conv context, chunk with initial state in place."""
    model = build("qwen3_5")
    tokens = byte_tokens(50)

    def run():
        out = model(tokens[:, :33], use_cache=True)
        out = model(tokens[:, 33:47], past_key_values=out.past_key_values, use_cache=True)
        out = model(tokens[:, 47:48], past_key_values=out.past_key_values, use_cache=True)
        return model(tokens[:, 48:], past_key_values=out.past_key_values, use_cache=True).logits

    want = run()
    whole = model(tokens).logits[:, 48:]
    hf.enable(model)
    ours = run()
    assert relative(ours, want) <= 1e-5 and relative(ours, whole) <= 1e-5
    assert hf.stats(model)["chunk_forward"] == 9 and hf.stats(model)["recurrent"] == 3


def test_bf16_is_as_close_to_fp32_as_transformers() -> None:
    tokens = byte_tokens(70)
    exact = build("qwen3_5")(tokens).logits
    model = build("qwen3_5", torch.bfloat16)
    theirs = relative(model(tokens).logits, exact)
    hf.enable(model)
    ours = relative(model(tokens).logits, exact)
    assert ours <= 1.25 * theirs


def test_packed_sequences() -> None:
    """cu_seq_lens_q: two prompts in one row give each prompt's own logits (Transformers' fallback refuses this)."""
    model = hf.enable(build("qwen3_5"))
    a, b = byte_tokens(20, seed=3), byte_tokens(31, seed=4)
    positions = torch.cat([torch.arange(20), torch.arange(31)])[None]
    cu = torch.tensor([0, 20, 51], dtype=torch.int32)
    mask = torch.full((51, 51), torch.finfo(torch.float32).min).triu(1)
    mask[20:, :20] = torch.finfo(torch.float32).min
    layers = model.model.layers
    x = torch.randn(1, 51, 96, generator=torch.Generator().manual_seed(0))
    want = torch.cat([layers[0].linear_attn(x[:, :20]), layers[0].linear_attn(x[:, 20:])], 1)
    assert relative(layers[0].linear_attn(x, cu_seq_lens_q=cu), want) <= 1e-5
    packed = model(
        torch.cat([a, b], 1), position_ids=positions, attention_mask=mask[None, None], use_cache=False, cu_seq_lens_q=cu
    ).logits
    assert relative(packed, torch.cat([model(a).logits, model(b).logits], 1)) <= 1e-5


def test_enable_is_idempotent_and_disable_exact(model) -> None:
    functions, attributes = _functions(model), {n: set(vars(m)) for n, m in model.named_modules()}
    assert hf.disable(model) is model  # not enabled: nothing to do
    assert hf.enable(model) is model and hf.enable(model) is model and hf.is_enabled(model)
    assert all(_functions(model)[name] is not functions[name] for name in PATCHED)
    hf.disable(model)
    assert _functions(model) == functions and not hf.is_enabled(model)
    assert {n: set(vars(m)) for n, m in model.named_modules()} == attributes


def test_other_models_are_unaffected() -> None:
    tokens = byte_tokens(40)
    one, other = build("qwen3_5", seed=1), build("qwen3_5", seed=2)
    want = other(tokens).logits
    functions = _functions(one)
    hf.enable(one)
    assert torch.equal(other(tokens).logits, want) and not _own_forwards(other)
    hf.enable(other)
    assert not torch.equal(other(tokens).logits, want) and relative(other(tokens).logits, want) <= 1e-5
    hf.disable(one)
    before = hf.stats(other)["chunk_forward"]
    other(tokens)  # still on libgdn although the first model left
    assert hf.stats(other)["chunk_forward"] == before + 3
    hf.disable(other)
    assert torch.equal(other(tokens).logits, want) and _functions(other) == functions


def test_dropped_model_gives_the_functions_back() -> None:
    model = build("qwen3_5")
    module, functions = _modeling(model), _functions(model)
    hf.enable(model)
    del model
    gc.collect()
    assert {name: getattr(module, name) for name in PATCHED} == functions


def test_own_forward_of_a_submodule_is_restored() -> None:
    """Hooks such as accelerate's replace forward on the instance; they stay in the chain and come back."""
    model, tokens, calls = build("qwen3_5"), byte_tokens(9), []
    layer = model.model.layers[0].linear_attn
    original = layer.forward

    def hook(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    layer.forward = hook
    hf.enable(model)
    model(tokens)
    assert len(calls) == 1 and hf.stats(model)["chunk_forward"] == 3
    hf.disable(model)
    assert layer.forward is hook


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_inside_layers_are_called(family) -> None:
    """What is fused away where nobody looks is run where somebody does."""
    model, tokens = build(family), byte_tokens(9)
    want = model(tokens).logits
    hf.enable(model)
    layers, calls = model.model.layers, []
    parts = [
        layers[1].input_layernorm, layers[1].post_attention_layernorm, layers[1].linear_attn.norm, model.model.norm,
        layers[1].linear_attn.out_proj, layers[3].self_attn.q_norm, layers[3].self_attn.o_proj, layers[3].mlp,
    ]  # fmt: skip
    for part in parts:
        part.register_forward_hook(lambda module, args, out: calls.append(module))
    assert relative(model(tokens).logits, want) <= 1e-5
    assert calls == sorted(calls, key=calls.index) and set(calls) == set(parts) and len(calls) == len(parts)


def test_a_changed_residual_is_normed_again() -> None:
    """A hook that adds to a decoder layer's result, in place or not, is seen by the next layer's norm."""
    tokens = byte_tokens(9)
    for in_place in (False, True):
        model = build("qwen3_5")

        def steer(module, args, out, in_place=in_place):
            return out.add_(0.5) if in_place else out + 0.5

        model.model.layers[1].register_forward_hook(steer)
        model.model.layers[3].register_forward_hook(steer)
        want = model(tokens).logits
        assert relative(hf.enable(model)(tokens).logits, want) <= 1e-5


def test_inference_mode_and_hidden_states() -> None:
    model, tokens = build("qwen3_5"), byte_tokens(40)
    want = model(tokens, output_hidden_states=True)
    hf.enable(model)
    found = model(tokens, output_hidden_states=True)
    for ours, theirs in zip(found.hidden_states, want.hidden_states, strict=True):
        assert relative(ours, theirs) <= 1e-5
    with torch.inference_mode():
        assert relative(model(tokens).logits, want.logits) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_projections(family) -> None:
    """Same results, same parameters and state dict; weights that were changed, moved or hooked count."""
    model, tokens = build(family), byte_tokens(40)
    want = model.generate(tokens, max_new_tokens=8, do_sample=False)
    logits, before = model(tokens).logits, {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    hf.enable(model, merge_projections=True)
    attention = model.model.layers[3].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    assert relative(model(tokens).logits, logits) <= 1e-5
    assert torch.equal(model.generate(tokens, max_new_tokens=8, do_sample=False), want)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())

    twin = copy.deepcopy(model)
    for changed in (model, twin):
        changed.model.layers[3].self_attn.k_proj.weight.mul_(1.5)  # in place: of the merged weights, too
        mlp = getattr(changed.model.layers[1].mlp, "shared_expert", changed.model.layers[1].mlp)
        mlp.up_proj = torch.nn.Linear(96, mlp.up_proj.out_features, bias=False)  # not of the merged weights
        mlp.up_proj.weight.fill_(0.01)
        calls = []
        changed.model.layers[3].self_attn.v_proj.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        ours = changed(tokens).logits
        assert calls == [1]
    assert torch.equal(twin(tokens).logits, ours)
    hf.disable(model)
    assert relative(model(tokens).logits, ours) <= 1e-5 and not torch.equal(ours, logits)
    storage = attention.q_proj.weight.untyped_storage()
    assert storage.nbytes() == attention.q_proj.weight.numel() * 4
    model.double().float()
    assert relative(hf.enable(model, merge_projections=True)(tokens).logits, ours) <= 1e-5
    model.double().float()  # memory of its own again for every weight
    assert relative(model(tokens).logits, ours) <= 1e-5


def test_copied_model_uses_its_own_weights() -> None:
    model, tokens = build("qwen3_5"), byte_tokens(9)
    hf.enable(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens).logits, model(tokens).logits)
    twin.model.layers[0].linear_attn.out_proj.weight.zero_()
    twin.model.layers[3].self_attn.q_norm.weight.add_(1)
    assert not torch.equal(twin(tokens).logits, model(tokens).logits)
    changed = twin(tokens).logits
    hf.disable(model)
    assert relative(twin(tokens).logits, changed) <= 1e-5


def test_refusals() -> None:
    model = build("qwen3_5")
    with pytest.raises(
        gdn.InvalidArgumentError, match="hf.enable: argument 'model': found Linear without Gated DeltaNet"
    ):
        hf.enable(torch.nn.Linear(2, 2))
    with torch.device("meta"), pytest.raises(gdn.UnsupportedError, match="is on meta, expected the CPU"):
        hf.enable(copy.deepcopy(model).to("meta"))
    hf.enable(model)
    with torch.enable_grad(), pytest.raises(gdn.UnsupportedError, match="backward is not implemented yet"):
        model(byte_tokens(5))
