# SPDX-License-Identifier: MIT
"""Draws bench/results/<machine>/*.csv: prefill and decode against the peers, and cost per token over T.

python bench/plot.py bench/results/<machine> [--format svg]
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"libgdn": "#1f6feb", "ggml": "#d29922", "transformers": "#8b949e"}


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a record; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


def us_per_token_head(row: dict[str, str], column: str) -> float:
    """Time per token and value head in microseconds."""
    tokens = sum(int(n) for n in row["seqlens"].split("+"))
    return float(row[column]) / tokens / int(row["h_v"])


def color(impl: str) -> str:
    """Color by the implementation's first word."""
    return next((c for name, c in COLORS.items() if impl.startswith(name)), "#57606a")


def bars(axis: plt.Axes, rows: list[dict[str, str]], title: str) -> None:
    """Median with min and max, one bar per implementation and label."""
    names = [f"{r['label']}\n{r['impl']} {r['dtype'].split('/')[0]}" for r in rows]
    value = [us_per_token_head(r, "median_us") for r in rows]
    low = [v - us_per_token_head(r, "min_us") for v, r in zip(value, rows, strict=True)]
    high = [us_per_token_head(r, "max_us") - v for v, r in zip(value, rows, strict=True)]
    axis.barh(names, value, xerr=[low, high], color=[color(r["impl"]) for r in rows], height=0.7, ecolor="#24292f")
    for i, v in enumerate(value):
        axis.text(v, i, f" {v:.2f}", va="bottom", fontsize=7)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("µs per token and value head (log)")
    axis.set_title(title, fontsize=10)
    axis.tick_params(axis="y", labelsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", default="svg", choices=["svg", "png"])
    args = parser.parse_args()
    chunk, decode = read(args.folder / "chunk_forward.csv"), read(args.folder / "recurrent.csv")
    prefill = [r for r in chunk if r["label"].startswith("prefill") and "layouts" not in r["impl"]]
    flat = [r for r in chunk if r["label"].startswith("flat")]
    decode = [r for r in decode if "copied" not in r["impl"]]
    when = (chunk or decode)[0]["date"] if chunk or decode else ""
    for name, rows, title in (("prefill", prefill, "Prefill"), ("decode", decode, "Decode, one step")):
        if rows:
            figure, axis = plt.subplots(figsize=(8, 1.2 + 0.42 * len(rows)), layout="constrained")
            bars(axis, rows, f"{title}: {args.folder.name}, {when}")
            figure.savefig(args.folder / f"{name}.{args.format}")
    if flat:
        figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
        for dtype in dict.fromkeys(r["dtype"] for r in flat):
            mine = [r for r in flat if r["dtype"] == dtype]
            axis.plot(
                [int(r["seqlens"]) for r in mine], [us_per_token_head(r, "median_us") for r in mine], "o-", label=dtype
            )
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("T (tokens)")
        axis.set_ylabel("µs per token and value head")
        axis.set_title(f"Cost per token: {args.folder.name}, {when}", fontsize=10)
        axis.legend()
        figure.savefig(args.folder / f"flat.{args.format}")


if __name__ == "__main__":
    main()
