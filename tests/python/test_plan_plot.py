# SPDX-License-Identifier: MIT
"""`gdn plan --plot`, from plans saved in plans.json: made for an H200, drawn without a GPU."""

from __future__ import annotations

import copy
import itertools
import json
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from gdn.cli import main, plot

PLANS = json.loads((Path(__file__).parent / "plans.json").read_text(encoding="utf-8"))
_SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(params=sorted(PLANS))
def plan(request: Any) -> dict[str, Any]:
    return copy.deepcopy(PLANS[request.param])


def _bars(text: str) -> list[tuple[int, float, float]]:
    """(multiprocessor, left, right) of every bar drawn."""
    rects = [r for r in ElementTree.fromstring(text).iter(f"{_SVG}rect") if r.get("class") == "bar"]
    return [(int(r.get("data-sm")), float(r.get("x")), float(r.get("x")) + float(r.get("width"))) for r in rects]


def _texts(text: str) -> list[str]:
    return [t.text or "" for t in ElementTree.fromstring(text).iter(f"{_SVG}text")]


def test_plans_cover_what_is_drawn() -> None:
    assert any(p["split_tokens"] > 0 for p in PLANS.values()) and any(p["split_tokens"] == 0 for p in PLANS.values())
    assert any(len(set(p.get("lengths", []))) > 1 and p["split_tokens"] > 0 for p in PLANS.values())
    assert any(p["model"]["longest_first"] for p in PLANS.values())


def test_a_multiprocessor_does_one_thing_at_a_time(plan: dict[str, Any]) -> None:
    line = plot.timeline(plan)
    ends: dict[int, float] = defaultdict(float)
    for bar in line.bars:  # in the order of the grid, so also in that of each multiprocessor
        assert 0 <= bar.sm < line.sms
        assert ends[bar.sm] <= bar.begin < bar.end
        ends[bar.sm] = bar.end
    assert max(ends.values()) == line.makespan
    assert {bar.kind for bar in line.bars} <= set(plot.KINDS)


