# SPDX-License-Identifier: MIT
"""``gdn plan``: what a call of the delta rule would run, and why not something else. Computes nothing."""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path
from typing import Any

from .. import _capi
from . import plot
from .calls import OP_NAMES, OPS, Struct, integers, tensor_shape
from .console import Console, UsageError
from .device import add_device_flag, device_id, explain_on

_FLOATS = ("fp32", "bf16", "fp16", "fp64")


def add_shape_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `plan` and `bench` that describe a call."""
    group = parser.add_argument_group("shape")
    group.add_argument("-B", type=int, default=None, metavar="N", help="batch (default 1)")
    group.add_argument("-T", type=int, default=None, metavar="N", help="tokens")
    group.add_argument("--hk", type=int, default=16, metavar="N", help="key heads (default 16)")
    group.add_argument("--hv", type=int, default=32, metavar="N", help="value heads (default 32)")
    group.add_argument("-K", type=int, default=128, metavar="N", help="key dimension (default 128)")
    group.add_argument("-V", type=int, default=128, metavar="N", help="value dimension (default 128)")
    group.add_argument("--seqlens", metavar="7,9,4x512", help="packed sequences of these lengths (cu_seqlens); B is 1")
    group = parser.add_argument_group("dtypes and forms")
    group.add_argument("--dtype", choices=_FLOATS, default="fp32", help="of q, k, v, o (default fp32)")
    group.add_argument("--gate-dtype", choices=_FLOATS, default="fp32", help="of g and beta (default fp32)")
    group.add_argument("--state-dtype", choices=_FLOATS, default="fp32", help="of the states (default fp32)")
    group.add_argument("--state-layout", choices=tuple(_capi.STATE_LAYOUTS), default="k_first")
    group.add_argument("--head-map", choices=tuple(_capi.HEAD_MAPS), default="grouped")
    group.add_argument("--l2norm", action="store_true", help="q and k are normalised inside")
    group.add_argument("--batch-invariant", action="store_true")
    group = parser.add_argument_group("splitting of long sequences (GPU)")
    group.add_argument("--split", default="auto", metavar="auto|off|N", help="N: tokens per segment, a multiple of 64")
    group.add_argument("--split-exact", action="store_true", help="no gate window")
    group.add_argument("--split-threshold", type=float, default=0.0, metavar="X", help="of the gate window (0: 10)")
    group.add_argument(
        "--impl", default="auto", metavar="NAME", help="one implementation (default: the first that accepts)"
    )


def lengths(args: argparse.Namespace, default_tokens: int) -> tuple[int, int, list[int] | None]:
    """(B, T, sequence lengths or None) of the shape flags."""
    batch = 1 if args.B is None else args.B
    if args.seqlens is None:
        return batch, default_tokens if args.T is None else args.T, None
    lens = integers(args.seqlens)
    if batch != 1:
        raise UsageError(f"argument '-B': found {args.B} with --seqlens, expected 1 (the sequences are packed)")
    tokens = sum(lens)
    if args.T is not None and args.T < tokens:
        raise UsageError(f"argument '-T': found {args.T}, expected at least the sum of --seqlens, {tokens}")
    return 1, tokens if args.T is None else args.T, lens


def rule_forms(args: argparse.Namespace) -> dict[str, Any]:
    """Scalar fields of gdn_rule_args that the flags set."""
    return {
        "head_map": _capi.HEAD_MAPS[args.head_map],
        "state_layout": _capi.STATE_LAYOUTS[args.state_layout],
        "qk_l2norm": int(args.l2norm),
        "batch_invariant": int(args.batch_invariant),
        "impl": args.impl,
        **_split(args),
    }


def _split(args: argparse.Namespace) -> dict[str, Any]:
    fields = {"split_exact": int(args.split_exact), "split_threshold": args.split_threshold}
    if args.split in _capi.SPLITS:
        return {**fields, "split": _capi.SPLITS[args.split]}
    try:
        return {**fields, "split_tokens": int(args.split)}
    except ValueError:
        raise UsageError(f"argument '--split': found {args.split!r}, expected auto, off or a number") from None


def rule_struct(args: argparse.Namespace, op: str) -> Struct:
    """gdn_rule_args of the flags, without data."""
    B, T, lens = lengths(args, 1 if op == "recurrent" else 4096)
    count = B if lens is None else len(lens)
    dims = (args.K, args.V) if args.state_layout == "k_first" else (args.V, args.K)
    struct = Struct(
        _capi.RuleArgs,
        q=tensor_shape((B, T, args.hk, args.K), args.dtype),
        k=tensor_shape((B, T, args.hk, args.K), args.dtype),
        v=tensor_shape((B, T, args.hv, args.V), args.dtype),
        g=tensor_shape((B, T, args.hv), args.gate_dtype),
        beta=tensor_shape((B, T, args.hv), args.gate_dtype),
        o=tensor_shape((B, T, args.hv, args.V), args.dtype),
        initial_state=tensor_shape((count, args.hv, *dims), args.state_dtype),
        final_state=tensor_shape((count, args.hv, *dims), args.state_dtype),
        **rule_forms(args),
    )
    if lens is not None:
        ends = [0]
        for length in lens:
            ends.append(ends[-1] + length)
        data = (ctypes.c_int64 * len(ends))(*ends)
        cu_seqlens = tensor_shape((len(ends),), "i64")
        cu_seqlens.data = ctypes.addressof(data)
        struct._keep.append(data)
        struct.set(cu_seqlens=cu_seqlens)
    return struct


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "plan", parents=[common], help="what a call would run, and why not something else", description=__doc__
    )
    parser.add_argument("--op", choices=tuple(OP_NAMES), default="chunk", help="chunk (prefill) or recurrent (decode)")
    parser.add_argument("--explain", action="store_true", help="list every implementation with its reason to refuse")
    parser.add_argument(
        "--plot", metavar="FILE.svg", help="draw when each block of a chunk_forward would run (chunk_sm90)"
    )
    parser.add_argument(
        "--plot-rows", type=int, metavar="N", help="multiprocessors to draw (default: all, or 32 of more than 40)"
    )
    parser.add_argument(
        "--from",
        dest="saved",
        metavar="PLAN.json",
        help="a plan saved with --json, instead of the call that flags describe",
    )
    add_device_flag(parser)
    add_shape_flags(parser)
    parser.set_defaults(run=run)


def _load(path: str) -> dict[str, Any]:
    """A plan that --json wrote."""
    try:
        plan = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"argument '--from': found {path} ({error}), expected a file of gdn plan --json") from None
    if not isinstance(plan, dict) or "candidates" not in plan or "problem" not in plan:
        raise UsageError(f"argument '--from': found other JSON in {path}, expected what gdn plan --json writes")
    return plan


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    if args.saved is not None:
        return _load(args.saved)
    op = OP_NAMES[args.op]
    struct = rule_struct(args, op)  # owns what its fields point to
    plan = explain_on(device_id(args), OPS[op], struct.args)
    if args.seqlens is not None:  # on a GPU the library does not read them
        plan["lengths"] = integers(args.seqlens)
    return plan


def run(args: argparse.Namespace, console: Console) -> int:
    if args.plot_rows is not None and args.plot_rows < 1:
        raise UsageError(f"argument '--plot-rows': found {args.plot_rows}, expected at least 1")
    plan = _plan(args)
    accepted = plan.get("impl") is not None
    if accepted:
        shown = (
            "op", "impl", "condition", "isa", "threads", "work_items", "panel_v", "block_tokens",
            "shares", "together", "scratch_bytes", "split",
        )  # fmt: skip
        rows = [(name.replace("_", " "), plan[name]) for name in shown if name in plan]
        rows += [(name.replace("_", " "), value) for name, value in plan.get("problem", {}).items()]
        console.table(("plan", ""), rows, left=2)
    if args.explain and plan.get("options"):
        options = [
            (
                o["panel_v"],
                o["split_tokens"] or "whole",
                f"{o['shares']} shares" if o.get("shares") else "one per item",
                f"{o['predicted_us']:.0f}",
            )
            for o in plan["options"][:12]
        ]
        console.line()
        console.table(("V columns per block", "tokens per segment", "blocks", "predicted us"), options, left=0)
    if args.explain:
        candidates = [
            (c["impl"], "yes" if c["accepted"] else "no", c["reason"] or c.get("condition", ""))
            for c in plan["candidates"]
        ]
        console.line()
        console.table(("implementation, in order", "accepts", "reason"), candidates, left=3)
    console.document(plan)
    if not accepted:
        console.error(plan["error"])
        return 3
    if args.plot is not None:
        picture = plot.svg(plan, args.plot_rows)
        try:
            Path(args.plot).write_text(picture, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"argument '--plot': found {args.plot} ({error}), expected a file to write") from None
    return 0
