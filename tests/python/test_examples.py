# SPDX-License-Identifier: MIT
"""The Python examples run, and the README shows what the examples contain."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples" / "python").glob("*.py"))
SNIPPETS = re.findall(
    r"<!-- example: (\S+) -->\n```\w+\n(.*?)```\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path) -> None:
    run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr


def test_readme_has_every_language() -> None:
    assert {Path(name).suffix for name, _ in SNIPPETS} == {".py", ".cpp", ".c"}


@pytest.mark.parametrize(("name", "text"), SNIPPETS, ids=[name for name, _ in SNIPPETS])
def test_readme_snippet_is_the_example(name: str, text: str) -> None:
    """The C and C++ examples are compiled and run by ctest."""
    source = (ROOT / name).read_text(encoding="utf-8")
    regions = re.findall(r"^[^\n]*README begin[^\n]*\n(.*?)^[^\n]*README end", source, re.DOTALL | re.MULTILINE)
    assert regions, f"{name} has no README region"
    assert "\n\n".join(textwrap.dedent(region).strip() for region in regions) == text.strip()
