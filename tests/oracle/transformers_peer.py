# SPDX-License-Identifier: MIT
"""Transformers' own fallback as an installed peer."""

from __future__ import annotations

import numpy as np
import torch


def torch_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    l2norm: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """torch_chunk_gated_delta_rule of modeling_qwen3_5. q, k [B, T, Hk, K]; v [B, T, Hv, V]; g, beta [B, T, Hv]; state
    [B, Hv, K, V] fp32. -> (o, S) as fp32 arrays."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    def call(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch_chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=l2norm
        )

    try:
        o, s = call(q, k)
    except RuntimeError:  # releases up to 5.17: the layer, not the function, repeats q and k for the value heads
        group = v.shape[2] // q.shape[2]
        o, s = call(q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2))
    return o.float().numpy(), s.float().numpy()
