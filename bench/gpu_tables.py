# SPDX-License-Identifier: MIT
"""Tables and plots of bench/results/<GPU>/chunk_forward.csv, written beside it.

    python bench/gpu_tables.py bench/results/h200 [--format svg] [--ours libgdn] [--ncu ncu.csv ncu_sections.csv]

summary.md: per head configuration the geometric mean and the worst ratio to the fastest peer, then every shape.
speedup.*: ratio to the fastest peer per shape. ceiling.*: share of the measured bf16 matmul rate.
busy_sm.csv, busy_sm.*: share of SM time with a resident block, from an ncu log of `gpu_peers.py --profile`.
Only what was measured appears: a shape without libgdn or without a peer is left out and counted.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterable
from pathlib import Path

from gpu_common import Facts, Shape

COLORS = {"libgdn": "#1f6feb", "flash_qla": "#d29922", "flashinfer": "#2da44e", "fla": "#8b949e"}
TITLES = {"flash_qla": "FlashQLA", "flashinfer": "FlashInfer", "fla": "FLA"}
Times = dict[Shape, dict[str, float]]


def read_times(path: Path) -> Times:
    """Median microseconds per shape and implementation, in the record's order."""
    if not path.exists():
        raise SystemExit(f"found no {path}, expected the record of gpu_peers.py")
    with path.open(newline="") as f:
        times: Times = {}
        for row in csv.DictReader(f):
            shape = Shape(row["label"], row["seqlens"], int(row["h_k"]), int(row["h_v"]))
            times.setdefault(shape, {})[row["impl"]] = float(row["median_us"])
    return times


def best_peer(row: dict[str, float]) -> tuple[str, float] | None:
    """The fastest implementation that is not libgdn's."""
    peers = [(us, name) for name, us in row.items() if not name.startswith("libgdn")]
    return min(peers)[::-1] if peers else None


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def short(seqlens: str) -> str:
    lengths = seqlens.split("+")
    return (
        f"{lengths[0]} x {len(lengths)}" if len(lengths) > 2 and len(set(lengths)) == 1 else seqlens.replace("+", " + ")
    )


def compared(times: Times, ours: str) -> list[tuple[Shape, float, str, float, float]]:
    """(shape, our time, best peer, its time, ratio) of shapes that have both."""
    rows = []
    for shape, row in times.items():
        peer = best_peer(row)
        if ours in row and peer:
            rows.append((shape, row[ours], *peer, peer[1] / row[ours]))
    return rows


