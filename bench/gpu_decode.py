#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Decode on one GPU: `recurrent` of one token (or a few) against the copy bandwidth measured in the same run.

    python bench/gpu_decode.py --gdn-lib build/libgdn.so [--out bench/results/h200]

Qwen3.5 heads (K = V = 128, half as many key heads), bf16 tokens, raw gates, L2 norm in the kernel, a pool of
states updated in place. The pools are rotated so that no state is in the L2 cache; medians of CUDA-graph replays. Every
implementation that takes the call is timed and, once, compared with recurrent_simt.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import datetime
import statistics
from pathlib import Path
from typing import Any

import torch

from gpu_common import HEADER, D, measure_ceilings
from gpu_impls import GdnLibrary

IMPLS = ("recurrent_simt", "recurrent_decode")


def timed(run: Any, rounds: int) -> list[float]:
    """Microseconds per call of `run(i)` for i = 0 .. rounds - 1, replayed as one graph."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(rounds):
            run(i)
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / rounds)
    return times[1:]


class Decode:
    """Calls on `copies` pools of states, one after another."""

    def __init__(self, library: GdnLibrary, batch: int, hv: int, tokens: int, dtype: torch.dtype, layout: str) -> None:
        self.gdn = library
        torch.manual_seed(0)
        device, hk = "cuda", hv // 2
        state_bytes = batch * hv * D * D * dtype.itemsize
        self.copies = max(2, min(64, -(-(256 << 20) // state_bytes)))
        self.pools = [torch.randn(batch, hv, D, D, device=device).mul_(0.1).to(dtype) for _ in range(self.copies)]
        bf16 = {"device": device, "dtype": torch.bfloat16}
        self.tensors = {
            "q": torch.randn(batch, tokens, hk, D, **bf16),
            "k": torch.randn(batch, tokens, hk, D, **bf16),
            "v": torch.randn(batch, tokens, hv, D, **bf16),
            "g": torch.randn(batch, tokens, hv, **bf16),
            "beta": torch.randn(batch, tokens, hv, **bf16),
            "A_log": torch.randn(hv, device=device) * 0.1,
            "dt_bias": torch.randn(hv, device=device),
            "o": torch.empty(batch, tokens, hv, D, **bf16),
        }
        self.args = library.api.RuleArgs(struct_size=ctypes.sizeof(library.api.RuleArgs), scale=D**-0.5, qk_l2norm=1)
        self.args.gate_form = library.api.GATE_FORMS["raw"]
        self.args.beta_form = library.api.BETA_FORMS["sigmoid"]
        self.args.state_layout = library.api.STATE_LAYOUTS[layout]
        self.views = {name: library.tensor(tensor) for name, tensor in self.tensors.items()}
        for name, view in self.views.items():
            setattr(self.args, name, ctypes.pointer(view))
        self.state_views = [library.tensor(pool) for pool in self.pools]

    def call(self, impl: str, i: int) -> int:
        view = ctypes.pointer(self.state_views[i % self.copies])
        self.args.initial_state = self.args.final_state = view
        self.args.impl = impl.encode()
        self.args.stream = torch.cuda.current_stream().cuda_stream
        return self.gdn.lib.gdn_recurrent(ctypes.byref(self.args))

    def result(self, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self.pools[0].clone()
        self.gdn.check(self.call(impl, 0))
        out = self.tensors["o"].float().clone(), self.pools[0].float().clone()
        self.pools[0].copy_(kept)
        return out


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gdn-lib", type=Path, required=True)
    p.add_argument("--out", type=Path, help="folder for decode.csv")
    p.add_argument("--commit", default="unknown")
    args = p.parse_args()
    library = GdnLibrary(args.gdn_lib)
    library.lib.gdn_recurrent.argtypes = (ctypes.POINTER(library.api.RuleArgs),)
    version, today = library.lib.gdn_version().decode(), datetime.date.today().isoformat()
    bandwidth = measure_ceilings("cuda")["copy_GBs"]
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth:.0f} GB/s")
    rows, wrong = [], 0
    shapes = [(n, 1, hv, s, "k_first") for s in ("fp32", "bf16") for hv in (32, 64) for n in (1, 4, 16, 64, 256)]
    shapes += [(64, 1, 32, "fp32", "v_first"), (256, 1, 32, "bf16", "v_first"), (32, 1, 32, "fp32", "k_first")]
    shapes += [(32, 4, 32, "fp32", "k_first"), (32, 4, 32, "bf16", "v_first")]
    for batch, tokens, hv, state, layout in shapes:
        dtype = torch.float32 if state == "fp32" else torch.bfloat16
        decode = Decode(library, batch, hv, tokens, dtype, layout)
        results = {impl: decode.result(impl) for impl in IMPLS}  # before the timed calls change the pools
        reference = results["recurrent_simt"]
        line = f"batch {batch:3d} tokens {tokens} Hv {hv} state {state} {layout}:"
        for impl in IMPLS:
            errors = [float((x - y).norm() / y.norm()) for x, y in zip(results[impl], reference, strict=True)]
            wrong += not max(errors) < 5e-3
            rounds = decode.copies * max(1, 8 // decode.copies)
            times = timed(lambda i, d=decode, name=impl: library.check(d.call(name, i)), rounds)
            median = statistics.median(times)
            moved = 2 * batch * hv * D * D * dtype.itemsize
            share = moved / median / 1e3 / bandwidth
            line += f"  {impl} {median:.2f} us ({100 * share:.0f} % of copy, rel {max(errors):.1e})"
            label = f"{layout} {tokens} tokens" if tokens > 1 else layout
            rows.append(
                ["recurrent", label, batch, hv // 2, hv, f"bf16/{state}", f"libgdn:{impl}", version]
                + [f"{t:.2f}" for t in (median, min(times), max(times))]
                + [args.commit, today]
            )
        print(line, flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "decode.csv").open("w", newline="") as f:
            writer = csv.writer(f)
            writer.writerow(HEADER)
            writer.writerows(rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
