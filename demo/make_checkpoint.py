# SPDX-License-Identifier: MIT
"""Writes a Qwen3.5-architecture checkpoint: config.json and safetensors, by Transformers, from a fixed seed.

What is real: the layer pattern (three GDN layers, then one attention layer), the GDN head sizes (Hk 16, Hv 32,
K = V = 128, conv 4), the attention (head_dim 256, gated, partial rotary 0.25, theta 1e7, interleaved mRoPE sections
[11, 11, 10]). What is reduced: depth, hidden size and vocabulary (one token per byte).

Every parameter is drawn here, by name, so that the checkpoint does not depend on Transformers' own initialisation. The
decay has the range that trained models have (dt log-uniform in [1e-3, 1e-1], A uniform in [0.5, 16]): some heads forget
within a few tokens, some remember all of the prompt. The seed of the output head is one whose 64 greedy tokens vary and
are all decided by a margin far above fp32 rounding.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

BODY_SEED, HEAD_SEED = 20260101, 16


def config(hidden_size: int, num_layers: int, *, tiny: bool = False) -> Any:
    """The text config; `tiny` shrinks the heads too and is for tests only."""
    from transformers.models.qwen3_5 import Qwen3_5TextConfig

    head_dim = 32 if tiny else 128
    return Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        layer_types=["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(num_layers)],
        num_attention_heads=2 if tiny else 8,
        num_key_value_heads=1 if tiny else 2,
        head_dim=256,
        linear_num_key_heads=2 if tiny else 16,
        linear_num_value_heads=4 if tiny else 32,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
        linear_conv_kernel_dim=4,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        dtype="float32",
    )


def draw(name: str, parameter: Any, generator: Any) -> Any:
    """New values of one parameter, chosen by its name."""
    import torch

    def uniform(low: float, high: float) -> Any:
        return torch.empty(parameter.shape).uniform_(low, high, generator=generator)

    def normal(std: float, mean: float = 0.0) -> Any:
        return torch.empty(parameter.shape).normal_(mean, std, generator=generator)

    if name.endswith("A_log"):
        return uniform(0.5, 16).log()
    if name.endswith("dt_bias"):
        dt = uniform(math.log(1e-3), math.log(1e-1)).exp()
        return dt + torch.log(-torch.expm1(-dt))  # softplus(dt_bias) = dt
    if name.endswith("linear_attn.norm.weight"):
        return normal(0.1, 1.0)
    if name.endswith("norm.weight"):
        return normal(0.1)  # zero-centred: the model multiplies by 1 + weight
    if name.endswith("conv1d.weight"):
        return normal(parameter.shape[-1] ** -0.5)
    if name.endswith("embed_tokens.weight"):
        return normal(1.0)
    if name.endswith("lm_head.weight"):
        return normal(4 * parameter.shape[-1] ** -0.5)
    if parameter.ndim == 2:
        return normal(parameter.shape[-1] ** -0.5)
    raise ValueError(f"make_checkpoint: no rule for parameter {name} of shape {list(parameter.shape)}")


def initialise(model: Any, body_seed: int = BODY_SEED, head_seed: int = HEAD_SEED) -> None:
    """Draws every parameter in the order of the names; the output head has a seed of its own."""
    import torch

    generator = torch.Generator().manual_seed(body_seed)
    head_generator = torch.Generator().manual_seed(head_seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(draw(name, parameter, head_generator if name == "lm_head.weight" else generator))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--hidden-size", type=int, default=512, metavar="D")
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--tiny", action="store_true", help="shrunken heads, for tests")
    args = parser.parse_args(argv)

    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    model = Qwen3_5ForCausalLM(config(args.hidden_size, args.layers, tiny=args.tiny)).eval()
    initialise(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(args.folder)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
