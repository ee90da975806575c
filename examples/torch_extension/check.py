# SPDX-License-Identifier: MIT
"""Loads the built extension and compares one decode step with gdn.torch: python check.py [folder of my_gdn.so]."""

import glob
import sys

import torch

import gdn.torch

folder = sys.argv[1] if len(sys.argv) > 1 else "."
torch.ops.load_library(glob.glob(f"{folder}/**/my_gdn*.so", recursive=True)[0])

torch.manual_seed(0)
batch, hk, hv, dim = 2, 2, 4, 64
q, k = torch.randn(batch, 1, hk, dim), torch.randn(batch, 1, hk, dim)
v, a, b = torch.randn(batch, 1, hv, dim), torch.randn(batch, 1, hv), torch.randn(batch, 1, hv)
A_log, dt_bias, state = torch.randn(hv), torch.randn(hv), torch.randn(batch, hv, dim, dim)

mine = state.clone()
o = torch.ops.my_gdn.step(q, k, v, a, b, A_log, dt_bias, mine)
want, want_state = gdn.torch.recurrent(
    q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, gate="raw", beta_form="sigmoid", qk_l2norm=True,
    initial_state=state, inplace=True,
)  # fmt: skip
assert torch.equal(o, want) and torch.equal(mine, want_state)

try:
    torch.ops.my_gdn.step(q, k[..., :5], v, a, b, A_log, dt_bias, mine)
except RuntimeError as error:
    assert "argument 'k'" in str(error)
else:
    raise SystemExit("a wrong shape was accepted")
print("my_gdn.step equals gdn.torch.recurrent")
