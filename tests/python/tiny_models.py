# SPDX-License-Identifier: MIT
"""Tiny models of Transformers' own classes with random weights: 3 Gated DeltaNet layers and 1 attention layer."""

from __future__ import annotations

import torch
from torch import nn

ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.5,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": ROPE,
    "tie_word_embeddings": False,
}
MOE = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """family: qwen3_5, qwen3_5_moe or qwen3_next."""
    import transformers

    if family == "qwen3_5":
        config = transformers.Qwen3_5TextConfig(**SIZES, intermediate_size=128)
        cls = transformers.Qwen3_5ForCausalLM
    elif family == "qwen3_5_moe":
        config = transformers.Qwen3_5MoeTextConfig(**SIZES, **MOE)
        cls = transformers.Qwen3_5MoeForCausalLM
    else:
        config = transformers.Qwen3NextConfig(**SIZES, **MOE, intermediate_size=128, decoder_sparse_step=1)
        cls = transformers.Qwen3NextForCausalLM
    torch.manual_seed(seed)
    model = cls(config).to(dtype).eval()
    with torch.no_grad():
        # Fresh models have all norms at their neutral value and tiny projections: make every parameter count.
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith("dt_bias"):
                parameter.copy_(torch.randn_like(parameter))
            elif parameter.dim() >= 2 and "conv1d" not in name:
                parameter.mul_(3)
    return model


def byte_tokens(count: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (batch, count), generator=torch.Generator().manual_seed(seed))
