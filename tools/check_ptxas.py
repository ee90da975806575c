#!/usr/bin/env python3
"""Reads what ptxas said about every kernel (nvcc -Xptxas -v) and refuses spills and serialised wgmma.

    check_ptxas.py <build log> [...] [--expect sm_75 sm_90a ...] [--table registers.md]

Fails on: spill stores or loads, C75xx messages (wgmma serialised, setmaxnreg ignored), any warning, an expected
architecture without a kernel, a log without kernels. Prints registers per kernel: the most over its instantiations.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

COMPILING = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>sm_\w+)'")
PROPERTIES = re.compile(r"Function properties for (?P<name>\S+)")
SPILLS = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
USED = re.compile(r"Used (?P<registers>\d+) registers(?:.*?(?P<smem>\d+) bytes smem)?")
# C7508 .. C7518: setmaxnreg ignored, wgmma serialised. Some are only "info" to ptxas.
SLOW = re.compile(r"\(C75\d\d\)|Potential Performance Loss|setmaxnreg (?:is )?ignored", re.IGNORECASE)
WARNING = re.compile(r"^(?:ptxas|nvlink|nvcc) .*?warning|\bwarning\s*(?:#\d+-D)?:", re.IGNORECASE)


@dataclass
class Kernel:
    name: str
    arch: str
    registers: int | None = None
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    smem: int = 0


def parse(text: str) -> tuple[list[Kernel], list[str]]:
    """Kernels of the log and lines that are problems by themselves."""
    kernels: list[Kernel] = []
    problems: list[str] = []
    arch, owner = "", ""
    spills: dict[tuple[str, str], tuple[int, int, int]] = {}
    for line in text.splitlines():
        if SLOW.search(line) or WARNING.search(line):
            problems.append(line.strip())
        if found := COMPILING.search(line):
            kernels.append(Kernel(found["name"], found["arch"]))
            arch = found["arch"]
        elif found := PROPERTIES.search(line):
            owner = found["name"]
        elif (found := SPILLS.search(line)) and owner:
            # Device functions that were not inlined have properties of their own.
            spills[owner, arch] = (int(found["stack"]), int(found["stores"]), int(found["loads"]))
        elif (found := USED.search(line)) and kernels:
            kernels[-1].registers = int(found["registers"])
            kernels[-1].smem = int(found["smem"] or 0)
    by_name = {(kernel.name, kernel.arch): kernel for kernel in kernels}
    for (name, where), (stack, stores, loads) in spills.items():
        if kernel := by_name.get((name, where)):
            kernel.stack, kernel.spill_stores, kernel.spill_loads = stack, stores, loads
        elif stores or loads:
            problems.append(f"{name} ({where}): device function spills: {stores} bytes stored, {loads} loaded")
    return kernels, problems


def demangled(names: list[str]) -> dict[str, str]:
    """Readable kernel names without arguments; the mangled ones where there is no c++filt."""
    if not names or not shutil.which("c++filt"):
        return {name: name for name in names}
    out = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    noise = re.compile(r"^void |\bgdn::cuda::|\(anonymous namespace\)::")
    return {name: noise.sub("", line) for name, line in zip(names, out.splitlines(), strict=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--expect", nargs="*", default=[], metavar="sm_XY", help="architectures that must have kernels")
    parser.add_argument("--table", type=Path, help="also write the registers as a markdown table")
    args = parser.parse_args()

    kernels, problems = parse("\n".join(path.read_text(encoding="utf-8", errors="replace") for path in args.logs))
    readable = demangled(sorted({kernel.name for kernel in kernels}))
    for kernel in kernels:
        if kernel.spill_stores or kernel.spill_loads:
            problems.append(
                f"{readable[kernel.name]} ({kernel.arch}): found {kernel.spill_stores} bytes of spill stores and "
                f"{kernel.spill_loads} of loads, expected none"
            )
        if kernel.registers is None:
            problems.append(f"{readable[kernel.name]} ({kernel.arch}): ptxas did not say how many registers it uses")
    archs = sorted({kernel.arch for kernel in kernels}, key=lambda a: (int(re.sub(r"\D", "", a)), a))
    problems += [
        f"no kernel for {arch}: found {', '.join(archs) or 'none'}" for arch in args.expect if arch not in archs
    ]
    if not kernels:
        problems.append("no kernel in the log: was it built with -Xptxas -v, and from scratch?")

    registers: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for kernel in kernels:
        short = re.sub(r"<.*", "", readable[kernel.name])
        registers[short][kernel.arch].append(kernel.registers or 0)
    lines = ["| kernel | variants | " + " | ".join(archs) + " |", "|---" * (2 + len(archs)) + "|"]
    for short, per_arch in sorted(registers.items()):
        variants = max(len(found) for found in per_arch.values())
        cells = [str(max(per_arch[arch])) if arch in per_arch else "-" for arch in archs]
        lines.append(f"| {short} | {variants} | " + " | ".join(cells) + " |")
    print("Registers (the most of a kernel's variants):")
    print("\n".join(lines))
    if args.table:
        args.table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(dict.fromkeys(problems)))
    print(f"{len(kernels)} kernel variants on {len(archs)} architectures, {len(set(problems))} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
