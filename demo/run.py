# SPDX-License-Identifier: MIT
"""The demo: a Qwen3.5-architecture model generates from real text, on Transformers' PyTorch path and on libgdn.

    python demo/run.py                                     makes the checkpoint (about 39 M parameters) and runs
    python demo/run.py --model FOLDER --text FILE          the same with a checkpoint of yours

On a GPU where there is one and libgdn has its CUDA backend (--device cpu: not). Each path runs in a process of its
own, so that its peak memory is its own: of the process on a CPU, of PyTorch's tensors on a GPU. Exit codes: 0 ok, 1 the
greedy tokens differ in fp32, 2 wrong input, 3 something is missing here. Needs gdn, torch, transformers, safetensors
and numpy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gdn.cli.console import Console, UsageError

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE.parent / ".demo" / "qwen3_5-tiny"


class ChildError(Exception):
    """A child process that failed; it has said why."""

    def __init__(self, code: int) -> None:
        super().__init__(f"child process ended with code {code}")
        self.code = code if code in (2, 3) else 1


def run_child(command: list[str], total: int, title: str, console: Console) -> None:
    """Runs a child and shows the progress lines that it prints."""
    with (
        console.progress(total, title) as progress,
        subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as child,
    ):
        try:
            shown = 0
            for line in child.stdout or ():
                if not line.startswith("{"):
                    continue
                at = json.loads(line)
                units = {"prefill": at["done"] / max(at["total"], 1), "decode": 1 + at["done"]}.get(at["phase"], 0)
                done = int(units * total / (1 + at["total"])) if at["phase"] == "decode" else int(units)
                count = f" {at['done']}/{at['total']}" if at["total"] else ""
                progress.step(f"{at['phase']}{count}", advance=max(done - shown, 0))
                shown = max(done, shown)
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        raise ChildError(child.returncode)


def make_checkpoint(folder: Path, console: Console, options: list[str]) -> None:
    """Writes the demo's checkpoint unless it is there, made by this same script."""
    script = HERE / "make_checkpoint.py"
    stamp, key = folder / "made_by.txt", script.read_text() + repr(options)
    if stamp.is_file() and stamp.read_text() == key:
        console.line(f"checkpoint: {os.path.relpath(folder)} (made before)")
        return
    console.line(f"checkpoint: writing {os.path.relpath(folder)}")
    run_child([str(script), str(folder), *options], 1, "checkpoint", console)
    stamp.write_text(key)


def run_path(
    path: str, args: argparse.Namespace, folder: Path, out: Path, console: Console
) -> tuple[Any, dict[str, Any]]:
    """One path in its own process. -> (Generation, info)."""
    import numpy as np

    from gdn.cli.model import Generation

    command = [str(HERE / "worker.py"), path, "--model", str(folder), "--text", str(args.text), "--out", str(out)]
    command += ["--tokens", str(args.tokens), "--new-tokens", str(args.new_tokens), "--dtype", args.dtype]
    command += ["--device", args.device] if args.device else []
    run_child(command, args.new_tokens + 1, path, console)
    with np.load(out) as data:
        info = json.loads(str(data["info"]))
        generation = Generation(
            data["tokens"].tolist(), data["logits"], info["prefill"], info["first_token"], info["decode"]
        )
    return generation, info


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.1f} ms"


def _mib(value: float) -> str:
    return f"{value / 2**20:.0f} MiB"


