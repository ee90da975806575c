# SPDX-License-Identifier: MIT
"""gdn bench --scenario: pieces of a prompt against the prompt in one piece."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gdn.cli import main, scenario

torch = pytest.importorskip("torch")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> scenario.Scenario:
    shape = scenario.Scenario("a short one", 1, 2, 300)
    monkeypatch.setitem(scenario.SCENARIOS, "9b-4k", shape)
    return shape


def test_pieces_carry_the_state(short: scenario.Scenario) -> None:
    prompt = scenario.Prompt(torch, short, torch.bfloat16, torch.device("cpu"))
    whole = torch.cat(prompt.run(300), dim=1)
    state = prompt.state.clone()
    assert float(whole.float().norm()) > 0 and float(state.norm()) > 0
    for size in (64, 128, 100):
        pieces = torch.cat(prompt.run(size), dim=1)
        assert pieces.shape == whole.shape
        assert scenario._error(torch, pieces, whole) < 5e-3, size
        assert scenario._error(torch, prompt.state, state) < 5e-3, size


def test_an_error_is_seen() -> None:
    a = torch.ones(4)
    assert scenario._error(torch, a, a) == 0
    assert scenario._error(torch, 1.1 * a, a) == pytest.approx(0.1, rel=1e-5)


def test_command(short: scenario.Scenario, capsys: Any, tmp_path: Any) -> None:
    path = tmp_path / "records.csv"
    flags = ["--pieces", "64,128,4096", "--reps", "1", "--dtype", "bf16", "--csv", str(path), "--json"]
    assert main(["bench", "--scenario", "9b-4k", *flags]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    assert [r["label"] for r in records] == [f"9b-4k pieces of {n}" for n in (300, 64, 128)]  # 4096 is no piece of 300
    assert records[0]["same_bits"] and all(r["o_error"] < 5e-3 and r["median_us"] > 0 for r in records)
    assert len(path.read_text().splitlines()) == 1 + 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--pieces", "64,x"], "--pieces"), (["--pieces", "0"], "--pieces"), (["-T", "64"], "--scenario")],
)
def test_wrong_flags_are_named(short: scenario.Scenario, capsys: Any, flags: list[str], message: str) -> None:
    assert main(["bench", "--scenario", "9b-4k", *flags]) != 0
    assert message in capsys.readouterr().err
