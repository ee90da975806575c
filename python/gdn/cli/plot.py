# SPDX-License-Identifier: MIT
"""``gdn plan --plot``: when each block of a chunk_forward is predicted to run on which multiprocessor, as SVG.

Everything comes from the plan's JSON: the numbers of the cost model (`model`), which libgdn plans with, and the shape.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from .console import UnavailableError, UsageError

FEW_ROWS, FIRST_ROWS = 40, 32  # more multiprocessors than FEW_ROWS: only the first FIRST_ROWS are shown

# kind: (legend, fill); the fills keep their distance to a white and to a black background, and to each other.
KINDS = {
    "window": ("launch 1: warm-up over the gate window", "#d9a300"),
    "skipped": ("launch 1: no transition needed", "#a58a4a"),
    "end": ("launch 1: exact end of a segment", "#d1603d"),
    "transition": ("launch 1: transition", "#a8479b"),
    "fold": ("launch 2: folds", "#2f9e60"),
    "segment": ("launch 2: segment", "#4a83d4"),
    "whole": ("whole sequence", "#4a83d4"),
    "part": ("part of a sequence: the first at the beginning of a share, the last at its end", "#7a6fd0"),
}


@dataclass(frozen=True)
class Block:
    """A CTA: what it does one after the other, as (kind, microseconds)."""

    parts: tuple[tuple[str, float], ...]
    what: str


@dataclass(frozen=True)
class Bar:
    sm: int
    begin: float
    end: float
    kind: str
    what: str


@dataclass(frozen=True)
class Timeline:
    """Bars of all multiprocessors, in microseconds since the call; `launches`: where each launch begins."""

    bars: list[Bar]
    launches: list[float]
    makespan: float
    sms: int


def sequence_lengths(plan: dict[str, Any]) -> list[int]:
    """Tokens of each sequence; alike where the plan does not say."""
    if "lengths" in plan:
        return [int(length) for length in plan["lengths"]]
    problem = plan["problem"]
    each, longest = problem["tokens"] // max(1, problem["sequences"]), problem.get("longest_sequence", 0)
    if longest and longest != each:
        raise UsageError(
            "argument '--plot': found a plan of uneven sequences without 'lengths', expected their lengths"
        )
    return [each] * problem["sequences"]


def exact_heads(plan: dict[str, Any]) -> int:
    """Value heads that are drawn without a gate window: the first ones."""
    return int(plan["problem"]["value_heads"] * plan["model"]["exact_share"] + 0.5)


def _segments(length: int, plan: dict[str, Any]) -> list[int]:
    """Chunks of the segments of a sequence, as even as the kernel cuts them."""
    chunk, most = plan["block_tokens"], plan["split_tokens"]
    chunks = -(-length // chunk)
    count = -(-length // most) if 0 < most < length else 1
    each = -(-chunks // count)
    return [min(each, chunks - each * i) for i in range(count)]


def _first_launch(plan: dict[str, Any], cuts: Sequence[Sequence[int]]) -> Iterable[Block]:
    """Ends of all segments but a sequence's last, transitions of those but its first; the rest leave at once."""
    problem, model = plan["problem"], plan["model"]
    exact, ends = exact_heads(plan), problem["value_dim"] // 128
    for n, segments in enumerate(cuts):
        for s, chunks in enumerate(segments[:-1]):
            whole = chunks * model["local_chunk_us"]
            for head in range(problem["value_heads"]):
                what = f"sequence {n}, segment {s}, head {head}"
                end = ("end", whole) if head < exact else ("window", min(model["window_us"], whole + model["start_us"]))
                for _ in range(ends):
                    yield Block((end,), what)
                if s > 0:
                    moved = ("transition", whole) if head < exact else ("skipped", model["no_transition_us"])
                    yield Block((moved,), what)


def _forward(plan: dict[str, Any], cuts: Sequence[Sequence[int]]) -> Iterable[Block]:
    problem, model, split = plan["problem"], plan["model"], plan["split_tokens"] > 0
    exact, panels = exact_heads(plan), problem["value_dim"] // plan["panel_v"]
    order = list(range(len(cuts)))
    if model.get("longest_first"):
        order.sort(key=lambda n: -sum(cuts[n]))
    blocks = 0
    for n in order:
        for s, chunks in enumerate(cuts[n]):
            for head in range(problem["value_heads"]):
                first_round = split or blocks < model["sms"]
                start = model["start_us"] if first_round else model.get("restart_us", model["start_us"])
                blocks += panels
                parts = [("segment" if split else "whole", chunks * model["chunk_us"] + start)]
                if s > 1 and head < exact:
                    parts.insert(0, ("fold", (s - 1) * model["fold_us"]))
                what = f"sequence {n}, " + (f"segment {s}, " if split else "") + f"head {head}"
                for panel in range(panels):
                    first = panel * plan["panel_v"]
                    yield Block(tuple(parts), f"{what}, V {first}..{first + plan['panel_v'] - 1}")