def summary(times: Times, facts: dict[str, tuple[str, str]], ours: str, versions: str) -> str:
    rows = compared(times, ours)
    if not rows:
        raise SystemExit(f"no shape has both {ours} and a peer")
    ceiling = float(facts["matmul_bf16_TFLOPs"][0]) if "matmul_bf16_TFLOPs" in facts else None
    left_out = len(times) - len(rows)
    lines = [
        f"# chunk_forward: {ours} against the fastest peer",
        "",
        "K = V = 128, bf16, fp32 states, initial and final state on; medians of CUDA-graph replays in microseconds, L2",
        "flushed, implementations in turns. Ratio: best peer's time / libgdn's. "
        + (f"Ceiling: bf16 matmul {ceiling:.0f} TFLOP/s. " if ceiling else "")
        + (f"{left_out} shapes lack libgdn or every peer and are left out." if left_out else ""),
        "",
        versions,
        "",
        "| Hk / Hv | models | shapes | geometric mean | worst ratio | at |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[tuple[Shape, float, str, float, float]]] = {}
    for entry in rows:
        groups.setdefault((f"{entry[0].h_k} / {entry[0].h_v}", entry[0].label), []).append(entry)
    for (heads, label), entries in [*groups.items(), (("all", ""), rows)]:
        worst = min(entries, key=lambda e: e[4])
        lines.append(
            f"| {heads} | {label} | {len(entries)} | {geomean(e[4] for e in entries):.2f} | {worst[4]:.2f} | "
            f"{short(worst[0].seqlens)}{f' ({worst[0].heads})' if heads == 'all' else ''} |"
        )
    full = [e for e in rows if len(e[0].lengths) * e[0].h_v >= 64]
    if full:
        worst = min(full, key=lambda e: e[4])
        lines += [
            "",
            f"Shapes with at least 64 pairs of sequence and head: {len(full)}, geometric mean "
            f"{geomean(e[4] for e in full):.2f}, worst {worst[4]:.2f} ({worst[0].heads}, {short(worst[0].seqlens)}).",
        ]
    peers = list(dict.fromkeys(name for row in times.values() for name in row if not name.startswith("libgdn")))
    peers.sort(key=lambda name: list(TITLES).index(name) if name in TITLES else len(TITLES))
    titles = [TITLES.get(name, name) for name in peers]
    lines += [
        "",
        "| Hk / Hv | sequences | libgdn | " + " | ".join(titles) + " | best peer | ratio | share of ceiling |",
    ]
    lines.append("|---" * (6 + len(peers)) + "|")
    for shape, us, peer, _, ratio in rows:
        cells = [f"{times[shape][name]:.1f}" if name in times[shape] else "-" for name in peers]
        share = f"{100 * shape.flop / us / 1e6 / ceiling:.0f} %" if ceiling else "-"
        lines.append(
            f"| {shape.h_k} / {shape.h_v} | {short(shape.seqlens)} | {us:.1f} | {' | '.join(cells)} | "
            f"{TITLES.get(peer, peer)} | {ratio:.2f} | {share} |"
        )
    return "\n".join(lines) + "\n"


def read_versions(path: Path) -> str:
    """One line: what was measured, at which commits, when."""
    with path.open(newline="") as f:
        rows = list(csv.DictReader(f))
    parts = []
    for impl in dict.fromkeys(r["impl"] for r in rows):
        mine = [r for r in rows if r["impl"] == impl]
        versions = ", ".join(sorted({r["version"] for r in mine}))
        commits = ", ".join(sorted({f"{r['commit']} {r['date']}" for r in mine}))
        parts.append(f"{impl}: {versions} ({len(mine)} shapes; {commits})")
    return "; ".join(parts) + "."


def sections_from_ncu(log: Path, sections: Path) -> dict[tuple[str, ...], float]:
    """Busy share of SM time per section: sum over its kernels of active cycles / sum of elapsed cycles (raw page CSV).

    A section's kernels follow its marker, torch.cuda._sleep's spin_kernel; the number of markers must match."""
    lines = log.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    rows = list(csv.DictReader(lines[start:]))[1:]  # the first row holds the units
    groups: list[list[dict[str, str]]] = []
    for row in rows:
        if "spin_kernel" in row["Kernel Name"]:
            groups.append([])
        elif groups:
            groups[-1].append(row)
    with sections.open(newline="") as f:
        names = [tuple(r.values()) for r in csv.DictReader(f)]
    if len(names) != len(groups):
        raise SystemExit(f"{log}: found {len(groups)} marker kernels, expected {len(names)} (from {sections})")

    def total(group: list[dict[str, str]], metric: str) -> float:
        return sum(float(row[metric].replace(",", "")) for row in group)

    return {
        name: total(group, "sm__cycles_active.avg") / total(group, "sm__cycles_elapsed.max")
        for name, group in zip(names, groups, strict=True)
        if group
    }


Bars = list[tuple[str, str, dict[str, float]]]  # panel, bar group, implementation -> value


def plot_panels(path: Path, bars: Bars, ylabel: str, title: str, line: float | None) -> None:
    """A panel per head configuration; in it a group of bars per shape, one bar per implementation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys(panel for panel, _, _ in bars))
    impls = list(dict.fromkeys(name for _, _, values in bars for name in values))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(5 * columns, 3.2 * lines), sharey=True, squeeze=False, layout="constrained"
    )
    width = 0.8 / len(impls)
    for axis, panel in zip(axes.flat, panels, strict=False):
        rows = [(name, values) for owner, name, values in bars if owner == panel]
        for i, impl in enumerate(impls):
            places = [x + (i - (len(impls) - 1) / 2) * width for x, (_, v) in enumerate(rows) if impl in v]
            color = next((c for n, c in COLORS.items() if impl.startswith(n)), "#57606a")
            axis.bar(places, [v[impl] for _, v in rows if impl in v], width, label=TITLES.get(impl, impl), color=color)
        if line is not None:
            axis.axhline(line, color="#24292f", linewidth=0.8)
        axis.set_xticks(range(len(rows)), [name for name, _ in rows], rotation=90, fontsize=6)
        axis.set_title(panel, fontsize=9)
    for axis in list(axes.flat)[len(panels) :]:
        axis.axis("off")
    for row in axes:
        row[0].set_ylabel(ylabel, fontsize=8)
    if len(impls) > 1:
        axes[0][0].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def panel_name(h_k: int | str, h_v: int | str, label: str) -> str:
    return f"Hk {h_k}, Hv {h_v} ({label})"


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path)
    p.add_argument("--ours", default="libgdn")
    p.add_argument("--format", default="svg", choices=["svg", "png"])
    p.add_argument("--ncu", nargs=2, type=Path, metavar=("LOG", "SECTIONS"))
    p.add_argument("--no-plots", action="store_true", help="summary.md only")
    args = p.parse_args(argv)
    path, facts = args.folder / "chunk_forward.csv", Facts(args.folder / "facts.csv").rows
    if args.ncu:
        busy = sections_from_ncu(*args.ncu)
        with (args.folder / "busy_sm.csv").open("w", newline="") as f:
            writer = csv.writer(f, lineterminator="\n")
            writer.writerow(["label", "seqlens", "h_k", "h_v", "impl", "busy_sm_share"])
            writer.writerows([*name, f"{share:.4f}"] for name, share in busy.items())
        grouped: dict[tuple[str, str], dict[str, float]] = {}
        for (label, seqlens, h_k, h_v, impl), share in busy.items():
            grouped.setdefault((panel_name(h_k, h_v, label), short(seqlens)), {})[impl] = 100 * share
        plot_panels(
            args.folder / f"busy_sm.{args.format}",
            [(*key, values) for key, values in grouped.items()],
            "busy SMs (%)",
            f"Share of SM time with a resident block: {args.folder.name}",
            100,
        )
    times = read_times(path)
    text = summary(times, facts, args.ours, read_versions(path))
    (args.folder / "summary.md").write_text(text, encoding="utf-8")
    print(text)
    if args.no_plots:
        return 0
    rows = compared(times, args.ours)
    names = [(panel_name(s.h_k, s.h_v, s.label), short(s.seqlens)) for s, *_ in rows]
    plot_panels(
        args.folder / f"speedup.{args.format}",
        [(*name, {args.ours: row[4]}) for name, row in zip(names, rows, strict=True)],
        "best peer's time / libgdn's",
        f"chunk_forward, speed-up over the fastest peer of each shape: {args.folder.name}",
        1,
    )
    if "matmul_bf16_TFLOPs" in facts:
        ceiling = float(facts["matmul_bf16_TFLOPs"][0])
        shares: Bars = [
            (*name, {n: 100 * shape.flop / us / 1e6 / ceiling for n, us in times[shape].items() if ":" not in n})
            for name, (shape, *_) in zip(names, rows, strict=True)
        ]
        plot_panels(
            args.folder / f"ceiling.{args.format}",
            shares,
            "share of the bf16 matmul rate (%)",
            f"chunk_forward at 10.5 MFLOP per 64 tokens and value head: {args.folder.name}",
            None,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
