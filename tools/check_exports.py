#!/usr/bin/env python3
"""The library exports exactly the functions that gdn.h declares, and needs nothing beyond the C and C++ run time.

check_exports.py <libgdn.so> <gdn.h>
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

RUNTIME = re.compile(r"^(libstdc\+\+|libgcc_s|libm|libc|libpthread|libdl|librt|ld-linux[\w-]*)\.so")


def main() -> int:
    library, header = Path(sys.argv[1]), Path(sys.argv[2])
    out = subprocess.run(["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True)
    exported = {line.split()[-1] for line in out.stdout.splitlines()}
    declared = set(re.findall(r"GDN_API [\w\s*]*?\b(gdn_\w+)\(", header.read_text()))
    problems = [f"exported, but not declared in {header.name}: {name}" for name in sorted(exported - declared)]
    problems += [f"declared in {header.name}, but not exported: {name}" for name in sorted(declared - exported)]

    out = subprocess.run(["readelf", "-d", str(library)], check=True, capture_output=True, text=True)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", out.stdout)
    problems += [f"needs {name}: only the C and C++ run time is allowed" for name in needed if not RUNTIME.match(name)]
    print("\n".join(problems) or f"{len(exported)} functions exported, needs {', '.join(needed)}")
    return 1 if problems or not exported else 0


if __name__ == "__main__":
    sys.exit(main())