def _place(blocks: Iterable[Block], sms: int, begin: float, factor: float) -> list[Bar]:
    """One block per multiprocessor at a time; the next of the grid goes where one is free first."""
    free = [(begin, sm) for sm in range(sms)]
    bars = []
    for block in blocks:
        time, sm = heapq.heappop(free)
        for kind, micros in block.parts:
            bars.append(Bar(sm, time, time + micros * factor, kind, block.what))
            time = bars[-1].end
        heapq.heappush(free, (time, sm))
    return bars


def _deal_out(plan: dict[str, Any], lengths: Sequence[int]) -> list[Bar]:
    """The wrap-around schedule: blocks with one share each of all (sequence, head, V columns) in a line (line.cuh)."""
    problem, model = plan["problem"], plan["model"]
    together, more = plan["together"], int(model["line_work_chunks"])
    least, slack = int(model["line_least_part"]), int(model["line_slack_chunks"])
    shares, panels = plan["shares"] // together, problem["value_dim"] // plan["panel_v"]
    parts = problem["value_heads"] * panels // together
    chunks = [max(1, -(-length // plan["block_tokens"])) for length in lengths]
    share = max(max(chunks) + more, -(-sum(c + more for c in chunks) * parts // shares))
    if min(chunks) == max(chunks):
        whole = -(-len(chunks) * parts // shares) * (chunks[0] + more)
        share = whole if whole <= share + slack else share
    bars: list[Bar] = []
    ends: dict[int, float] = {}
    line = 0
    for n, count in enumerate(chunks):
        for part in range(parts):
            number = line // share
            earlier = min(count, max(0, (number + 1) * share - line - more))
            if earlier < count:  # no shorter part on either side
                earlier = 0 if earlier < least else count if count - earlier < least else earlier
            pieces = [(number, earlier, "part" if earlier < count else "whole")]
            pieces.append((number + 1, count - earlier, "part" if earlier > 0 else "whole"))
            for at, some, kind in pieces:
                if some == 0:
                    continue
                begin = ends.get(at, model["line_start_us"])
                ends[at] = begin + (some + more) * model["line_chunk_us"]
                for member in range(together):
                    head = (part * together + member) // panels
                    bars.append(Bar(at * together + member, begin, ends[at], kind, f"sequence {n}, head {head}"))
            line += count + more
    return bars


def timeline(plan: dict[str, Any]) -> Timeline:
    """The blocks of an accepted plan, placed."""
    if plan.get("impl") is None or "model" not in plan:
        raise UnavailableError(
            f"argument '--plot': found a plan of {plan.get('impl') or 'no implementation'}, expected one of an "
            "implementation with a cost model (chunk_sm90, on a Hopper GPU)"
        )
    try:
        model, sms = plan["model"], int(plan["model"]["sms"])
        cuts = [_segments(length, plan) for length in sequence_lengths(plan)]
        forward = list(_forward(plan, cuts))
        if not forward:
            raise UsageError("argument '--plot': found a plan without sequences, expected at least one")
        if plan.get("shares"):
            bars = _deal_out(plan, sequence_lengths(plan))
            launches = [0.0]
        elif plan["split_tokens"] == 0:
            bars = _place(forward, sms, 0.0, 1.0)
            launches = [0.0]
        else:
            factor = model["rounds_penalty"] if len(forward) > sms else 1.0
            launches = [model["split_us"]]
            bars = _place(_first_launch(plan, cuts), sms, launches[0], factor)
            launches.append(max((bar.end for bar in bars), default=launches[0]))
            bars += _place(forward, sms, launches[1], factor)
    except KeyError as error:
        raise UsageError(f"argument '--plot': found a plan without {error}, expected one of gdn plan --json") from None
    return Timeline(bars, launches, max(bar.end for bar in bars), sms)


def _step(span: float, most: int) -> float:
    """1, 2 or 5 times a power of ten, such that at most `most` of them fit into the span."""
    step = 1e-3
    while True:
        for factor in (1, 2, 5):
            if span <= step * factor * most:
                return step * factor
        step *= 10


def _headline(plan: dict[str, Any]) -> str:
    lengths, problem = sequence_lengths(plan), plan["problem"]
    low, high = min(lengths), max(lengths)
    tokens = f"{len(lengths)} x {high}" if low == high else f"{len(lengths)} sequences of {low} to {high}"
    return (
        f"{plan['op']}, {tokens} tokens, Hk {problem['key_heads']}, Hv {problem['value_heads']}, "
        f"K {problem['key_dim']}, V {problem['value_dim']}, {problem['q_dtype']}: "
        f"{plan['model']['predicted_us']:.0f} µs predicted"
    )


def _details(plan: dict[str, Any], line: Timeline) -> str:
    split, heads = plan["split_tokens"], plan["problem"]["value_heads"]
    text = f"{plan['impl']}, {line.sms} multiprocessors, {plan['panel_v']} V columns per block, "
    shares = plan.get("shares")
    text += (
        f"segments of at most {split} tokens; "
        if split
        else f"{shares} equal shares; "
        if shares
        else "sequences whole; "
    )
    if split:
        text += f"{exact_heads(plan)} of {heads} heads drawn without a gate window; "
    return text + f"these bars end at {line.makespan:.0f} µs"


_STYLE = """
  .back { fill: #ffffff } text { fill: #1d2733 } .faint { fill: #5b6773 }
  .grid { stroke: #d5dbe1 } .launch { stroke: #1d2733; stroke-dasharray: 4 3 } .bar { stroke: #ffffff }
  @media (prefers-color-scheme: dark) {
    .back { fill: #12171d } text { fill: #e4e9ee } .faint { fill: #9aa6b2 }
    .grid { stroke: #333d47 } .launch { stroke: #e4e9ee } .bar { stroke: #12171d }
  }
"""


def svg(plan: dict[str, Any], rows: int | None = None) -> str:
    """The picture of a plan; `rows`: multiprocessors shown, the first ones (None: all, or FIRST_ROWS of many)."""
    line = timeline(plan)
    if rows is None:
        rows = line.sms if line.sms <= FEW_ROWS else FIRST_ROWS
    rows = min(rows, line.sms)
    width, left, right, height = 1040, 62, 24, 16 if rows <= FEW_ROWS else max(5, 640 // rows)
    kinds = [kind for kind in KINDS if any(bar.kind == kind for bar in line.bars)]
    legend_rows = -(-len(kinds) // 3)
    top = 66 + 20 * legend_rows + 22  # of the first row
    bottom = top + rows * height
    total = bottom + 44 + (18 if rows < line.sms else 0)
    scale = (width - left - right) / line.makespan

    def x(micros: float) -> str:
        return f"{left + micros * scale:.2f}"

    def text(x: Any, y: Any, content: str, more: str = "") -> str:
        return f'<text x="{x}" y="{y}"{more}>{escape(content)}</text>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" height="{total}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12">',
        f"<title>{escape(_headline(plan))}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{width}" height="{total}"/>',
        text(16, 24, _headline(plan), ' font-size="15" font-weight="bold"'),
        text(16, 44, _details(plan, line), ' class="faint"'),
    ]
    for i, kind in enumerate(kinds):
        at, y = 16 + i % 3 * 340, 58 + 20 * (i // 3)
        out.append(f'<rect x="{at}" y="{y}" width="14" height="12" fill="{KINDS[kind][1]}"/>')
        out.append(text(at + 20, y + 11, KINDS[kind][0]))
    step = _step(line.makespan, 10)
    for i in range(int(line.makespan / step) + 1):
        at = x(i * step)
        out.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{top}" y2="{bottom + 4}"/>')
        out.append(text(at, bottom + 18, f"{i * step:g}", ' text-anchor="middle"'))
    axis = "predicted time, µs"
    if plan["split_tokens"] > 0:
        axis += f" (the first {plan['model']['split_us']:g}: what a second launch costs)"
    out.append(text((left + width - right) / 2, bottom + 36, axis, ' class="faint" text-anchor="middle"'))
    every = next(step for step in (1, 2, 4, 8) if step * height >= 13)
    for sm in range(0, rows, every):
        y = top + sm * height + min(height, 16) - (4 if height >= 13 else 0)
        out.append(text(left - 6, y, f"SM {sm}", ' class="faint" font-size="10" text-anchor="end"'))
    gap, stroke = (1, 0.5) if height > 6 else (0, 0.25)
    for bar in line.bars:
        if bar.sm < rows:
            out.append(
                f'<rect class="bar" data-sm="{bar.sm}" x="{x(bar.begin)}" y="{top + bar.sm * height}" '
                f'width="{(bar.end - bar.begin) * scale:.2f}" height="{height - gap}" fill="{KINDS[bar.kind][1]}" '
                f'stroke-width="{stroke}"><title>{escape(bar.what)}: {bar.kind}, {bar.begin:.1f} to {bar.end:.1f} µs'
                "</title></rect>"
            )
    if len(line.launches) > 1:
        for number, begin in enumerate(line.launches, 1):
            at = x(begin)
            out.append(f'<line class="launch" x1="{at}" x2="{at}" y1="{top - 6}" y2="{bottom}"/>')
            out.append(text(f"{left + begin * scale + 4:.2f}", top - 8, f"launch {number}", ' font-weight="bold"'))
    if rows < line.sms:
        more = f"and {line.sms - rows} more multiprocessors"
        out.append(text(16, bottom + 54, more, ' class="faint"'))
    out.append("</svg>")
    return "\n".join(out) + "\n"
