# SPDX-License-Identifier: MIT
"""``gdn verify A B``: two files of tensors, compared by name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .console import Console, UsageError, need


def read(path: Path) -> dict[str, Any]:
    """Tensors of a .safetensors or .npz file as NumPy arrays."""
    np = need("numpy", "comparing files")
    if not path.is_file():
        raise UsageError(f"verify: found no file {path}, expected a .safetensors or .npz file")
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as data:
                return {name: data[name] for name in data.files}
    except UsageError:
        raise
    except Exception as error:  # each reader has its own exceptions for a damaged file
        if type(error).__name__ == "UnavailableError":
            raise
        raise UsageError(f"verify: cannot read {path}: {error}") from None
    raise UsageError(f"verify: found {path.name}, expected a .safetensors or .npz file")


def _read_safetensors(path: Path) -> dict[str, Any]:
    safetensors = need("safetensors", ".safetensors files")
    try:  # registers bfloat16 with NumPy, which the reader looks up by name
        import ml_dtypes  # noqa: F401
    except ImportError:
        pass
    with safetensors.safe_open(str(path), framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def compare(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> list[dict[str, Any]]:
    """One row per name: relative L2 (against b), largest absolute difference, and what is wrong if anything."""
    import numpy as np

    rows = []
    for name in sorted(a.keys() | b.keys()):
        row: dict[str, Any] = {"name": name, "rel_l2": None, "max_abs": None, "problem": None}
        rows.append(row)
        if name not in a or name not in b:
            row["problem"] = f"only in {'B' if name not in a else 'A'}"
            continue
        x, y = np.asarray(a[name]), np.asarray(b[name])
        row["shape"] = list(x.shape)
        if x.shape != y.shape:
            row["problem"] = f"shapes {list(x.shape)} and {list(y.shape)}"
            continue
        wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
        try:
            x, y = x.astype(wide), y.astype(wide)
        except (TypeError, ValueError):
            row["problem"] = f"not numbers ({a[name].dtype}, {b[name].dtype})"
            continue
        nan = np.isnan(x), np.isnan(y)
        infinite = np.isinf(x) | np.isinf(y)
        if (nan[0] != nan[1]).any():
            row["problem"] = f"NaN in {int(nan[0].sum())} elements of A and {int(nan[1].sum())} of B, not the same ones"
            continue
        if not (x[infinite] == y[infinite]).all():
            row["problem"] = "infinities differ"
            continue
        finite = ~(nan[0] | infinite)
        difference, norm = np.abs(x[finite] - y[finite]), float(np.linalg.norm(y[finite]))
        distance = float(np.linalg.norm(difference))
        row["max_abs"] = float(difference.max(initial=0.0))
        row["rel_l2"] = distance / norm if norm else (0.0 if distance == 0 else float("inf"))
        row["nan"] = int(nan[0].sum())
        if row["rel_l2"] > tolerance:
            row["problem"] = f"relative L2 above {tolerance:g}"
    return rows


def run(args: argparse.Namespace, console: Console) -> int:
    a, b = (read(Path(name)) for name in args.files)
    rows = compare(a, b, args.tol)
    if not rows:
        raise UsageError("verify: both files hold no tensor")
    failed = [row for row in rows if row["problem"]]
    number = lambda value: "-" if value is None else f"{value:.2e}"  # noqa: E731
    console.table(
        ("tensor", "shape", "relative L2", "largest difference", ""),
        [
            (
                row["name"],
                str(row.get("shape", "-")),
                number(row["rel_l2"]),
                number(row["max_abs"]),
                row["problem"] or ("ok" if not row.get("nan") else f"ok, {row['nan']} NaN in both"),
            )
            for row in rows
        ],
        left=2,
    )
    console.line(f"{len(rows) - len(failed)} of {len(rows)} tensors within a relative L2 error of {args.tol:g}")
    console.document({"tolerance": args.tol, "tensors": rows, "ok": not failed})
    return 1 if failed else 0