def test_blocks_are_those_of_the_kernel(plan: dict[str, Any]) -> None:
    """Every token once per head and panel; launch 2 after launch 1; ends and transitions where segments have them."""
    line, model, heads = plot.timeline(plan), plan["model"], plan["problem"]["value_heads"]
    lengths, split, chunk = plot.sequence_lengths(plan), plan["split_tokens"], plan["block_tokens"]
    assert sum(lengths) <= plan["problem"]["tokens"] and len(lengths) == plan["problem"]["sequences"]
    panels = plan["problem"]["value_dim"] // plan["panel_v"]
    segments = [-(-length // split) if 0 < split < length else 1 for length in lengths]
    last = [bar for bar in line.bars if bar.kind in ("segment", "whole")]
    assert len(last) == sum(segments) * heads * panels
    factor = model["rounds_penalty"] if split and len(last) > line.sms else 1
    chunks = sum((bar.end - bar.begin) / factor - model["start_us"] for bar in last) / model["chunk_us"]
    assert chunks == pytest.approx(sum(-(-length // chunk) for length in lengths) * heads * panels)
    if not split:
        assert line.launches == [0.0] and {bar.kind for bar in line.bars} == {"whole"}
        return
    second = line.launches[1]
    for bar in line.bars:
        assert (bar.begin >= second) if bar.kind in ("fold", "segment") else (bar.end <= second)
    count = {kind: sum(bar.kind == kind for bar in line.bars) for kind in plot.KINDS}
    parts, exact = plan["problem"]["value_dim"] // 128, plot.exact_heads(plan)
    assert count["end"] == sum(n - 1 for n in segments) * exact * parts
    assert count["window"] == sum(n - 1 for n in segments) * (heads - exact) * parts
    assert count["transition"] == sum(max(0, n - 2) for n in segments) * exact
    assert count["skipped"] == sum(max(0, n - 2) for n in segments) * (heads - exact)
    assert count["fold"] == sum(max(0, n - 2) for n in segments) * exact * panels


def test_alike_sequences_take_what_the_model_predicts() -> None:
    plan = PLANS["whole"]
    assert plan["split_tokens"] == 0 and "lengths" not in plan
    assert plot.timeline(plan).makespan == pytest.approx(plan["model"]["predicted_us"], rel=1e-6)


def test_longest_first() -> None:
    plan = copy.deepcopy(next(p for p in PLANS.values() if p["model"]["longest_first"]))
    sizes = [bar.end - bar.begin for bar in plot.timeline(plan).bars]
    assert sizes == pytest.approx(sorted(sizes, reverse=True))
    plan["model"]["longest_first"] = 0
    sizes = [bar.end - bar.begin for bar in plot.timeline(plan).bars]
    assert sizes != pytest.approx(sorted(sizes, reverse=True))


@pytest.mark.parametrize("rows", [None, 1, 40, 132, 1000])
def test_picture(plan: dict[str, Any], rows: int | None) -> None:
    text = plot.svg(plan, rows)
    line, shown = plot.timeline(plan), 32 if rows is None else min(rows, 132)
    bars = _bars(text)
    assert len(bars) == sum(bar.sm < shown for bar in line.bars) > 0
    by_row: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for sm, left, right in bars:
        by_row[sm].append((left, right))
    for spans in by_row.values():
        spans.sort()
        assert all(a[1] <= b[0] + 0.02 for a, b in itertools.pairwise(spans))  # two decimals are written
    if shown == line.sms:  # the last bar ends where the axis does
        assert max(right for _, _, right in bars) == pytest.approx(1040 - 24, abs=0.02)
    texts = _texts(text)
    assert f"{plan['model']['predicted_us']:.0f} µs predicted" in texts[0]
    assert (f"and {132 - shown} more multiprocessors" in texts) == (shown < 132)
    for kind, (legend, fill) in plot.KINDS.items():
        drawn = any(bar.kind == kind for bar in line.bars)
        assert (legend in texts) == drawn
        assert not drawn or fill in text
    assert ("launch 2" in texts) == (plan["split_tokens"] > 0)
    assert "prefers-color-scheme: dark" in text


def test_command(tmp_path: Path, capsys: Any) -> None:
    saved, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    saved.write_text(json.dumps(PLANS["split"]), encoding="utf-8")
    assert main(["plan", "--from", str(saved), "--plot", str(picture), "--plot-rows", "132"]) == 0
    assert "chunk_sm90" in capsys.readouterr().out
    assert picture.read_text(encoding="utf-8") == plot.svg(PLANS["split"], 132)
    assert main(["plan", "--from", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == PLANS["split"]


def test_lengths_are_kept_in_the_document(capsys: Any) -> None:
    assert main(["plan", "--seqlens", "7,2x9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lengths"] == [7, 9, 9]


def test_what_cannot_be_drawn(tmp_path: Path, capsys: Any) -> None:
    def command(*args: str) -> tuple[int, str]:
        return main(["plan", *args]), capsys.readouterr().err

    saved, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    code, error = command("--device", "cpu", "-T", "64", "--plot", str(picture))
    assert code == 3 and "found a plan of" in error and "expected one of an implementation with a cost model" in error
    code, error = command("--from", str(saved))
    assert code == 2 and "argument '--from': found" in error
    for content in ("{", "[]", '{"impl": "chunk_sm90"}'):
        saved.write_text(content, encoding="utf-8")
        code, error = command("--from", str(saved), "--plot", str(picture))
        assert code == 2 and "argument '--from': found" in error
    broken = copy.deepcopy(PLANS["split"])
    del broken["model"]["fold_us"]
    saved.write_text(json.dumps(broken), encoding="utf-8")
    code, error = command("--from", str(saved), "--plot", str(picture))
    assert code == 2 and "found a plan without 'fold_us'" in error
    uneven = copy.deepcopy(PLANS["split"])
    uneven["problem"].update(sequences=2, longest_sequence=20000)
    saved.write_text(json.dumps(uneven), encoding="utf-8")
    code, error = command("--from", str(saved), "--plot", str(picture))
    assert code == 2 and "without 'lengths'" in error
    assert not picture.exists()
    saved.write_text(json.dumps(PLANS["split"]), encoding="utf-8")
    code, error = command("--from", str(saved), "--plot", str(tmp_path / "none" / "plan.svg"))
    assert code == 2 and "argument '--plot': found" in error
    code, error = command("--from", str(saved), "--plot", str(picture), "--plot-rows", "0")
    assert code == 2 and "argument '--plot-rows': found 0" in error


def _shares(lengths: list[int], heads: int, key_heads: int, ctas: int, together: int) -> dict[str, Any]:
    """A plan of the wrap-around schedule, from the whole one: its model's numbers are those of schedule.cpp."""
    plan = copy.deepcopy(PLANS["whole"])
    plan["problem"].update(sequences=len(lengths), tokens=sum(lengths), longest_sequence=max(lengths))
    plan["problem"].update(key_heads=key_heads, value_heads=heads)
    plan.update(lengths=lengths, split_tokens=0, shares=ctas, together=together, work_items=len(lengths) * heads)
    plan["model"].update(longest_first=0, sms=132, start_us=5, restart_us=13, line_chunk_us=2.7)
    plan["model"].update(line_start_us=8, line_work_chunks=2, line_least_part=3, line_slack_chunks=3)
    return plan


@pytest.mark.parametrize(
    ("lengths", "heads", "key_heads", "together"),
    [([8192] * 4, 48, 16, 3), ([200] * 64, 32, 16, 2), ([512, 1024, 1536, 2048, 2560, 0, 1], 64, 16, 4)],
)
def test_shares_are_equal_and_hold_every_chunk_once(
    lengths: list[int], heads: int, key_heads: int, together: int
) -> None:
    plan = _shares(lengths, heads, key_heads, 132, together)
    bars = plot.timeline(plan).bars
    by_sm: dict[int, list[Any]] = defaultdict(list)
    for bar in bars:
        assert 0 <= bar.sm < 132
        by_sm[bar.sm].append(bar)
    for own in by_sm.values():  # one after another, without a gap
        assert all(a.end == pytest.approx(b.begin) for a, b in itertools.pairwise(own))
        assert all(bar.kind == "whole" for bar in own[1:-1])  # only the first and the last may be parts
    step, more = plan["model"]["line_chunk_us"], plan["model"]["line_work_chunks"]
    chunks = sum(round((bar.end - bar.begin) / step) - more for bar in bars)
    assert chunks == heads * sum(max(1, -(-length // 64)) for length in lengths)
    whole = [round((bar.end - bar.begin) / step) - more for bar in bars if bar.kind == "part"]
    assert not whole or min(whole) >= 3
    ends = sorted(own[-1].end for own in by_sm.values())
    assert ends[-1] - ends[len(ends) // 2] <= 5 * step  # the share, and what rounding and cuts add
    assert "132 equal shares" in " ".join(_texts(plot.svg(plan)))
