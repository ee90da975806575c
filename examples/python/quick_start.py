"""Prefill of a prompt and one decode step with torch tensors, checked against the recurrence written out."""

import torch

# README begin
from gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

# README end

B, T, Hk, Hv, K, V = 2, 100, 2, 4, 64, 64
torch.manual_seed(0)
q, k, v = torch.randn(B, T, Hk, K), torch.randn(B, T, Hk, K), torch.randn(B, T, Hv, V)
g, beta = -0.1 * torch.rand(B, T, Hv), torch.rand(B, T, Hv)
q1, k1, v1 = torch.randn(B, 1, Hk, K), torch.randn(B, 1, Hk, K), torch.randn(B, 1, Hv, V)
g1, beta1 = -0.1 * torch.rand(B, 1, Hv), torch.rand(B, 1, Hv)

# README begin
o, state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
o1, state = fused_recurrent_gated_delta_rule(
    q1, k1, v1, g=g1, beta=beta1, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
)
# README end


def normalise(x: torch.Tensor) -> torch.Tensor:
    x = x.double().repeat_interleave(Hv // Hk, dim=2)
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


q, k = normalise(torch.cat([q, q1], 1)), normalise(torch.cat([k, k1], 1))
v, g, beta = torch.cat([v, v1], 1).double(), torch.cat([g, g1], 1).double(), torch.cat([beta, beta1], 1).double()
S = torch.zeros(B, Hv, K, V, dtype=torch.float64)
rows = []
for t in range(T + 1):
    S = S * g[:, t].exp()[..., None, None]
    u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
    S = S + k[:, t, :, :, None] * u[:, :, None, :]
    rows.append(K**-0.5 * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
expected = torch.stack(rows, 1)

for name, found, wanted in (("o", torch.cat([o, o1], 1), expected), ("state", state, S)):
    error = float((found.double() - wanted).norm() / wanted.norm())
    print(f"{name}: relative error {error:.1e}")
    assert error < 5e-6
