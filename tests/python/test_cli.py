# SPDX-License-Identifier: MIT
"""The gdn command: results, exit codes (0 ok, 1 failed, 2 usage, 3 not here), and that its checks can fail."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gdn
from gdn import _capi
from gdn.cli import bench, check, main, oracle
from gdn.cli.calls import integers
from gdn.cli.cases import draw, load
from gdn.cli.compare import compare
from gdn.cli.console import UsageError

REPOSITORY = Path(__file__).resolve().parents[2]


def run(capsys: Any, *args: Any) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of one command, in this process."""
    code = main([str(a) for a in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: Any, *args: Any) -> tuple[int, Any]:
    code, out, _ = run(capsys, *args, "--json")
    return code, json.loads(out)


# ---- usage


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nonsense"],
        ["info", "--nonsense"],
        ["plan", "--op", "nonsense"],
        ["plan", "--dtype", "int8"],
        ["plan", "-K", "many"],
        ["plan", "--hk", "3", "--hv", "32"],
        ["plan", "--impl", "nonsense"],
        ["plan", "--seqlens", "7,x"],
        ["plan", "--seqlens", "7,-9"],
        ["plan", "--seqlens", "7,9", "-B", "2"],
        ["plan", "--seqlens", "7,9", "-T", "15"],
        ["plan", "--isa", "nonsense"],
        ["plan", "--threads", "-1"],
        ["bench", "--preset", "quick", "-T", "64"],
        ["bench", "--preset", "prefill", "--op", "gate"],
        ["bench", "--op", "gate", "--seqlens", "7,9"],
        ["bench", "--seconds", "0"],
        ["bench", "--hv", "0"],
        ["verify", "only_one.npz"],
        ["verify", "missing_a.npz", "missing_b.npz"],
        ["verify", "--tol", "-1"],
        ["verify", "--filter", "no_such_case"],
        ["verify", "--cases", "no_such_file.json"],
        ["verify", "--model", "no_such_folder"],
        ["verify", "a.npz", "b.npz", "--model", "folder"],
    ],
)
def test_bad_usage_is_code_2_with_a_message(capsys: Any, args: list[str]) -> None:
    code, out, err = run(capsys, *args)
    assert code == 2
    assert (err or out).strip(), "no message"
    assert "Traceback" not in err


@pytest.mark.parametrize("command", [(), ("info",), ("plan",), ("bench",), ("verify",)])
def test_help_everywhere(capsys: Any, command: tuple[str, ...]) -> None:
    code, out, _ = run(capsys, *command, "--help")
    assert code == 0
    assert "usage: gdn" in out


def test_as_a_program() -> None:
    def program(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "gdn.cli", *args], capture_output=True, text=True, check=False)

    version = program("--version")
    assert version.returncode == 0 and version.stdout.split() == ["gdn", gdn.version()]
    capped = program("plan", "--isa", gdn.info()["isa"]["usable"][0], "--json")
    assert capped.returncode == 0, capped.stderr
    refused = program("plan", "--impl", "nonsense")
    assert refused.returncode == 2 and "argument 'impl': found 'nonsense'" in refused.stderr


