#!/usr/bin/env python3
"""Adds up JUnit reports; the last line printed is ``N passed, N failed`` (and skipped, if any).

    summarize_tests.py [--exit NAME=CODE ...] report.xml ...

A report that is missing, unreadable or empty counts as one failure, and so does a runner that exited non-zero although
its report shows no failure (a crash after the last test). Exits 1 when anything failed or nothing passed.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def read(path: Path) -> tuple[int, int, int, list[str]]:
    """Counts passed, failed, skipped, and the names of what failed."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        return 0, 1, 0, [f"{path}: no readable report ({error})"]
    passed = failed = skipped = 0
    names = []
    for case in root.iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed += 1
            names.append(f"{case.get('classname', '')}.{case.get('name', '?')}")
        elif "skipped" in kinds or case.get("status") in ("disabled", "notrun"):
            skipped += 1
        else:
            passed += 1
    if passed + failed == 0:
        return 0, 1, skipped, [f"{path}: no test ran"]
    return passed, failed, skipped, names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exit", action="append", default=[], metavar="NAME=CODE", help="exit code of a runner")
    parser.add_argument("reports", nargs="+", type=Path)
    args = parser.parse_args()

    passed = failed = skipped = 0
    names: list[str] = []
    for report in args.reports:
        counts = read(report)
        print(f"{report.stem}: {counts[0]} passed, {counts[1]} failed, {counts[2]} skipped")
        passed, failed, skipped = passed + counts[0], failed + counts[1], skipped + counts[2]
        names += counts[3]
    bad_exits = [entry for entry in args.exit if entry.rpartition("=")[2] != "0"]
    if bad_exits and not failed:
        failed += len(bad_exits)
        names += [f"exit code {entry}" for entry in bad_exits]
    for name in names:
        print(f"FAILED {name}")
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
