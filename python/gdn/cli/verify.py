# SPDX-License-Identifier: MIT
"""``gdn verify``: the numeric regression check.

Without arguments: the named cases through the fast path, against the fp64 recurrence. With two files: their tensors,
by name. With --model: Transformers' path against libgdn on a checkpoint. Exit code 1 on any breach.
"""

from __future__ import annotations

import argparse
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from .console import Console, UsageError, need
from .device import add_device_flag, device_id, require


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "verify",
        parents=[common],
        help="numeric regression check: cases, files, or a model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="two .safetensors or .npz files to compare (found, expected)"
    )
    parser.add_argument(
        "--tol", type=float, default=1e-3, help="relative L2 error that files or a model may have (default 1e-3)"
    )
    add_device_flag(parser)
    group = parser.add_argument_group("cases")
    group.add_argument("--cases", type=Path, metavar="FILE", help="a case list of your own")
    group.add_argument(
        "-k", "--filter", default="*", metavar="PATTERN", help="case ids or classes, e.g. 'gate_*' or pools"
    )
    group.add_argument("--op", choices=("chunk", "recurrent"), help="one operator only")
    group.add_argument(
        "--impl", metavar="NAME", help="one implementation; cases that it refuses are counted, not failed"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the inputs (default 0)")
    group.add_argument(
        "--independent", action="store_true", help="check the oracle itself against a NumPy recurrence too"
    )
    group.add_argument("--all", action="store_true", help="the slow cases too")
    group.add_argument("--list", action="store_true", help="list the cases and why each exists")
    group.add_argument("-v", "--verbose", action="store_true", help="a row for every case")
    group = parser.add_argument_group("model")
    group.add_argument("--model", type=Path, metavar="FOLDER", help="a checkpoint that Transformers can load")
    group.add_argument("--text", type=Path, metavar="FILE", help="prompt (default: a text inside the package)")
    group.add_argument("--tokens", type=int, default=1024, metavar="N", help="prompt tokens (default 1024)")
    group.add_argument("--new-tokens", type=int, default=32, metavar="N", help="greedy tokens to compare (default 32)")
    group.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16", "auto"), default="fp32", help="weights (default fp32)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    if not args.tol >= 0:
        raise UsageError(f"verify: argument '--tol': found {args.tol}, expected a number of 0 or more")
    if args.model is not None and args.files:
        raise UsageError("verify: found --model and files, expected one of them")
    if args.model is not None:
        from . import model_check

        return model_check.run(args, console)
    if args.files:
        if len(args.files) != 2:
            raise UsageError(f"verify: found {len(args.files)} file, expected two (or none)")
        from . import compare

        return compare.run(args, console)
    need("numpy", "gdn verify")
    gpu = device_id(args)
    if gpu is not None:
        torch = require(gpu)
        console.line(f"device: {torch.cuda.get_device_name(gpu)}")
    return _cases(args, console)


def _cases(args: argparse.Namespace, console: Console) -> int:
    from .calls import OP_NAMES
    from .cases import load

    cases, contracts = load(args.cases)
    cases = [c for c in cases if fnmatch(c.id, args.filter) or c["class"] == args.filter]
    if not cases:
        raise UsageError(
            f"verify: argument '--filter': found no case that matches {args.filter!r} (see gdn verify --list)"
        )
    if args.list:
        console.table(("case", "class", "why"), [(c.id, c["class"], c.why) for c in cases], left=3)
        console.document([dict(c) for c in cases])
        return 0
    left_out = [c for c in cases if c.slow and not args.all]
    cases = [c for c in cases if args.all or not c.slow]
    ops = [OP_NAMES[args.op]] if args.op else ["chunk_forward", "recurrent"]
    work = [(case, [op for op in ops if op in case.ops]) for case in cases]
    if not any(ops for _, ops in work):
        raise UsageError("verify: nothing left to run (slow cases need --all)")
    results, refused = _run_all(work, contracts, args, console)
    return _report(results, refused, len(left_out), args, console)


def _run_all(
    work: list[Any], contracts: Any, args: argparse.Namespace, console: Console
) -> tuple[list[Any], list[Any]]:
    from .cases import draw
    from .check import run_case

    results, refused = [], []
    with console.progress(sum(len(ops) for _, ops in work), "verify") as progress:
        for case, ops in work:
            x = draw(case, args.seed)
            for op in ops:
                progress.step(f"{case.id} ({op})", advance=0)
                result = run_case(case, x, op, contracts, args.impl, args.independent, device_id(args))
                # With --impl a refusal is that implementation's right; without it every case must run.
                (refused if args.impl and result.impl == "-" else results).append(result)
                progress.step()
    return results, refused


def _report(results: list[Any], refused: list[Any], left_out: int, args: argparse.Namespace, console: Console) -> int:
    failed = [r for r in results if r.problems]
    shown = results if args.verbose else sorted(results, key=lambda r: -r.worst[1])[:12]
    rows = []
    for result in shown:
        name, ratio = result.worst
        error, bound = result.errors.get(name), result.bounds.get(name)
        numbers = ("-", "-") if error is None else (f"{error:.2e}", f"{bound:.1e}")
        verdict = "FAILED" if result.problems else "ok"
        rows.append((result.case, result.op, result.impl, verdict, name, *numbers, f"{100 * ratio:.0f} %"))
    title = "" if args.verbose else "nearest to their bounds"
    console.table(
        ("case", "operator", "implementation", "", "output", "error", "bound", "of bound"), rows, title, left=5
    )
    for result in failed:
        for problem in result.problems:
            console.line(f"FAILED {result.case} ({result.op}, {result.impl}) {problem}")
    notes = [f"{len(results) - len(failed)} of {len(results)} runs within their contract"]
    if refused:
        notes.append(f"{len(refused)} refused by {args.impl}")
    if left_out:
        notes.append(f"{left_out} slow cases left out (--all runs them)")
    if args.independent:
        notes.append("reference_fp64 checked against the NumPy recurrence where a case is plain")
    console.line("; ".join(notes))
    console.document(
        {
            "ok": not failed and bool(results),
            "results": [r.document() for r in results],
            "refused": [r.case for r in refused],
        }
    )
    if not results:
        console.error(f"{args.impl} refuses every one of these cases: {refused[0].problems[0]}")
        return 3
    return 1 if failed else 0
