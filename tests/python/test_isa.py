# SPDX-License-Identifier: MIT
"""The case list under every implementation this CPU runs, and a short set under every ISA cap in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import Call, capi, implementations, inputs_and_oracle, run_case
from oracle.cases import Case, draw, get_case, load_cases

HEAVY_TOKENS = 2_000_000  # T * Hv * K * V / 64 above which the plain reference would take seconds
CASES = [c for c in load_cases() if not c.slow]
CAPPED = [
    "gate_uniform_60", "gate_very_negative_bf16", "cosine90", "l2_bf16", "varlen_empty_rows", "dims_33_17",
    "dims_192_32_bf16_vfirst", "pool_has_initial", "stride_strided_bf16", "checkpoints_odd", "snapshots_varlen",
    "dtype_mixed", "map_tiled_bf16", "decode_bf16_state", "gate_raw_bf16",
]  # fmt: skip


def _work(case: Case) -> int:
    return case["T"] * case["B"] * case["Hv"] * case["K"] * case["V"]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_every_implementation_that_accepts(case: Case) -> None:
    """What the default choice does not run, by name; the contract is the same."""
    for op in case.ops:
        names = implementations(case, op)
        assert names, f"{case.id} {op}: nobody accepts it"
        assert "reference_fp64" in names and "reference_fp32" in names, f"{case.id} {op}: the reference refuses"
        for name in names[1:]:
            if name.startswith("reference") and _work(case) > 64 * HEAVY_TOKENS:
                continue
            run_case(case, op, impl=name)


def _isas() -> list[str]:
    """ISAs that this process may choose; found by asking for each."""
    before, found = capi.get_isa(), []
    for name in ("baseline", "neon", "avx2", "avx512", "amx"):
        try:
            capi.set_isa(name)
        except capi.Error:
            continue
        found.append(name)
    capi.set_isa(before)
    return found


@pytest.mark.parametrize("isa", _isas())
def test_isa_cap_in_a_fresh_process(isa: str) -> None:
    """GDN_ISA at load: the cap is obeyed by both operators, and results keep the contract."""
    done = subprocess.run(
        [sys.executable, __file__, isa],
        env={**os.environ, "GDN_ISA": isa},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["isa"] == isa
    order = ["any", "baseline", "neon", "avx2", "avx512", "amx"]
    assert all(order.index(used) <= order.index(isa) for used in report["used"]), report
    assert report["cases"] == sum(len(get_case(i).ops) for i in CAPPED)


def test_unknown_isa_is_refused() -> None:
    with pytest.raises(capi.InvalidArgumentError, match="avx1024"):
        capi.set_isa("avx1024")


def test_unknown_implementation_is_refused_by_name() -> None:
    case = get_case("len_64")
    with pytest.raises(capi.InvalidArgumentError, match="chunk_abacus"):
        Call(case, draw(case), "chunk_forward", impl="chunk_abacus").run()


def test_amx_refuses_fp32_by_name() -> None:
    """AMX serves 16-bit inputs only; where the CPU lacks it the message says so."""
    case = get_case("len_64")
    inputs_and_oracle(case)
    with pytest.raises(capi.UnsupportedError, match="chunk_amx"):
        Call(case, draw(case), "chunk_forward", impl="chunk_amx").run()


def _child(isa: str) -> None:
    used, count = set(), 0
    for case_id in CAPPED:
        case = get_case(case_id)
        for op in case.ops:
            used.add(run_case(case, op).isa)
            count += 1
    print(json.dumps({"isa": capi.get_isa(), "used": sorted(used), "cases": count}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    _child(sys.argv[1])
