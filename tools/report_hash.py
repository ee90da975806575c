#!/usr/bin/env python3
"""Recorded test runs of kernels that CI's machine cannot execute (AMX, AVX-512 and later CUDA), and their freshness.

    report_hash.py                  prints FRESH or STALE for every kernel family; always exits 0
    report_hash.py --hash amx       prints the hash to put into tests/reports/amx.json
    report_hash.py --record amx --machine M --cpu C --passed N --failed N [--worst NAME=ERROR ...]

The hash is a SHA-256 over the kernel's sources and every project header that they include, directly or not, so a report
is stale as soon as code that it exercised has changed. Paths and contents go in, commit and date do not.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = {"amx": ["src/cpu/amx"], "avx512": ["src/cpu/isa"], "cuda": ["src/cuda"]}
SUFFIXES = {".c", ".cpp", ".h", ".hpp", ".cu", ".cuh"}
FIELDS = ["hash", "machine", "cpu", "date", "commit", "passed", "failed", "worst"]
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.MULTILINE)


def sources(family: str) -> list[Path]:
    """Sources of the family and, transitively, the headers of this project that they include."""
    todo = [
        path
        for folder in FAMILIES[family]
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and path.suffix in SUFFIXES
    ]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            for base in (path.parent, ROOT / "src", ROOT / "include"):
                header = (base / name).resolve()
                if header.is_file() and header.is_relative_to(ROOT):
                    todo.append(header)
                    break
    return sorted(seen)


def family_hash(family: str) -> str | None:
    files = sources(family)
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def show(family: str) -> None:
    current = family_hash(family)
    if current is None:
        print(f"{family}: no sources yet ({', '.join(FAMILIES[family])})")
        return
    report = ROOT / "tests" / "reports" / f"{family}.json"
    if not report.is_file():
        print(f"{family}: STALE: no report ({report.relative_to(ROOT)})")
        return
    try:
        record = json.loads(report.read_text(encoding="utf-8"))
        missing = [field for field in FIELDS if field not in record]
    except (json.JSONDecodeError, TypeError) as error:
        print(f"{family}: STALE: {report.relative_to(ROOT)}: {error}")
        return
    if missing:
        print(f"{family}: STALE: {report.relative_to(ROOT)} lacks {', '.join(missing)}")
        return
    what = f"{record['passed']} passed, {record['failed']} failed on {record['cpu']}, {record['date']}"
    what += f", commit {record['commit']}"
    print(f"{family}: {'FRESH' if record['hash'] == current else 'STALE: sources changed since'}: {what}")


def record(args: argparse.Namespace) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    worst = dict(entry.split("=", 1) for entry in args.worst)
    report = {
        "hash": family_hash(args.record),
        "machine": args.machine,
        "cpu": args.cpu,
        "date": datetime.date.today().isoformat(),
        "commit": args.commit or commit.stdout.strip(),
        "passed": args.passed,
        "failed": args.failed,
        "worst": {name: float(value) for name, value in worst.items()},
    }
    path = ROOT / "tests" / "reports" / f"{args.record}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hash", choices=FAMILIES, help="print the hash of one family")
    parser.add_argument("--record", choices=FAMILIES, help="write the report of one family")
    parser.add_argument("--machine", help="name of the machine, as in bench/results")
    parser.add_argument("--cpu", help="CPU (or GPU) model")
    parser.add_argument("--commit", help="commit that was tested (default: HEAD)")
    parser.add_argument("--passed", type=int)
    parser.add_argument("--failed", type=int)
    parser.add_argument("--worst", action="append", default=[], metavar="NAME=ERROR", help="worst relative L2 error")
    args = parser.parse_args()
    if args.hash:
        print(family_hash(args.hash))
    elif args.record:
        needed = ("machine", "cpu", "passed", "failed")
        if any(getattr(args, name) is None for name in needed):
            parser.error("--record needs " + ", ".join(f"--{name}" for name in needed))
        record(args)
    else:
        for family in FAMILIES:
            show(family)
    return 0


if __name__ == "__main__":
    sys.exit(main())
