# SPDX-License-Identifier: MIT
"""The GPU benchmark's driver, tried on the CPU: what it measures, resumes, refuses, and what its tables say."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import gpu_impls  # noqa: E402
import gpu_peers  # noqa: E402
import gpu_tables  # noqa: E402
from gdn import _capi  # noqa: E402
from gpu_common import Record, Shape, make_inputs, ordered, read_shapes, recurrence64, rel_l2  # noqa: E402

SHAPES = "label,seqlens,h_k,h_v\nA,66,1,2\nA,30+20,1,2\nB,66,2,2\nB,30+20,2,2\n"


@pytest.fixture(autouse=True)
def process_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The driver sets GDN_LIBRARY for its process. One torch thread: the shapes are tiny, and two pools only wait."""
    monkeypatch.setenv("GDN_LIBRARY", _capi.library_path())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def drive(folder: Path, *extra: str, peers: dict | None = None) -> int:
    shapes = folder / "shapes.csv"
    shapes.write_text(SHAPES)
    fixed = ["--device", "cpu", "--reps", "2", "--reference", "reference_fp32", "--shapes", str(shapes)]
    before = dict(gpu_peers.PEERS)
    gpu_peers.PEERS.update(peers or {})
    try:
        return gpu_peers.main([*fixed, "--out", str(folder), "--gdn-lib", _capi.library_path(), *extra])
    finally:
        gpu_peers.PEERS.clear()
        gpu_peers.PEERS.update(before)


def rows(folder: Path, name: str = "chunk_forward.csv") -> list[dict[str, str]]:
    with (folder / name).open(newline="") as f:
        return list(csv.DictReader(f))


def fake_peer(calls: list[int], error: float = 0.0) -> gpu_impls.Implementation:
    """The fp64 recurrence as a peer, off by `error`; counts its calls."""

    def prepare(x: dict[str, torch.Tensor]):
        def call() -> tuple[torch.Tensor, torch.Tensor]:
            calls.append(1)
            o, state = recurrence64(x)
            return o * (1 + error), state

        return call

    return gpu_impls.Implementation("fla", prepare, lambda x: "fake")


def test_shape_list() -> None:
    shapes = read_shapes()
    assert len(shapes) == 171 and len(set(shapes)) == 171
    assert len({s.heads for s in shapes}) == 9
    first = ordered(shapes)[:9]  # a run that is cut after nine shapes has every head configuration
    assert {s.heads for s in first} == {s.heads for s in shapes} and {s.seqlens for s in first} == {"32768"}
    assert Shape("", "64+1", 2, 8).flop == 2 * 8 * 10485760


def test_inputs_as_described() -> None:
    x = make_inputs(Shape("", "100+28", 2, 8), "cpu")
    assert x["q"].dtype == x["k"].dtype == x["v"].dtype == torch.bfloat16
    assert torch.allclose(x["k"].float().norm(dim=-1), torch.ones(()), atol=1e-2)
    assert int((x["g"] == 0).all(1).sum()) == 2 and bool((x["g"] <= 0).all())
    assert x["cu_seqlens"].tolist() == [0, 100, 128] and tuple(x["h0"].shape) == (2, 8, 128, 128)


def test_measures_resumes_and_redoes(tmp_path: Path) -> None:
    calls: list[int] = []
    peers = {"fla": lambda: fake_peer(calls)}
    assert drive(tmp_path, "--impls", "libgdn", "--budget", "0") == 0
    assert not rows(tmp_path)
    assert drive(tmp_path, "--impls", "libgdn,fla", "--limit", "fla=1", peers=peers) == 0
    assert len(rows(tmp_path)) == 4 + 2  # fla on the first length pattern only
    done = len(calls)
    assert done > 0
    assert drive(tmp_path, "--impls", "libgdn,fla", "--limit", "fla=1", peers=peers) == 0
    assert len(calls) == done, "rows that the record has are not measured again"
    assert drive(tmp_path, "--impls", "libgdn,fla", "--limit", "fla=1", "--redo", "fla", peers=peers) == 0
    assert len(calls) == 2 * done
    for row in rows(tmp_path):
        assert 0 < float(row["min_us"]) <= float(row["median_us"]) <= float(row["max_us"])
    accuracy = {(r["impl"], r["seqlens"]): r for r in rows(tmp_path, "chunk_forward_accuracy.csv")}
    assert 1e-4 < float(accuracy["libgdn", "66"]["o_rel_l2"]) < 5e-3  # bf16 o
    assert float(accuracy["fla", "66"]["o_rel_l2"]) < 1e-5


def test_late_implementations_come_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peers = {"fla": lambda: fake_peer([])}
    assert drive(tmp_path, "--impls", "fla,libgdn", peers=peers) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith(("1x2", "2x2"))]
    assert len(rows(tmp_path)) == len(lines) == 8
    assert ["libgdn" in line for line in lines] == [True] * 4 + [False] * 4


def test_warming_compiles_in_processes_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert drive(tmp_path, "--impls", "libgdn", "--warm", "libgdn", "--patterns", "1") == 0
    out, err = capfd.readouterr()
    assert "warmed libgdn for 2 head counts" in out and "Traceback" not in err


