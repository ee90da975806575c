# SPDX-License-Identifier: MIT
"""``gdn bench``: time of every operator, beside what the machine can do.

Each call is warmed up, then timed; median, smallest and largest are given. Buffers rotate over more than the last-level
cache, as the layers of a model do (--warm-cache: one set). The limits are measured in the same run: the fp32
multiply-add peak of the instruction set in use (6 K V FLOP per token and value head are counted for the delta rule) and
the rate of a memory copy (bytes that must be read and written).

With --device cuda a call is the replay of a captured graph, its launch included, with the L2 cache flushed before each
(--warm-cache: not); the limits are those of a bf16 matrix product and of a device copy.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from .. import _capi
from .console import Console, UsageError, need
from .device import Timer, add_device_flag, device_id
from .plan import add_shape_flags, lengths
from .scenario import add_flags as add_scenario_flags

OPERATORS = ("chunk_forward", "recurrent", "conv1d", "gate", "rmsnorm_gated", "qk_rmsnorm_rope")
CSV_HEADER = "op,label,seqlens,h_k,h_v,dtype,impl,version,median_us,min_us,max_us,commit,date".split(",")
# (operator, label, B, T): what a layer of Qwen3.5 does in prefill and in decode.
PRESETS: dict[str, tuple[tuple[str, str, int, int], ...]] = {
    "qwen3.5": (
        *((op, f"prefill {T}", 1, T) for op in OPERATORS if op != "recurrent" for T in (512, 4096)),
        *((op, f"decode {B}", B, 1) for op in OPERATORS if op != "chunk_forward" for B in (1, 8)),
    ),
    "prefill": tuple(("chunk_forward", f"prefill {T}", 1, T) for T in (64, 512, 4096, 16384)),
    "decode": tuple(("recurrent", f"decode {B}", B, 1) for B in (1, 2, 4, 8, 16, 32)),
    "quick": tuple((op, "quick", 1, 1 if op == "recurrent" else 64) for op in OPERATORS),
}
_ROTATE_BYTES, _MAX_SETS = 128 << 20, 128
_MIN_SAMPLE_SECONDS = 100e-6


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "bench",
        parents=[common],
        help="time of every operator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--op", action="append", choices=("chunk", *OPERATORS), help="may be repeated (default: all)")
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), default=None, help="shapes (default qwen3.5; or give -B, -T)"
    )
    parser.add_argument("--label", help="label of the records (default: prefill T or decode B)")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="time measured per row (default 1)")
    parser.add_argument("--reps", type=int, default=0, metavar="N", help="exactly N timed samples instead")
    parser.add_argument(
        "--warm-cache", action="store_true", help="one set of buffers: everything that fits stays in cache"
    )
    parser.add_argument("--csv", metavar="FILE", help="append records to FILE ('-': standard output)")
    add_device_flag(parser)
    add_scenario_flags(parser)
    add_shape_flags(parser)
    parser.set_defaults(run=run)


def _shapes(args: argparse.Namespace) -> list[tuple[str, str, int, int, list[int] | None]]:
    """(operator, label, B, T, lengths) of every row."""
    ops = ["chunk_forward" if op == "chunk" else op for op in args.op] if args.op else None
    given = args.T is not None or args.B is not None or args.seqlens is not None
    if given and args.preset:
        raise UsageError("bench: found --preset and a shape (-B, -T or --seqlens), expected one of them")
    if not given:
        rows = [row for row in PRESETS[args.preset or "qwen3.5"] if ops is None or row[0] in ops]
        if not rows:
            raise UsageError(f"bench: preset {args.preset} has no shape for {', '.join(ops or [])}")
        return [(op, args.label or label, B, T, None) for op, label, B, T in rows]
    rows = []
    for op in ops or OPERATORS:
        B, T, lens = lengths(args, 1 if op == "recurrent" else 4096)
        if lens is not None and op not in ("chunk_forward", "recurrent"):
            continue  # elementwise operators do not know sequences
        label = args.label or (f"decode {B}" if T == 1 else f"prefill {T}")
        rows.append((op, label, B, T, lens))
    if not rows:
        raise UsageError(
            "bench: argument '--seqlens': found operators that know no sequences, expected chunk or recurrent"
        )
    return rows


def measure(calls: list[Any], seconds: float, reps: int) -> list[float]:
    """Seconds per call, one value per sample; short calls are timed several at a time."""
    begin = time.perf_counter()
    for call in calls:  # warm-up: every set of buffers once, then at least 20 % of the measured time
        call()
    first = (time.perf_counter() - begin) / len(calls)
    while not reps and time.perf_counter() - begin < 0.2 * seconds:
        calls[0]()
    inner = max(1, int(_MIN_SAMPLE_SECONDS / max(first, 1e-9)))
    samples: list[float] = []
    at, end = 0, time.perf_counter() + seconds
    while len(samples) < reps if reps else (len(samples) < 3 or time.perf_counter() < end):
        begin = time.perf_counter()
        for _ in range(inner):
            calls[at]()
            at = (at + 1) % len(calls)
        samples.append((time.perf_counter() - begin) / inner)
    return samples


def run(args: argparse.Namespace, console: Console) -> int:
    if args.reps < 0 or not args.seconds > 0:
        raise UsageError(f"bench: found --seconds {args.seconds} and --reps {args.reps}, expected positive numbers")
    if args.scenario:
        from .scenario import run as run_scenarios

        if args.op or args.preset or args.T is not None or args.B is not None or args.seqlens is not None:
            raise UsageError("bench: found --scenario and --op, --preset or a shape, expected one of them")
        return run_scenarios(args, console)
    need("numpy", "gdn bench")
    from .bench_ops import Maker

    for name in ("hk", "hv", "K", "V"):
        if getattr(args, name) < 1:
            raise UsageError(f"bench: argument '{name}': found {getattr(args, name)}, expected 1 or more")
    shapes = _shapes(args)
    records = []
    device = device_id(args)
    timer = None if device is None else Timer(device)
    rotate = device is None and not args.warm_cache
    maker = Maker(args, lambda size: max(1, min(_MAX_SETS, int(_ROTATE_BYTES / max(size, 1)))) if rotate else 1, device)
    with console.progress(len(shapes) + 1, "bench") as progress:
        progress.step("measuring the machine's limits", advance=0)
        if timer is None:
            gflops, copy_gb = _capi.measure_peak(args.threads)
        else:
            tflops, copy_gb = timer.limits()
            gflops = 1e3 * tflops
        progress.step()
        for op, label, B, T, lens in shapes:
            progress.step(f"{op}, {label}", advance=0)
            make = getattr(maker, op, None)
            work = maker.rule(op, label, B, T, lens) if make is None else make(label, B, T)
            if timer is None:
                samples = measure(work.calls, args.seconds, args.reps)
            else:
                samples = timer.measure(work.calls[0], args.seconds, args.reps, flush=not args.warm_cache)
            records.append(_record(work, samples, gflops, copy_gb))
            progress.step()
    _show(records, gflops, copy_gb, console, args)
    if args.csv:
        write_csv(args.csv, records)
    return 0


def _record(work: Any, samples: list[float], peak_gflops: float, copy_gb: float) -> dict[str, Any]:
    median = statistics.median(samples)
    info = _capi.info()
    return {
        "op": work.op,
        "label": work.label,
        "seqlens": work.seqlens,
        "h_k": work.h_k,
        "h_v": work.h_v,
        "dtype": work.dtype,
        "impl": "libgdn",
        "version": info["version"],
        "median_us": round(median * 1e6, 3),
        "min_us": round(min(samples) * 1e6, 3),
        "max_us": round(max(samples) * 1e6, 3),
        "commit": info["build"]["git"],
        "date": datetime.date.today().isoformat(),
        "kernel": work.kernel,
        "samples": len(samples),
        "buffer_sets": len(work.calls),
        "us_per_token_head": median * 1e6 / max(work.tokens * work.heads, 1),
        "gflops": work.flop / median / 1e9,
        "gb_per_s": work.bytes / median / 1e9,
        "share_of_peak": work.flop / median / 1e9 / peak_gflops,
        "share_of_copy_rate": work.bytes / median / 1e9 / copy_gb,
    }


def _show(records: list[dict[str, Any]], peak: float, copy: float, console: Console, args: argparse.Namespace) -> None:
    info, device = _capi.info(), device_id(args)
    threads = args.threads or info["threads"]
    gpu = None if device is None else need("torch", "--device cuda").cuda.get_device_name(device)
    # A CPU's FLOP/s in GFLOP/s beside its multiply-add peak, a GPU's in TFLOP/s beside its matrix product.
    unit, scale, of_peak = ("GFLOP/s", 1.0, "of FMA peak") if gpu is None else ("TFLOP/s", 1e3, "of matmul")
    rows = []
    for r in records:
        flop = r["gflops"] > 0
        rows.append(
            (
                r["op"], r["label"], r["dtype"], r["kernel"], f"{r['median_us']:.1f}", f"{r['min_us']:.1f}",
                f"{r['max_us']:.1f}", f"{r['us_per_token_head']:.3g}", f"{r['gflops'] / scale:.1f}" if flop else "-",
                f"{100 * r['share_of_peak']:.0f} %" if flop else "-", f"{r['gb_per_s']:.1f}",
                f"{100 * r['share_of_copy_rate']:.0f} %",
            )
        )  # fmt: skip
    if args.csv != "-":
        header = (
            "operator", "label", "dtype", "kernel", "median us", "min", "max", "us/token/head", unit, of_peak, "GB/s",
            "of copy rate",
        )  # fmt: skip
        title = gpu or f"{info['cpu']}, {threads} threads, {info['isa']['active']}"
        console.table(header, rows, title, left=4)
        kind = "fp32 multiply-add peak" if gpu is None else "bf16 matrix product"
        console.line(f"measured in this run: {kind} {peak / scale:.1f} {unit}, memory copy {copy:.1f} GB/s")
        if gpu is None and not args.warm_cache:
            console.line("small shapes rotate over more buffers than the caches hold; --warm-cache keeps one set")
        if gpu is not None:
            console.line(f"replays of a captured graph, L2 {'kept' if args.warm_cache else 'flushed'} before each")
    limits = {"fma_gflops" if gpu is None else "matmul_gflops": peak, "copy_gb_per_s": copy}
    device_name = "cpu" if gpu is None else gpu
    document = {"machine": info, "device": device_name, "threads": threads, "peak": limits, "records": records}
    console.document(document)


def write_csv(target: str, records: list[dict[str, Any]]) -> None:
    """Appends records; the header is written to a new file only."""
    if target == "-":
        _write_rows(sys.stdout, records, header=True)
        return
    path = Path(target)
    try:
        new = not path.exists() or path.stat().st_size == 0
        with path.open("a", newline="") as file:
            _write_rows(file, records, header=new)
    except OSError as error:
        raise UsageError(f"bench: argument '--csv': cannot write {path}: {error.strerror}") from None


def _write_rows(file: Any, records: list[dict[str, Any]], header: bool) -> None:
    writer = csv.DictWriter(file, CSV_HEADER, extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(records)
