# SPDX-License-Identifier: MIT
"""examples/torch_extension builds with torch.utils.cpp_extension against the installed package, and is right."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch_extension"


def test_builds_and_runs(tmp_path: Path) -> None:
    for name in ("my_gdn.cpp", "setup.py", "check.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    env = {**os.environ, "CXXFLAGS": "-O1"}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    result = subprocess.run(build, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    result = subprocess.run([sys.executable, "check.py"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.strip() == "my_gdn.step equals gdn.torch.recurrent"