def test_variants_run_what_they_name(tmp_path: Path) -> None:
    extra = ["--impls", "libgdn", "--variant", "loop,impl=reference_fp32", "--heads", "1x2", "--patterns", "1"]
    assert drive(tmp_path, *extra, "--variant", "capped,GDN_ISA=baseline") == 0
    versions = {r["impl"]: r["version"] for r in rows(tmp_path)}
    assert set(versions) == {"libgdn", "libgdn:loop", "libgdn:capped"}
    assert versions["libgdn:loop"].endswith("reference_fp32")
    if "baseline" in _capi.info()["isa"]["usable"]:
        assert versions["libgdn:capped"].endswith("chunk_baseline"), "read at load: needs a copy of the library"
    assert "GDN_ISA" not in os.environ or os.environ["GDN_ISA"] != "baseline"


def test_wrong_results_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong peer is recorded; a wrong libgdn, or one that cannot run, fails the run."""
    peers = {"fla": lambda: fake_peer([], error=0.1)}
    assert drive(tmp_path, "--impls", "fla", "--patterns", "1", "--heads", "1x2", peers=peers) == 0
    (row,) = rows(tmp_path, "chunk_forward_accuracy.csv")
    assert float(row["o_rel_l2"]) == pytest.approx(0.1, rel=1e-3)
    wrong = {"fla": lambda: gpu_impls.Implementation("libgdn:wrong", fake_peer([], 0.1).prepare, lambda x: "fake")}
    (tmp_path / "wrong").mkdir()
    assert drive(tmp_path / "wrong", "--impls", "fla", "--patterns", "1", peers=wrong) == 1
    assert drive(tmp_path, "--impls", "libgdn", "--variant", "none,impl=no_such_kernel", "--patterns", "1") == 1
    assert "no_such_kernel" in capsys.readouterr().out


def test_record_refuses_another_header(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="found header"):
        Record(path, ["op"])


def test_rel_l2() -> None:
    a = torch.randn(1000)
    assert rel_l2(a * 1.5, a) == pytest.approx(0.5, rel=1e-6)
    assert rel_l2(torch.ones(3), torch.zeros(3)) == pytest.approx(3**0.5)


def write_times(folder: Path, entries: list[tuple[str, str, float]]) -> None:
    record = Record(folder / "chunk_forward.csv", gpu_peers.HEADER)
    for seqlens, impl, us in entries:
        fields = dict.fromkeys(gpu_peers.HEADER, "x")
        fields |= {"label": "27B TP1", "seqlens": seqlens, "h_k": "16", "h_v": "48", "impl": impl}
        record.add(**(fields | {"median_us": us}))
    record.save()


def test_tables(tmp_path: Path) -> None:
    eight = "+".join(["1024"] * 8)
    write_times(
        tmp_path,
        [
            ("32768", "libgdn", 500.0),
            ("32768", "fla", 3000.0),
            ("32768", "flashinfer", 1000.0),
            (eight, "libgdn", 100.0),
            (eight, "flash_qla", 50.0),
            ("2048", "libgdn", 10.0),  # no peer: left out
            ("32768", "libgdn:other", 1.0),  # a variant is no peer
        ],
    )
    (tmp_path / "facts.csv").write_text("fact,value,unit\nmatmul_bf16_TFLOPs,800,TFLOPs\n")
    assert gpu_tables.main([str(tmp_path)]) == 0
    text = (tmp_path / "summary.md").read_text()
    assert "| 16 / 48 | 27B TP1 | 2 | 1.00 | 0.50 | 1024 x 8 |" in text
    assert "1 shapes lack libgdn or every peer" in text
    share = 100 * 512 * 48 * 10485760 / 500e-6 / 800e12
    assert f"| 16 / 48 | 32768 | 500.0 | - | 1000.0 | 3000.0 | FlashInfer | 2.00 | {share:.0f} % |" in text
    assert (tmp_path / "speedup.svg").exists() and (tmp_path / "ceiling.svg").exists()


NCU = """==PROF== Connected
"ID","Kernel Name","sm__cycles_active.avg","sm__cycles_elapsed.max"
"","","cycle","cycle"
"0","void at::spin_kernel(long)","10","10"
"1","a","50","100"
"2","b","1,050","2,100"
"3","void at::spin_kernel(long)","10","10"
"4","c","90","100"
"""


def test_busy_sm_from_ncu(tmp_path: Path) -> None:
    (tmp_path / "ncu.csv").write_text(NCU)
    sections = tmp_path / "sections.csv"
    sections.write_text("label,seqlens,h_k,h_v,impl\nA,64,2,4,libgdn\nA,64,2,4,fla\n")
    busy = gpu_tables.sections_from_ncu(tmp_path / "ncu.csv", sections)
    assert busy == {("A", "64", "2", "4", "libgdn"): 1100 / 2200, ("A", "64", "2", "4", "fla"): 0.9}
    sections.write_text("label,seqlens,h_k,h_v,impl\nA,64,2,4,libgdn\n")
    with pytest.raises(SystemExit, match="found 2 marker kernels, expected 1"):
        gpu_tables.sections_from_ncu(tmp_path / "ncu.csv", sections)
