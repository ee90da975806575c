# SPDX-License-Identifier: MIT
"""Arguments about splitting long sequences. What they do on a GPU is in test_cuda_torch.py and cuda_rule_test.cpp."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import gdn
import gdn.torch as ops
from gdn.cli import main
from torch_formulas import inputs

NAMES = ("q", "k", "v", "g", "beta")


def test_every_form_is_accepted_on_the_cpu() -> None:
    x = inputs(batch=1, tokens=200)
    args = tuple(x[n] for n in NAMES)
    whole, state = ops.chunk_forward(*args, initial_state=x["state"], output_final_state=True)
    for options in ({"split": "off"}, {"split": 64}, {"split": 128, "split_exact": True}, {"split_threshold": 3.5}):
        o, s = ops.chunk_forward(*args, initial_state=x["state"], output_final_state=True, **options)
        assert torch.equal(o, whole) and torch.equal(s, state)
        pool = x["state"].clone()
        o, s = ops.chunk_forward(*args, initial_state=pool, inplace=True, **options)
        assert torch.equal(o, whole) and torch.equal(pool, state)


def test_refusals() -> None:
    x = inputs(batch=1, tokens=8)
    args = tuple(x[n] for n in NAMES)
    for split in ("on", None, True, 64.0):
        with pytest.raises(
            gdn.InvalidArgumentError, match=f"'split': found {split!r}, expected 'auto', 'off' or a number"
        ):
            ops.chunk_forward(*args, split=split)
    for split in (1, 96, -64):
        with pytest.raises(gdn.InvalidArgumentError, match=f"'split_tokens': found {split}, expected a multiple of 64"):
            ops.chunk_forward(*args, split=split)
    with pytest.raises(gdn.InvalidArgumentError, match="'split_threshold': found -1.0*, expected a finite number > 0"):
        ops.chunk_forward(*args, split_threshold=-1.0)


def test_under_compile() -> None:
    x = inputs(batch=1, tokens=70)
    args = tuple(x[n] for n in NAMES)
    compiled = torch.compile(
        lambda *a: ops.chunk_forward(*a, split=64, split_exact=True, max_seqlen=70), backend="eager", fullgraph=True
    )
    with torch.inference_mode():
        assert torch.equal(compiled(*args)[0], ops.chunk_forward(*args)[0])


def test_plan_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--split", "256", "--split-exact", "--split-threshold", "8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["split_tokens"] == 0 and plan["split"].endswith("does not split")
    assert plan["problem"]["split_exact"] is True and plan["problem"]["split_threshold"] == 8
    assert main(["plan", "--split", "off"]) == 0 and "split" in capsys.readouterr().out
    assert main(["plan", "--split", "half"]) == 2
    assert "argument '--split': found 'half', expected auto, off or a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "limit"), [("31", 31), ("0", 0), ("32", None), (None, None), ("many", None), ("-1", None), ("", None)]
)
def test_limit_from_the_environment(value: str | None, limit: int | None) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "GDN_SPLIT_PAIRS"}
    if value is not None:
        environment["GDN_SPLIT_PAIRS"] = value
    command = [sys.executable, "-m", "gdn.cli", "plan", "--hv", "32", "--json"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    split = json.loads(ran.stdout)["split"]
    assert split == f"off: more than {limit} pairs of sequence and head" if limit is not None else "not split" in split
    warned = f"GDN_SPLIT_PAIRS: found '{value}', expected a number >= 0; using 64"
    assert (warned in ran.stderr) == (value in ("many", "-1", ""))