def test_a_missing_package_is_code_3(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    code, _, err = run(capsys, "verify")
    assert code == 3 and "needs the package numpy" in err


def test_integers() -> None:
    assert integers("7, 9,2x5") == [7, 9, 5, 5]
    for text in ("", "7,", "x5", "1x2x3", "-1x3", "1.5"):
        with pytest.raises(UsageError, match="--seqlens"):
            integers(text if text != "x5" else "ax5")


# ---- info and plan


def test_info(capsys: Any) -> None:
    code, found = run_json(capsys, "info")
    assert code == 0
    assert found["version"] == gdn.version() and found["isa"]["active"] == gdn.get_isa()
    assert found["packages"]["numpy"] == np.__version__
    code, out, _ = run(capsys, "info", "--peak")
    assert code == 0
    for text in (gdn.version(), found["cpu"], "ISA in use", "GFLOP/s, measured now"):
        assert text in out


def test_plan(capsys: Any) -> None:
    code, plan = run_json(capsys, "plan", "--seqlens", "7,9,3x4", "--hk", 2, "--hv", 4)
    assert code == 0
    assert plan["op"] == "chunk_forward"
    assert plan["problem"]["sequences"] == 5 and plan["problem"]["longest_sequence"] == 9
    code, plan = run_json(capsys, "plan", "--op", "recurrent", "-B", 3, "--state-layout", "v_first", "-K", 64, "-V", 32)
    assert code == 0
    assert plan["problem"]["sequences"] == 3 and plan["problem"]["value_dim"] == 32
    code, out, _ = run(capsys, "plan", "--explain")
    assert code == 0 and "reference_fp64" in out and "accepts" in out


def test_plan_says_why_it_refuses(capsys: Any) -> None:
    _, plan = run_json(capsys, "plan")
    code, out, err = run(capsys, "plan", "--dtype", "fp64", "--impl", plan["candidates"][-2]["impl"], "--explain")
    assert plan["candidates"][-2]["impl"] == "reference_fp32"
    assert code == 3
    assert "takes no F64 tensors" in out and "takes no F64 tensors" in err


# ---- bench

TINY = ("--hk", 1, "--hv", 2, "-K", 16, "-V", 16, "--reps", 2, "--warm-cache")


def test_bench_records(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "records.csv"
    code, result = run_json(capsys, "bench", "--preset", "quick", *TINY, "--csv", path)
    assert code == 0
    assert {r["op"] for r in result["records"]} == set(bench.OPERATORS)
    for record in result["records"]:
        assert 0 < record["min_us"] <= record["median_us"] <= record["max_us"]
        assert record["gb_per_s"] > 0 and record["us_per_token_head"] > 0
        assert (record["gflops"] > 0) == (record["op"] in ("chunk_forward", "recurrent"))
        assert record["samples"] == 2
    assert result["peak"]["fma_gflops"] > 0 and result["peak"]["copy_gb_per_s"] > 0
    assert run(capsys, "bench", "--op", "chunk", "--seqlens", "3,5", *TINY, "--csv", path)[0] == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == (
        "op,label,seqlens,h_k,h_v,dtype,impl,version,median_us,min_us,max_us,commit,date".split(",")
    )
    assert len(rows) == len(bench.OPERATORS) + 1, "the second run must append without a second header"
    assert rows[-1]["seqlens"] == "3+5" and rows[-1]["impl"] == "libgdn" and rows[-1]["dtype"] == "fp32/fp32"


def test_bench_counts_the_work(capsys: Any) -> None:
    _, result = run_json(capsys, "bench", "--op", "chunk", "-T", 64, *TINY)
    (record,) = result["records"]
    flop = 6 * 16 * 16 * 64 * 2
    assert record["gflops"] == pytest.approx(flop / (record["median_us"] * 1e-6) / 1e9, rel=1e-3)
    assert record["us_per_token_head"] == pytest.approx(record["median_us"] / 128, rel=1e-3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_bench_16_bit(capsys: Any, dtype: str) -> None:
    code, result = run_json(capsys, "bench", "--preset", "quick", "--dtype", dtype, "--state-dtype", "bf16", *TINY)
    assert code == 0
    assert result["records"][0]["dtype"] == f"{dtype}/bf16"


def test_measure_rotates_over_the_buffers() -> None:
    count = [0, 0, 0]

    def call(i: int) -> None:
        count[i] += 1

    samples = bench.measure([lambda i=i: call(i) for i in range(3)], 0.01, 5)
    assert len(samples) == 5 and all(s > 0 for s in samples)
    assert max(count) - min(count) <= 1


# ---- verify: cases


def one_case_per_class() -> list[str]:
    cases, _ = load()
    first = {c["class"]: c.id for c in reversed(cases) if not c.slow and c.Hv <= 4 and c.T * c.K * c.V <= 1 << 21}
    return sorted(first.values())


@pytest.mark.parametrize("case_id", one_case_per_class())
def test_verify_cases(capsys: Any, case_id: str) -> None:
    code, result = run_json(capsys, "verify", "--filter", case_id, "--independent")
    assert code == 0, result
    assert result["ok"] and result["results"]
    for row in result["results"]:
        assert row["case"] == case_id and row["errors"]


def test_every_class_is_sampled() -> None:
    cases, contracts = load()
    assert len(cases) > 100 and len(contracts) >= 5
    assert len(one_case_per_class()) == len({c["class"] for c in cases})
    ids = [c.id for c in cases]
    assert len(set(ids)) == len(ids)


def test_verify_fails_on_a_breach(capsys: Any, tmp_path: Path) -> None:
    document = json.loads((Path(gdn.__file__).parent / "data" / "cases.json").read_text())
    document["contracts"]["fp32"] = {"o": 1e-12, "state": 1e-12}
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(document))
    code, out, _ = run(capsys, "verify", "--cases", path, "--filter", "len_64")
    assert code == 1
    assert "FAILED len_64" in out and "worst at" in out and "0 of 2 runs" in out


@pytest.mark.parametrize("damage", ["value", "nan", "stray"])
def test_verify_sees_damage(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    case = next(c for c in load()[0] if c.id == "pool_two_tensors")
    invoke = check._invoke

    def damaged(call: Any, op: str, device: int | None = None) -> None:
        invoke(call, op, device)
        final = call.outputs["final"]
        if final.dtype == np.float32:  # the fast path's, not the oracle's
            slot = 4 if damage != "stray" else 5  # slot 5 is nobody's
            final[slot, 0, 0, 0] = np.nan if damage == "nan" else 3.0

    monkeypatch.setattr(check, "_invoke", damaged)
    result = check.run_case(case, draw(case), "recurrent", load()[1])
    assert any("leave alone" in p if damage == "stray" else "relative L2" in p for p in result.problems)


def test_independent_sees_a_wrong_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in load()[0] if c.id == "len_65")
    recurrence = oracle.recurrence
    monkeypatch.setattr(oracle, "recurrence", lambda *a: {k: v * 1.0001 for k, v in recurrence(*a).items()})
    result = check.run_case(case, draw(case), "chunk_forward", load()[1], independent=True)
    assert any("NumPy recurrence" in p for p in result.problems)


def test_verify_one_implementation(capsys: Any) -> None:
    code, result = run_json(capsys, "verify", "--filter", "len_6?", "--impl", "reference_fp32")
    assert code == 0 and {r["impl"] for r in result["results"]} == {"reference_fp32"}
    code, out, _ = run(capsys, "verify", "--filter", "len_6?", "--op", "recurrent", "-v")
    assert code == 0 and out.count("recurrent_") + out.count("reference") >= 3
    code, _, err = run(capsys, "verify", "--filter", "len_1", "--impl", "nonsense")
    assert code == 2 and "nonsense" in err


def test_verify_list(capsys: Any) -> None:
    code, out, _ = run(capsys, "verify", "--list", "--filter", "gate")
    assert code == 0 and "gate_strong_27" in out and "len_64" not in out


# ---- verify: files


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "o": rng.standard_normal((2, 5, 3)).astype(np.float32),
        "state": rng.standard_normal((4, 4)),
        "n": np.arange(3),
    }


def save(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        from safetensors.numpy import save_file

        save_file(arrays, str(path))
    return path


@pytest.mark.parametrize("suffixes", [(".npz", ".npz"), (".safetensors", ".safetensors"), (".npz", ".safetensors")])
def test_compare_files(capsys: Any, tmp_path: Path, arrays: dict[str, np.ndarray], suffixes: tuple[str, str]) -> None:
    a, b = (save(tmp_path / f"{name}{s}", arrays) for name, s in zip("ab", suffixes, strict=True))
    code, result = run_json(capsys, "verify", a, b, "--tol", "0")
    assert code == 0 and result["ok"] and len(result["tensors"]) == 3
    other = {**arrays, "o": arrays["o"] * np.float32(1.01)}
    c = save(tmp_path / f"c{suffixes[1]}", other)
    code, out, _ = run(capsys, "verify", c, b, "--tol", "0.001")
    assert code == 1 and "2 of 3 tensors" in out and "relative L2 above 0.001" in out
    assert run(capsys, "verify", c, b, "--tol", "0.02")[0] == 0


def test_compare_bf16_safetensors(capsys: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    save_file({"x": x}, str(tmp_path / "a.safetensors"))
    save_file({"x": x.bfloat16()}, str(tmp_path / "b.safetensors"))
    code, result = run_json(capsys, "verify", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--tol", "0.01")
    assert code == 0
    assert 1e-4 < result["tensors"][0]["rel_l2"] < 4e-3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda a: {**a, "extra": a["o"]}, "only in A"),
        (lambda a: {k: v for k, v in a.items() if k != "o"}, "only in B"),
        (lambda a: {**a, "o": a["o"][:1]}, "shapes"),
        (lambda a: {**a, "o": np.where(np.arange(3) == 1, np.nan, a["o"])}, "NaN in"),
        (lambda a: {**a, "o": np.where(np.arange(3) == 1, np.inf, a["o"])}, "infinities"),
        (lambda a: {**a, "n": np.array(["a", "b", "c"])}, "not numbers"),
        (lambda a: {**a, "n": a["n"] * 0 + 1}, "relative L2"),
    ],
)
def test_compare_finds(arrays: dict[str, np.ndarray], change: Any, problem: str) -> None:
    rows = compare(change(arrays), arrays, 1e-3)
    (found,) = [row["problem"] for row in rows if row["problem"]]
    assert problem in found


def test_compare_equal_nan_and_zeros() -> None:
    x = np.array([1.0, np.nan, np.inf, 0.0])
    (row,) = compare({"x": x}, {"x": x.copy()}, 0.0)
    assert row["problem"] is None and row["nan"] == 1
    (row,) = compare({"x": np.ones(2)}, {"x": np.zeros(2)}, 1e-3)
    assert row["problem"] and row["rel_l2"] == np.inf


@pytest.mark.parametrize("name", ["damaged.npz", "damaged.safetensors", "wrong.txt"])
def test_compare_unreadable_is_code_2(capsys: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not a file of tensors at all")
    code, _, err = run(capsys, "verify", tmp_path / name, tmp_path / name)
    assert code == 2 and name in err


# ---- verify: a model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    pytest.importorskip("gdn.torch")
    spec = importlib.util.spec_from_file_location("make_checkpoint", REPOSITORY / "demo" / "make_checkpoint.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("checkpoint")
    assert module.main([str(folder), "--tiny", "--hidden-size", "64"]) == 0
    return folder


SHORT = ("--tokens", 70, "--new-tokens", 4)


def test_verify_model(capsys: Any, checkpoint: Path) -> None:
    code, result = run_json(capsys, "verify", "--model", checkpoint, *SHORT)
    assert code == 0, result
    assert len(result["layers"]) == 3
    assert all(0 < row["layer"] < 1e-5 and 0 < row["in_model"] < 1e-5 for row in result["layers"])
    assert result["logits"]["rel_l2"] < 1e-5 and result["generation"]["tokens_equal"]
    assert result["calls_on_libgdn"]["chunk_forward"] >= 3 and result["calls_on_libgdn"]["recurrent"] >= 3


def test_verify_model_breach(capsys: Any, checkpoint: Path) -> None:
    code, out, _ = run(capsys, "verify", "--model", checkpoint, "--tol", "1e-12", *SHORT)
    assert code == 1 and "FAILED logits" in out and "FAILED model.layers.0" in out


def test_verify_model_sees_a_wrong_layer(capsys: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gdn.cli import model_check

    enable = model_check.models.enable

    def damaged(model: Any) -> None:
        enable(model)
        model.get_submodule("model.layers.1.linear_attn").register_forward_hook(lambda m, a, out: out * 1.01)

    monkeypatch.setattr(model_check.models, "enable", damaged)
    code, result = run_json(capsys, "verify", "--model", checkpoint, *SHORT)
    assert code == 1
    assert [row["layer"] > 1e-3 for row in result["layers"]] == [False, True, False]
    assert result["layers"][2]["in_model"] > 1e-3, "the error must be seen downstream"


def test_verify_model_void_without_libgdn(capsys: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gdn.cli import model_check

    monkeypatch.setattr(model_check.models, "enable", lambda model: None)
    code, _, err = run(capsys, "verify", "--model", checkpoint, *SHORT)
    assert code == 1 and "took no effect" in err


def test_verify_model_bad_folders(capsys: Any, checkpoint: Path, tmp_path: Path) -> None:
    code, _, err = run(capsys, "verify", "--model", tmp_path)
    assert code == 2 and "config.json" in err
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    code, _, err = run(capsys, "verify", "--model", tmp_path)
    assert code == 2 and "no weights" in err
    from safetensors.numpy import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.0.linear_attn.A_log"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    code, _, err = run(capsys, "verify", "--model", tmp_path)
    assert code == 2 and "A_log" in err
    code, _, err = run(capsys, "verify", "--model", checkpoint, "--text", tmp_path / "none.txt")
    assert code == 2 and "none.txt" in err


def test_verify_model_multimodal(capsys: Any, checkpoint: Path, tmp_path: Path) -> None:
    """The text part of a vision-language checkpoint."""
    from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = json.loads((checkpoint / "config.json").read_text())
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"model_type": "qwen3_5_vision", "num_position_embeddings": 16}
    ids = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision, **ids))
    model.save_pretrained(tmp_path)
    code, result = run_json(capsys, "verify", "--model", tmp_path, *SHORT)
    assert code == 0, result
    assert len(result["layers"]) == 3 and result["logits"]["rel_l2"] < 1e-5


def test_verify_model_without_gdn_layers(capsys: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads)).save_pretrained(tmp_path)
    code, _, err = run(capsys, "verify", "--model", tmp_path, *SHORT)
    assert code == 2 and "no Gated DeltaNet layer" in err


def test_device_flag(capsys: Any) -> None:
    """--device names what it cannot have; a build without its CUDA backend says so."""
    for command in ("plan", "bench", "verify"):
        assert main([command, "--device", "gpu"]) == 2
        assert "argument '--device': found 'gpu', expected cpu, cuda or cuda:N" in capsys.readouterr().err
    assert main(["plan", "--device", "cpu"]) == 0
    capsys.readouterr()
    for command in ("bench", "verify"):
        assert main([command, "--device", "cuda:63"]) == 3
        err = capsys.readouterr().err
        assert ("no CUDA backend" if not _capi.has_cuda() else "expected device 63") in err
