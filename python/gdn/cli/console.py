# SPDX-License-Identifier: MIT
"""Tables, progress and JSON of the command: rich where it is installed, plain text otherwise."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class UsageError(Exception):
    """Wrong usage or input: exit code 2."""


class CheckError(Exception):
    """A check that could not mean anything: exit code 1."""


class UnavailableError(Exception):
    """Something that this machine or installation lacks: exit code 3."""


def need(module: str, what_for: str) -> Any:
    """Imports a module, or says which package to install and what for."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UnavailableError(f"{what_for} needs the package {package} ({error}); install it and try again") from None


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


class Console:
    """Where a subcommand writes: results to standard output, progress and errors to standard error."""

    def __init__(self, json_output: bool = False, plain: bool = False) -> None:
        self.json_output = json_output
        self._rich = not plain and _has_rich() and sys.stdout.isatty()
        self._rich_progress = not plain and _has_rich() and sys.stderr.isatty()

    def error(self, message: str) -> None:
        print(f"gdn: {message}", file=sys.stderr)

    def line(self, text: str = "") -> None:
        """A line for people; nothing in JSON mode."""
        if not self.json_output:
            print(text)

    def document(self, value: Any) -> None:
        """The JSON document; nothing outside JSON mode."""
        if self.json_output:
            print(json.dumps(value, indent=1, default=str))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "", left: int = 1) -> None:
        """A table whose first `left` columns are text and the others right-aligned; nothing in JSON mode."""
        if self.json_output:
            return
        cells = [[str(cell) for cell in row] for row in rows]
        if self._rich:
            from rich.console import Console as RichConsole
            from rich.table import Table

            table = Table(title=title or None, title_justify="left", show_header=any(header))
            for i, name in enumerate(header):
                table.add_column(name, justify="left" if i < left else "right", overflow="fold")
            for row in cells:
                table.add_row(*row)
            RichConsole(markup=False).print(table)
            return
        widths = [max(len(str(name)), *(len(row[i]) for row in cells), 0) for i, name in enumerate(header)]
        if title:
            print(title)
        head = [[str(name) for name in header], ["-" * width for width in widths]] if any(header) else []
        for row in (*head, *cells):
            columns = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            print("  ".join(columns).rstrip())

    @contextmanager
    def progress(self, total: int, title: str) -> Iterator[Progress]:
        """Progress on standard error: a bar on a terminal, a line every few seconds elsewhere."""
        bar = _RichProgress(total, title) if self._rich_progress else Progress(total, title)
        try:
            yield bar
        finally:
            bar.close()


class Progress:
    """Plain progress."""

    _SECONDS = 5.0

    def __init__(self, total: int, title: str) -> None:
        self.total, self.title, self.done = total, title, 0
        self._last = time.monotonic()

    def step(self, what: str = "", advance: int = 1) -> None:
        """`advance` more units are done; `what` comes next."""
        self.done += advance
        if time.monotonic() - self._last >= self._SECONDS:
            self._last = time.monotonic()
            print(f"{self.title}: {self.done}/{self.total} {what}".rstrip(), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the display."""


class _RichProgress(Progress):
    def __init__(self, total: int, title: str) -> None:
        super().__init__(total, title)
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, TextColumn("{task.fields[what]}"), console=RichConsole(stderr=True), transient=True)
        self._task = self._bar.add_task(title, total=total, what="")
        self._bar.start()

    def step(self, what: str = "", advance: int = 1) -> None:
        self.done += advance
        self._bar.update(self._task, advance=advance, what=what)

    def close(self) -> None:
        self._bar.stop()
