#!/usr/bin/env python3
"""clang-tidy over the library's own sources, each once, in parallel; warnings are errors (.clang-tidy).

    run_tidy.py <build folder with compile_commands.json> [-j N] [path prefix ...]

Kernel sources are compiled once per instruction set; the AVX2 entry of the database stands for all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = ["src/core", "src/cpu", "src/c_abi"]


def commands(build: Path, prefixes: list[str]) -> list[dict[str, str]]:
    chosen: dict[str, dict[str, str]] = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = Path(entry["directory"], entry["file"]).resolve()
        if not path.is_relative_to(ROOT):
            continue
        name = path.relative_to(ROOT).as_posix()
        if not any(name.startswith(prefix) for prefix in prefixes) or "tests/cpp" in entry.get(
            "output", entry["command"]
        ):
            continue
        if name not in chosen or "gdn_isa_avx2" in entry["command"]:
            chosen[name] = entry
    return [chosen[name] for name in sorted(chosen)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("-j", type=int, default=os.cpu_count())
    parser.add_argument("prefixes", nargs="*", default=DEFAULT)
    args = parser.parse_args()
    entries = commands(args.build, args.prefixes)
    if not entries:
        print(f"{args.build}: no source of {', '.join(args.prefixes)} in compile_commands.json")
        return 1

    def tidy(entry: dict[str, str]) -> tuple[str, int, str, float]:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:  # a database of this one command
            Path(folder, "compile_commands.json").write_text(json.dumps([entry]))
            run = subprocess.run(
                ["clang-tidy", "--quiet", "-p", folder, entry["file"]], cwd=ROOT, capture_output=True, text=True
            )
        errors = run.stderr if run.returncode and not run.stdout.strip() else ""
        return entry["file"], run.returncode, run.stdout + errors, time.monotonic() - start

    failed = 0
    with ThreadPoolExecutor(args.j) as pool:
        for file, code, output, seconds in pool.map(tidy, entries):
            print(f"{'FAIL' if code else 'ok  '} {seconds:6.1f} s  {Path(file).relative_to(ROOT)}", flush=True)
            if code:
                failed += 1
                print(output, flush=True)
    print(f"{len(entries)} files, {failed} with findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
