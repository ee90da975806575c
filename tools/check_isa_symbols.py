#!/usr/bin/env python3
"""ODR check over the objects that are compiled for one instruction set only.

    check_isa_symbols.py <build folder>

An inline function or template instantiation that such an object emits under a common name (std::vector<float>::..., a
helper in gdn::) may be the copy that the linker keeps for the whole library: AVX-512 code then runs on any CPU.
So every symbol that these objects define and others can see must carry the instruction set in its name: a namespace
gdn::cpu::n_<isa>, Highway's hwy::N_<TARGET>, or the AMX kernel's gdn::cpu::amx; and what is weak among them must not be
defined by an object of another library too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# Object library -> what a mangled name must contain (length-prefixed namespaces).
ALLOWED = {
    "gdn_isa_baseline": r"10n_baseline|7N_SSSE3|6N_SSE4|8N_SCALAR",
    "gdn_isa_avx2": r"6n_avx2|6N_AVX2",
    "gdn_isa_avx512": r"8n_avx512|6N_AVX3",
    "gdn_isa_neon": r"6n_neon|6N_NEON",
    "gdn_amx": r"5n_amx|3amx|6N_AVX3",
}
# Data of the exception ABI, one identical word in every object.
HARMLESS = re.compile(r"^DW\.ref\.__gxx_personality_v0$")


def defined_symbols(obj: Path) -> list[tuple[str, str]]:
    """(type, mangled name) of the symbols that other objects see: global and weak ones."""
    out = subprocess.run(
        ["nm", "--defined-only", "--extern-only", str(obj)], check=True, capture_output=True, text=True
    )
    rows = [line.split() for line in out.stdout.splitlines()]
    return [(row[-2], row[-1]) for row in rows if len(row) >= 2]


def demangle(names: list[str]) -> list[str]:
    out = subprocess.run(["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True)
    return out.stdout.splitlines()


def main() -> int:
    build = Path(sys.argv[1])
    checked = 0
    bad: list[tuple[Path, str, str]] = []
    definers: dict[str, set[str]] = {}  # symbol -> object libraries that define it
    for obj in build.glob("**/gdn*.dir/**/*.o"):
        library = next(part for part in obj.relative_to(build).parts if part.endswith(".dir"))
        if library.startswith(("gdn_isa_", "gdn_amx.", "gdn.")):
            for _, name in defined_symbols(obj):
                definers.setdefault(name, set()).add(library)
    for library, pattern in ALLOWED.items():
        allowed = re.compile(pattern)
        objects = sorted(build.glob(f"**/{library}.dir/**/*.o"))
        for obj in objects:
            for kind, name in defined_symbols(obj):
                checked += 1
                shared = len(definers[name]) > 1 and kind in "WVu"
                if (not allowed.search(name) or shared) and not HARMLESS.match(name):
                    bad.append((obj.relative_to(build), kind, name))
        print(f"{library}: {len(objects)} objects")
    for (obj, kind, name), readable in zip(bad, demangle([name for _, _, name in bad]), strict=True):
        print(f"{obj}: symbol of type {kind} that other code may get: {readable or name}")
    if not checked:
        print(f"{build}: no symbol checked: no object of {', '.join(ALLOWED)} found")
        return 1
    print(f"{checked} symbols checked, {len(bad)} not allowed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
