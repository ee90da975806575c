#!/usr/bin/env python3
"""Fills the README's benchmark table (between bench:begin and bench:end) from bench/results/<machine>/*.csv.

    fill_bench.py [--check] [--readme README.md] [--results bench/results]

A row per shape that libgdn and at least one peer were measured on. Times are medians in µs per token and value
head (decode: per sequence and value head); a peer's cell says how many times libgdn's time it took. A peer that has no
run at libgdn's dtype is compared at its own, which the cell names. A GPU's record (facts.csv has a row `gpu`) is summed
up per head configuration instead. --check only tells whether the table is current.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
HEADER = "op,label,seqlens,h_k,h_v,dtype,impl,version,median_us,min_us,max_us,commit,date".split(",")
TITLES = {"transformers": "Transformers", "flash_qla": "FlashQLA", "flashinfer": "FlashInfer", "fla": "FLA"}

Row = dict[str, str]


def read_records(folder: Path) -> list[Row]:
    """Records of one machine; files with another header (facts) are not records."""
    rows: list[Row] = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames == HEADER:
                rows += list(reader)
    return rows


def read_facts(folder: Path) -> dict[str, str]:
    path = folder / "facts.csv"
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {row["fact"]: row["value"] for row in csv.DictReader(file)}


def per_token_head(row: Row) -> float:
    """Median microseconds per token and value head."""
    tokens = sum(int(n) for n in row["seqlens"].split("+"))
    return float(row["median_us"]) / tokens / int(row["h_v"])


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def peer_cell(ours: Row, peers: list[Row]) -> str:
    if not peers:
        return "-"
    same = [row for row in peers if row["dtype"] == ours["dtype"]]
    row = min(same or peers, key=per_token_head)
    ratio = per_token_head(row) / per_token_head(ours)
    note = "" if same else f", {row['dtype']}"
    return f"{number(per_token_head(row))} ({ratio:.1f}x{note})"


def gpu_table(folder: Path) -> list[str]:
    """Markdown lines of one GPU: ratio of the fastest peer's time to libgdn's, per head configuration."""
    shapes: dict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    for row in read_records(folder):
        if row["op"] == "chunk_forward":
            shapes[tuple(row[key] for key in ("h_k", "h_v", "label", "seqlens"))][row["impl"]] = row
    ratios: dict[tuple[str, ...], list[tuple[float, str]]] = defaultdict(list)
    ours: list[Row] = []
    peers: set[str] = set()
    for (h_k, h_v, label, seqlens), rows in shapes.items():
        theirs = [row for name, row in rows.items() if not name.startswith("libgdn")]
        if "libgdn" in rows and theirs:
            best = min(float(row["median_us"]) for row in theirs)
            ratios[h_k, h_v, label].append((best / float(rows["libgdn"]["median_us"]), seqlens))
            ours.append(rows["libgdn"])
            peers |= {row["impl"] for row in theirs}
    if not ours:
        return []
    everything = [entry for entries in ratios.values() for entry in entries]
    facts = read_facts(folder)
    commits, dates = sorted({row["commit"] for row in ours}), sorted({row["date"] for row in ours})
    names = ", ".join(sorted(TITLES.get(name, name) for name in peers))
    lines = [
        f"**{facts['gpu']}**, chunk_forward, bf16; commit {', '.join(commits)}; "
        f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))}: the fastest peer's time over libgdn's ({names})",
        "",
        "| Hk / Hv | models | shapes | geometric mean | worst | at |",
        "|---|---|---|---|---|---|",
    ]
    for (h_k, h_v, label), entries in [*ratios.items(), (("all", "all", ""), everything)]:
        mean = math.exp(sum(math.log(ratio) for ratio, _ in entries) / len(entries))
        worst, where = min(entries)
        lengths = where.split("+")
        where = f"{lengths[0]} x {len(lengths)}" if len(lengths) > 2 else where.replace("+", " + ")
        heads = f"{h_k} / {h_v}" if h_k != "all" else "all"
        lines.append(f"| {heads} | {label} | {len(entries)} | {mean:.2f}x | {worst:.2f}x | {where} |")
    relative = f"bench/results/{folder.name}/summary.md"
    return [*lines, "", f"Every shape: [{relative}]({relative}).", ""]


def table(folder: Path) -> list[str]:
    """Markdown lines of one machine; none without a row that has a peer."""
    if "gpu" in read_facts(folder):
        return gpu_table(folder)
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in read_records(folder):
        groups[tuple(row[key] for key in ("op", "label", "seqlens", "h_k", "h_v"))].append(row)
    peers: list[str] = []
    shapes = []
    for key, rows in groups.items():
        theirs = defaultdict(list)
        for row in rows:
            if not row["impl"].startswith("libgdn"):
                theirs[row["impl"]].append(row)
        ours = [row for row in rows if row["impl"].startswith("libgdn")]
        if not theirs or not ours:
            continue
        peers += [name for name in theirs if name not in peers]
        shapes += [(key, row, theirs) for row in ours]
    if not shapes:
        return []
    commits = sorted({row["commit"] for _, row, _ in shapes})
    dates = sorted({row["date"] for _, row, _ in shapes})
    facts = read_facts(folder)
    cpu = facts.get("cpu", folder.name)
    threads = f", {facts['threads']} threads" if "threads" in facts else ""
    lines = [
        f"**{cpu}**{threads}; commit {', '.join(commits)}; {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}",
        "",
    ]
    lines += ["| | Hk / Hv | dtype | runs as | libgdn | " + " | ".join(TITLES.get(p, p) for p in peers) + " |"]
    lines += ["|---|---|---|---|---|" + "---|" * len(peers)]
    for (op, label, _, h_k, h_v), row, theirs in shapes:
        implementation = row["version"].split()[-1] if row["impl"] == "libgdn" else row["impl"].removeprefix("libgdn")
        cells = [
            f"{op} {label}",
            f"{h_k} / {h_v}",
            row["dtype"],
            implementation.strip(" []()"),
            number(per_token_head(row)),
        ]
        cells += [peer_cell(row, theirs.get(name, [])) for name in peers]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if the table is not current; write nothing")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()

    lines: list[str] = []
    for folder in sorted(path for path in args.results.glob("*") if path.is_dir()):
        lines += table(folder)
    if lines:
        intro = "Median time in µs per token and value head; in brackets how many times libgdn's time a peer takes."
        lines = [intro, "", *lines]
    else:
        lines = ["No benchmark has been recorded yet (`make bench-peers`, then `tools/fill_bench.py`).", ""]
    text = args.readme.read_text(encoding="utf-8")
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    filled = text[:start] + "\n" + "\n".join(lines) + text[stop:]
    if args.check:
        print("current" if filled == text else f"{args.readme}: the benchmark table is not that of {args.results}")
        return int(filled != text)
    args.readme.write_text(filled, encoding="utf-8")
    print(f"{args.readme}: {sum(line.startswith('| ') for line in lines)} table lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
