# SPDX-License-Identifier: MIT
"""The demo: what its checkpoint is, its table, and when it fails."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("gdn.torch")

from gdn.cli.model import Generation, compare_generations
from gdn.cli.model_check import TEXT

DEMO = Path(__file__).resolve().parents[2] / "demo"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"demo_{name}", DEMO / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def demo(*args: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEMO / "run.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "checkpoint"


@pytest.fixture(scope="module")
def finished(folder: Path) -> subprocess.CompletedProcess[str]:
    return demo("--tiny", "--checkpoint", folder, "--tokens", 130, "--new-tokens", 6, "--json")


def test_the_text_is_real_and_long_enough() -> None:
    text = TEXT.read_text()
    assert len(text.encode()) >= 4096
    assert len(set(text.split())) > 300


def test_the_architecture_is_qwen3_5() -> None:
    config = load("make_checkpoint").config(512, 4)
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    heads = (config.linear_num_key_heads, config.linear_num_value_heads)
    assert (*heads, config.linear_key_head_dim, config.linear_value_head_dim) == (16, 32, 128, 128)
    assert config.linear_conv_kernel_dim == 4 and config.head_dim == 256 and config.vocab_size == 256
    rope = config.rope_parameters
    assert rope["rope_theta"] == 1e7 and rope["partial_rotary_factor"] == 0.25
    assert rope["mrope_section"] == [11, 11, 10] and rope["mrope_interleaved"] is True


def test_runs_and_reports(finished: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)
    assert result["ok"] and result["comparison"]["tokens_equal"]
    assert result["comparison"]["max_logit_difference"] < 1e-3 < result["comparison"]["smallest_margin"]
    for path in ("transformers", "libgdn"):
        info = result[path]
        assert info["prompt_tokens"] == 130 and info["dtype"] == "float32" and info["model"] == "Qwen3_5ForCausalLM"
        assert 0 < info["prefill"] <= info["first_token"] and info["decode"] > 0
        assert info["peak_memory"] > info["weight_bytes"]
    assert result["transformers"]["calls"] == {}
    assert result["libgdn"]["calls"]["chunk_forward"] == 3 and result["libgdn"]["calls"]["recurrent"] == 3 * 5
    assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
    assert "prefill" in finished.stderr or "libgdn" in finished.stderr or result["seconds"] < 10, "no progress shown"


def test_a_checkpoint_of_ones_own(finished: subprocess.CompletedProcess[str], folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A text of the user's own, shorter than the limit.")
    found = demo("--model", folder, "--text", text, "--new-tokens", 3, "--plain", "--dtype", "bf16")
    assert found.returncode == 0, found.stderr
    assert "bfloat16: 49 prompt tokens, 3 greedy tokens" in found.stdout
    for row in ("prefill", "time to first token", "decode, tokens/s", "peak memory", "largest logit difference"):
        assert row in found.stdout


def stub(module: ModuleType, monkeypatch: pytest.MonkeyPatch, tokens: list[int], dtype: str) -> None:
    """The demo without its child processes: libgdn's path gives `tokens`, Transformers' gives 1, 2, 3."""
    logits = np.eye(3, 8, 1, np.float32)
    info = {"model": "M", "parameters": 1, "dtype": dtype, "prompt_tokens": 4, "weight_bytes": 1, "peak_memory": 2}
    info |= {"prefill": 1.0, "first_token": 1.0, "decode": 1.0, "device": "cpu", "gpu": None, "threads": 1}
    info |= {"isa": "any", "tokenizer": "bytes"}

    def run_path(path: str, *args: Any) -> tuple[Generation, dict[str, Any]]:
        return Generation(tokens if path == "libgdn" else [1, 2, 3], logits, 1.0, 1.0, 1.0), dict(info)

    monkeypatch.setattr(module, "run_path", run_path)


@pytest.mark.parametrize(
    ("tokens", "dtype", "code"),
    [([1, 2, 3], "float32", 0), ([1, 2, 4], "float32", 1), ([1, 2, 4], "bfloat16", 0)],
)
def test_different_tokens_fail_in_fp32_only(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tokens: list[int], dtype: str, code: int
) -> None:
    module = load("run")
    stub(module, monkeypatch, tokens, dtype)
    assert module.main(["--model", "any", "--new-tokens", "3", "--plain"]) == code
    out = capsys.readouterr().out
    assert ("FAILED" in out) == (code == 1)
    assert ("NO, from step 2" in out) == (tokens != [1, 2, 3])


@pytest.mark.parametrize("args", [["--model", "no_such_folder"], ["--new-tokens", "1"], ["--dtype", "int8"]])
def test_wrong_input_is_code_2(args: list[str]) -> None:
    found = demo(*args)
    assert found.returncode == 2 and found.stderr.strip()
    assert "Traceback" not in found.stderr


def test_compare_generations_stops_at_the_first_difference() -> None:
    logits = np.arange(24, dtype=np.float32).reshape(3, 8) ** 1.5
    other = logits.copy()
    other[1] += 0.5
    other[2] += 100  # another history: must not count
    result = compare_generations(Generation([1, 5, 3], other), Generation([1, 2, 3], logits))
    assert not result["tokens_equal"] and result["first_difference"] == 1
    assert result["max_logit_difference"] == pytest.approx(0.5)
    assert result["smallest_margin"] == pytest.approx(7**1.5 - 6**1.5)


def test_peak_memory_is_this_process() -> None:
    # In a process of its own: the peak of this one may lie above what the test allocates.
    code = (
        "import numpy as np; from gdn.cli.model import peak_memory; before = peak_memory(); "
        "block = np.ones(64 << 20, np.uint8); "
        "after = peak_memory(); assert after >= before + block.nbytes // 2, (before, after); "
        "assert 1 << 20 < after < 1 << 40"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
