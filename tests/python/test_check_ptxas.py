# SPDX-License-Identifier: MIT
"""tools/check_ptxas.py on logs as nvcc 13.0 writes them: what CI must refuse is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "check_ptxas.py"
GOOD = """[1/2] Building CUDA object CMakeFiles/x.dir/a.cu.o
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z2okILi2EEvPf' for 'sm_75'
ptxas info    : Function properties for _Z2okILi2EEvPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 512 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 2.768 ms
ptxas info    : Compiling entry function '_Z2okILi1EEvPf' for 'sm_90a'
ptxas info    : Function properties for _Z2okILi1EEvPf
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers, 512 bytes smem
"""
SPILL = GOOD.replace("16 bytes stack frame, 0 bytes spill stores", "16 bytes stack frame, 8 bytes spill stores")
DEVICE_FUNCTION = (
    GOOD
    + """ptxas info    : Function properties for _Z1fPfi
    0 bytes stack frame, 0 bytes spill stores, 36 bytes spill loads
"""
)
WGMMA = (
    GOOD
    + "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    + "insufficient register resources for the wgmma pipeline in function '_Z2okILi1EEvPf'\n"
)
WARNING = GOOD + 'a.cu(3): warning #177-D: variable "x" was declared but never referenced\n'


def check(tmp_path: Path, text: str, *extra: str) -> tuple[int, str]:
    log = tmp_path / "nvcc.log"
    log.write_text(text)
    done = subprocess.run([sys.executable, str(TOOL), str(log), *extra], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_good_log(tmp_path: Path) -> None:
    code, out = check(tmp_path, GOOD, "--expect", "sm_75", "sm_90a", "--table", str(tmp_path / "t.md"))
    assert code == 0, out
    assert "2 kernel variants on 2 architectures, 0 problems" in out
    assert "| 10 | 12 |" in (tmp_path / "t.md").read_text()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (SPILL, "found 8 bytes of spill stores and 0 of loads, expected none"),
        (DEVICE_FUNCTION, "device function spills: 0 bytes stored, 36 loaded"),
        (WGMMA, "C7512"),
        (WARNING, "never referenced"),
        ("ninja: no work to do.\n", "no kernel in the log"),
    ],
)
def test_bad_logs(tmp_path: Path, text: str, what: str) -> None:
    code, out = check(tmp_path, text)
    assert code == 1 and what in out


def test_missing_architecture(tmp_path: Path) -> None:
    code, out = check(tmp_path, GOOD, "--expect", "sm_80")
    assert code == 1 and "no kernel for sm_80: found sm_75, sm_90a" in out
