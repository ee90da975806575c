#!/usr/bin/env python3
"""Recorded test runs of kernels that CI's machine cannot execute (AMX, AVX-512, CUDA), and their freshness.

    report_hash.py                  prints FRESH or STALE for every kernel family; always exits 0
    report_hash.py --hash amx       prints the hash to put into tests/reports/amx.json
    report_hash.py --record amx --machine M --cpu C --passed N --failed N [--worst NAME=ERROR ...]
    report_hash.py --record cuda --machine M --gpu G --driver D --junit report.xml ... [--errors errors.json ...]

The hash is a SHA-256 over the kernel's sources and every project header that they include, directly or not, so a report
is stale as soon as code that it exercised has changed. Paths and contents go in, commit and date do not. When binaries
were built before the sources changed again, --tested-hash gives the hash of then.
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

import summarize_tests

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = {"amx": ["src/cpu/amx"], "avx512": ["src/cpu/isa"], "cuda": ["src/cuda"]}
SUFFIXES = {".c", ".cpp", ".h", ".hpp", ".cu", ".cuh"}
FIELDS = ["hash", "machine", "date", "commit", "passed", "failed", "worst"]
PROCESSOR = {"cuda": ["gpu", "driver"]}  # what else a report names; the others: "cpu"
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
        missing = [field for field in FIELDS + PROCESSOR.get(family, ["cpu"]) if field not in record]
    except (json.JSONDecodeError, TypeError) as error:
        print(f"{family}: STALE: {report.relative_to(ROOT)}: {error}")
        return
    if missing:
        print(f"{family}: STALE: {report.relative_to(ROOT)} lacks {', '.join(missing)}")
        return
    what = f"{record['passed']} passed, {record['failed']} failed on {record.get('gpu') or record.get('cpu')}"
    what += f", {record['date']}, commit {record['commit']}"
    print(f"{family}: {'FRESH' if record['hash'] == current else 'STALE: sources changed since'}: {what}")


def leaves(value: object, name: str = "") -> dict[str, float]:
    """Numbers of nested objects, names joined by '.'."""
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in leaves(part, f"{name}.{key}" if name else key).items()}
    return {name: float(value)} if isinstance(value, int | float) and not isinstance(value, bool) else {}


def count(args: argparse.Namespace) -> dict[str, int]:
    """Tests by result: as given, or from JUnit files. A file without a test is a failure."""
    if not args.junit:
        return {"passed": args.passed, "failed": args.failed}
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for path in args.junit:
        passed, failed, skipped, names = summarize_tests.read(path)
        counts["passed"] += passed
        counts["failed"] += failed
        counts["skipped"] += skipped
        print("\n".join(f"FAILED {name}" for name in names), end="\n" if names else "")
    return counts


def record(args: argparse.Namespace) -> None:
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    commit = args.commit or subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    worst = {name: float(value) for name, _, value in (entry.partition("=") for entry in args.worst)}
    for path in args.errors:
        worst |= leaves(json.loads(path.read_text(encoding="utf-8")).get("worst", {}))
    report = {
        "hash": args.tested_hash or family_hash(args.record),
        "machine": args.machine,
        **{name: getattr(args, name) for name in PROCESSOR.get(args.record, ["cpu"])},
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        **count(args),
        "worst": worst,
    }
    path = args.out or ROOT / "tests" / "reports" / f"{args.record}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}: {report['passed']} passed, {report['failed']} failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hash", choices=FAMILIES, help="print the hash of one family")
    parser.add_argument("--record", choices=FAMILIES, help="write the report of one family")
    parser.add_argument("--machine", help="name of the machine, as in bench/results")
    parser.add_argument("--cpu", help="CPU model")
    parser.add_argument("--gpu", help="GPU model")
    parser.add_argument("--driver", help="version of the GPU's driver")
    parser.add_argument("--commit", help="commit that was tested (default: HEAD)")
    parser.add_argument("--passed", type=int)
    parser.add_argument("--failed", type=int)
    parser.add_argument("--worst", action="append", default=[], metavar="NAME=ERROR", help="worst relative L2 error")
    parser.add_argument("--junit", type=Path, nargs="*", default=[], help="in place of --passed and --failed")
    parser.add_argument("--errors", type=Path, nargs="*", default=[], help='JSON files with worst errors under "worst"')
    parser.add_argument("--tested-hash", help="hash of the sources that were tested (default: as they are now)")
    parser.add_argument("--out", type=Path, help="another file than tests/reports/<family>.json")
    args = parser.parse_args()
    if args.hash:
        print(family_hash(args.hash))
    elif args.record:
        counts = [] if args.junit else ["passed", "failed"]
        needed = ["machine", *PROCESSOR.get(args.record, ["cpu"]), *counts]
        if any(getattr(args, name) is None for name in needed):
            parser.error("--record needs " + ", ".join(f"--{name}" for name in needed))
        record(args)
    else:
        for family in FAMILIES:
            show(family)
    return 0


if __name__ == "__main__":
    sys.exit(main())