def show(theirs: dict[str, Any], ours: dict[str, Any], result: dict[str, Any], steps: int, console: Console) -> None:
    """The table."""

    def row(name: str, key: str, text: Any, invert: bool = False) -> tuple[str, str, str, str]:
        a, b = theirs[key], ours[key]
        ratio = (b / a if invert else a / b) if a and b else float("nan")
        return name, text(a), text(b), f"{ratio:.2f}x"

    for info in (theirs, ours):
        info["decode_rate"] = (steps - 1) / info["decode"] if info["decode"] else 0.0
        info["above_weights"] = info["peak_memory"] - info["weight_bytes"]
    rows = [
        row("prefill", "prefill", _seconds),
        row("time to first token", "first_token", _seconds),
        row("decode, tokens/s", "decode_rate", lambda x: f"{x:.1f}", invert=True),
        row("peak GPU memory" if ours["gpu"] else "peak memory", "peak_memory", _mib),
        row("  of it above the weights", "above_weights", _mib),
        ("largest logit difference", "", f"{result['max_logit_difference']:.2e}", ""),
        ("logits, relative L2 difference", "", f"{result['logits_rel_l2']:.2e}", ""),
        ("smallest margin of a decision", "", f"{result['smallest_margin']:.2e}", ""),
        ("tokens equal", "", "yes" if result["tokens_equal"] else f"NO, from step {result['first_difference']}", ""),
    ]
    title = (
        f"{ours['model']}, {ours['parameters'] / 1e6:.1f} M parameters, {ours['dtype']}: "
        f"{ours['prompt_tokens']} prompt tokens, "
        f"{steps} greedy tokens ({result['different_tokens']} different)"
    )
    console.table(("", "Transformers (PyTorch)", "libgdn", "ratio"), rows, title)


def parse(argv: list[str] | None) -> argparse.Namespace:
    from gdn.cli.device import add_device_flag
    from gdn.cli.model_check import TEXT

    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="exit codes: 0 ok, 1 tokens differ in fp32, 2 wrong input, 3 not here",
    )
    parser.add_argument("--model", type=Path, default=None, help="checkpoint folder (default: makes one)")
    parser.add_argument(
        "--text", type=Path, default=TEXT, help="text file (default: a chapter's beginning, public domain)"
    )
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="prompt tokens at most (default 4096)")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="greedy tokens (default 64)")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16", "auto"), default="fp32", help="weights (default fp32)"
    )
    add_device_flag(parser)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="where the demo's own checkpoint goes")
    parser.add_argument("--tiny", action="store_true", help="a model of two seconds, for tests")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--plain", action="store_true", help="plain text even where rich is installed")
    args = parser.parse_args(argv)
    if args.new_tokens < 2:
        parser.error(f"argument '--new-tokens': found {args.new_tokens}, expected 2 or more")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    console = Console(json_output=args.json, plain=args.plain)
    begin = time.perf_counter()
    try:
        folder = args.model
        if folder is None:
            folder = args.checkpoint
            make_checkpoint(folder, console, ["--tiny", "--hidden-size", "64"] if args.tiny else [])
        with tempfile.TemporaryDirectory(prefix="gdn-demo-") as scratch:
            expected, theirs = run_path("transformers", args, folder, Path(scratch) / "transformers.npz", console)
            found, ours = run_path("libgdn", args, folder, Path(scratch) / "libgdn.npz", console)
    except UsageError as error:
        console.error(str(error))
        return 2
    except ChildError as error:
        return error.code

    from gdn.cli.model import compare_generations

    result = compare_generations(found, expected)
    fp32 = ours["dtype"] == "float32"
    ok = result["tokens_equal"] or not fp32
    show(theirs, ours, result, args.new_tokens, console)
    where = "" if ours["gpu"] else f" {ours['threads']} threads, libgdn {ours['isa']};"
    console.line(f"device: {ours['device']};{where} tokens: {ours['tokenizer']}")
    console.line("first request of each process; the prefill is the model's forward over the prompt")
    if not result["tokens_equal"]:
        console.line(
            "FAILED: greedy tokens differ in fp32" if fp32 else f"tokens may differ in {ours['dtype']}: not a failure"
        )
    seconds = time.perf_counter() - begin
    console.line(f"whole demo: {seconds:.0f} s")
    console.document({"ok": ok, "seconds": seconds, "transformers": theirs, "libgdn": ours, "comparison": result})
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
