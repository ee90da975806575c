# SPDX-License-Identifier: MIT
"""``gdn bench --scenario``: a long prompt through one layer's chunk_forward, in one piece and as engines feed it.

Engines prefill in pieces of a fixed number of tokens and carry the state from one to the next. Every way gets the same
inputs; times are of all pieces together, errors relative (L2) to the prompt in one piece. This is the operator at a
model's head shape, not the model.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import _capi
from .console import Console, UsageError, need
from .device import Timer, device_id


@dataclass(frozen=True)
class Scenario:
    model: str
    hk: int
    hv: int
    tokens: int


# Head shapes of Qwen3.5's GDN layers on one GPU; tp: what one rank of a tensor-parallel group has.
SCENARIOS = {
    "9b-4k": Scenario("9B (also 35B, 4B)", 16, 32, 4096),
    "9b-32k": Scenario("9B (also 35B, 4B)", 16, 32, 32768),
    "9b-128k": Scenario("9B (also 35B, 4B)", 16, 32, 131072),
    "27b-256k": Scenario("27B, forward only", 16, 48, 262144),
    "122b-tp4-64k": Scenario("122B or 397B, tensor parallel 4", 4, 16, 65536),
    "397b-tp8-32k": Scenario("122B or 397B, tensor parallel 8", 2, 8, 32768),
    "397b-tp8-128k": Scenario("122B or 397B, tensor parallel 8", 2, 8, 131072),
    "397b-tp8-1m": Scenario("122B or 397B, tensor parallel 8", 2, 8, 1048576),
    "397b-128k": Scenario("122B or 397B", 16, 64, 131072),
}
PIECES = (2048, 4096, 8192)
_HEAD = 128


def add_flags(parser: Any) -> None:
    parser.add_argument(
        "--scenario", action="append", choices=tuple(SCENARIOS), help="a long prompt in pieces; may be repeated"
    )
    parser.add_argument(
        "--pieces", default=",".join(map(str, PIECES)), metavar="N,N...",
        help=f"tokens per piece of --scenario (default {','.join(map(str, PIECES))})",
    )  # fmt: skip


def _pieces(text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.split(",") if size]
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise UsageError(f"bench: argument '--pieces': found {text!r}, expected numbers of tokens separated by commas")
    return sizes


def _inputs(torch: Any, shape: Scenario, dtype: Any, device: Any) -> dict[str, Any]:
    """As in the benchmark beside the peers: unit q and k, g = logsigmoid / 16 and 0 on a quarter of the heads."""
    functional = torch.nn.functional
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(heads: int, *size: int) -> Any:
        return torch.randn(1, shape.tokens, heads, *size, generator=generator, device=device, dtype=torch.float32)

    g = functional.logsigmoid(normal(shape.hv)) / 16
    g[..., 1::4] = 0
    return {
        "q": functional.normalize(normal(shape.hk, _HEAD), dim=-1).to(dtype),
        "k": functional.normalize(normal(shape.hk, _HEAD), dim=-1).to(dtype),
        "v": normal(shape.hv, _HEAD).to(dtype),
        "g": g,
        "beta": torch.rand(1, shape.tokens, shape.hv, generator=generator, device=device),
    }


class Prompt:
    """One scenario's inputs and its state, which every run starts from zero."""

    def __init__(self, torch: Any, shape: Scenario, dtype: Any, device: Any) -> None:
        from .. import torch as ops

        self._ops, self.tokens = ops, shape.tokens
        self.inputs = _inputs(torch, shape, dtype, device)
        self.state = torch.zeros(1, shape.hv, _HEAD, _HEAD, device=device)

    def run(self, size: int) -> list[Any]:
        """o of every piece; self.state is the final state."""
        self.state.zero_()
        return [
            self._ops.chunk_forward(
                **{name: x[:, begin : begin + size] for name, x in self.inputs.items()},
                initial_state=self.state, inplace=True,
            )[0]
            for begin in range(0, self.tokens, size)
        ]  # fmt: skip


def _error(torch: Any, found: Any, expected: Any) -> float:
    difference, norm = (found.float() - expected.float()).norm(), expected.float().norm()
    return float(difference / torch.clamp(norm, min=1e-30))


def _samples(call: Callable[[], Any], timer: Timer | None, args: argparse.Namespace) -> list[float]:
    if timer is not None:
        return timer.measure(call, args.seconds, args.reps or 5)
    from .bench import measure

    return measure([call], args.seconds, args.reps or 3)


def run(args: argparse.Namespace, console: Console) -> int:
    torch = need("torch", "gdn bench --scenario")
    sizes = _pieces(args.pieces)
    device = device_id(args)
    timer = None if device is None else Timer(device)
    place = torch.device("cpu") if device is None else torch.device("cuda", device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    info = _capi.info()
    records, rows = [], []
    with console.progress(len(args.scenario) * (1 + len(sizes)), "bench") as progress:
        for name in args.scenario:
            shape = SCENARIOS[name]
            prompt = Prompt(torch, shape, dtype, place)
            whole = torch.cat(prompt.run(shape.tokens), dim=1)
            final = prompt.state.clone()
            one = 0.0
            for size in [shape.tokens, *(size for size in sizes if size < shape.tokens)]:
                progress.step(f"{name}, pieces of {size}", advance=0)
                pieces = torch.cat(prompt.run(size), dim=1)
                errors = _error(torch, pieces, whole), _error(torch, prompt.state, final)
                same = bool((pieces == whole).all()) and bool((prompt.state == final).all())
                del pieces
                samples = _samples(lambda p=prompt, s=size: p.run(s), timer, args)
                median = statistics.median(samples)
                one = one or median
                records.append(
                    {
                        "op": "chunk_forward", "label": f"{name} pieces of {size}", "seqlens": str(shape.tokens),
                        "h_k": shape.hk, "h_v": shape.hv, "dtype": f"{args.dtype}/fp32", "impl": "libgdn",
                        "version": info["version"], "median_us": round(median * 1e6, 2),
                        "min_us": round(min(samples) * 1e6, 2), "max_us": round(max(samples) * 1e6, 2),
                        "commit": info["build"]["git"], "date": datetime.date.today().isoformat(),
                        "o_error": errors[0], "state_error": errors[1], "same_bits": same,
                    }
                )  # fmt: skip
                rows.append(
                    (
                        name, "one piece" if size == shape.tokens else str(size), f"{median * 1e3:.3f}",
                        f"{median / one:.2f}", f"{median * 1e6 / shape.tokens / shape.hv:.3g}",
                        "same bits" if same else f"{errors[0]:.1e}", "same bits" if same else f"{errors[1]:.1e}",
                    )
                )  # fmt: skip
                progress.step()
            del prompt, whole, final
    header = ("scenario", "pieces of", "median ms", "of one piece", "us/token/head", "o against one piece", "state")
    console.table(header, rows, "chunk_forward at a model's head shape", left=2)
    console.document({"machine": info, "device": args.device or "cpu", "records": records})
    if args.csv:
        from .bench import write_csv

        write_csv(args.csv, records)
    return 0
