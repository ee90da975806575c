#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A 9B-shape Qwen3.5 in Transformers on one GPU: PyTorch's own path, libgdn, and FLA where it is importable.

    python bench/gpu_model.py [--out bench/results/h200] [--paths pytorch,libgdn,graph,fla] [--check] [--profile]

Random bf16 weights made on the device from a configuration (nothing is downloaded), sdpa attention. Every path runs in
a process of its own: time to the first token (median of forward passes with a fresh cache, logits of the last token),
greedy decode in ms per token (median, the host waits for every token), peak memory beyond the weights. `graph` is
libgdn with a StaticCache and gdn.hf.graph_decode for the decode steps. --check compares libgdn with PyTorch's path:
greedy tokens of a shallow fp32 model, bf16 logits of it against fp32. libgdn+merged+graph runs them in one process
(merged: enable with merge_projections). --profile lists kernels and, for a decode step, where the host's time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import csv
import functools
import json
import pstats
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from gpu_common import git_commit, today

HEADER = "metric,tokens,path,value,unit,min,max,versions,machine,commit,date".split(",")
LIBGDN = ("libgdn", "merged", "graph")
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}


def build(layers: int, dtype: torch.dtype, vocab: int) -> Any:
    import transformers

    config = transformers.Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=layers,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        max_position_embeddings=262144,
        rope_parameters=ROPE,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"), torch.no_grad():
            model = transformers.Qwen3_5ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.to("cuda", dtype).eval().requires_grad_(False)  # buffers that are made from lists start on the CPU


def prompt(tokens: int, vocab: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (1, tokens), generator=generator).cuda()


def prefill(model: Any, ids: torch.Tensor) -> Any:
    return model(ids, use_cache=True, logits_to_keep=1)


def timed_ms(call: Any) -> tuple[float, Any]:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin), result


class Steps:
    """Greedy decode from a prefilled cache, one forward per call."""

    def __init__(self, model: Any, out: Any, path: str) -> None:
        self.model, self.cache = model, out.past_key_values
        self.token = out.logits[:, -1:].argmax(-1)
        self.step, self.path = model, path
        if path == "graph":
            from gdn import hf

            self.step = hf.graph_decode(model)

    def __call__(self) -> torch.Tensor:
        if self.path == "graph":
            logits = self.step(self.token, self.cache)
        else:
            logits = self.step(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits
        self.token = logits[:, -1:].argmax(-1)
        return self.token


def static_prefill(model: Any, ids: torch.Tensor, room: int) -> Any:
    import transformers

    cache = transformers.StaticCache(config=model.config, max_cache_len=ids.shape[1] + room)
    return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


def enable(model: Any, path: str) -> str:
    """Turns the path on; its versions."""
    import transformers

    versions = f"torch {torch.__version__} transformers {transformers.__version__}"
    if path in LIBGDN:
        import gdn

        gdn.hf.disable(model)
        gdn.hf.enable(model, merge_projections=path == "merged")
        return f"libgdn {gdn.__version__} {versions}"
    if path == "fla":
        import fla

        modeling = sys.modules[type(model).__module__]
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

        modeling.torch_chunk_gated_delta_rule = chunk_gated_delta_rule
        modeling.torch_recurrent_gated_delta_rule = fused_recurrent_gated_delta_rule
        return f"fla {fla.__version__} {versions}"
    return versions


def measure(args: argparse.Namespace, path: str, model: Any) -> list[dict[str, Any]]:
    vocab = args.vocab
    versions = enable(model, path)
    weights = torch.cuda.memory_allocated()
    rows: list[dict[str, Any]] = []

    def add(metric: str, tokens: int, values: list[float], unit: str) -> None:
        rows.append(
            {
                "metric": metric, "tokens": tokens, "path": path, "value": round(statistics.median(values), 2),
                "unit": unit, "min": round(min(values), 2), "max": round(max(values), 2), "versions": versions,
            }
        )  # fmt: skip

    run = prefill if path != "graph" else lambda m, ids: static_prefill(m, ids, 2 * args.new_tokens)
    for tokens in args.prompts:
        ids = prompt(tokens, vocab)
        out = run(model, ids)
        reps = 5 if tokens <= 8192 and path != "pytorch" else 3
        out = None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(reps):
            elapsed, out = timed_ms(lambda i=ids: run(model, i))
            times.append(elapsed)
            if len(times) < reps:
                out = None
        add("first token", tokens, times, "ms")
        add("peak extra memory", tokens, [(torch.cuda.max_memory_allocated() - weights) / 2**20], "MiB")
        if tokens == args.context:
            steps = Steps(model, out, path)
            for _ in range(3):
                steps()
            add("decode", tokens, [timed_ms(steps)[0] for _ in range(args.new_tokens)], "ms/token")
            steps = None
        out = None
    if args.profile:
        profile(args, path, model)
    return rows


def profile(args: argparse.Namespace, path: str, model: Any) -> None:
    """Which kernels run, how often, how much of the time the GPU works; for a decode step also what the host does."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    for tokens in (*args.prompts, 1) if path != "graph" else (1,):
        if tokens > 1:
            call = functools.partial(prefill, model, prompt(tokens, args.vocab))
        else:
            start = prefill if path != "graph" else lambda m, ids: static_prefill(m, ids, 64)
            call = Steps(model, start(model, prompt(args.context, args.vocab)), path)
        call()
        call()
        wall, _ = timed_ms(call)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        host = 1e3 * (time.perf_counter() - begin)
        with profiler(activities=[ProfilerActivity.CUDA]) as prof:
            call()
            torch.cuda.synchronize()
        times: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for event in prof.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                times[event.name] += event.device_time
                counts[event.name] += 1
        busy = sum(times.values()) / 1e3
        print(
            f"-- {path}, {tokens} tokens: {wall:.2f} ms, host {host:.2f} ms, GPU busy {busy:.2f} ms in "
            f"{sum(counts.values())} kernels and copies",
            file=sys.stderr,
        )
        for name, us in times.most_common(args.top):
            print(f"   {us / 1e3:9.3f} ms {counts[name]:5d} x {name[:120]}", file=sys.stderr)
        if tokens == 1:
            host_profile = cProfile.Profile()
            host_profile.runcall(call)
            pstats.Stats(host_profile, stream=sys.stderr).sort_stats("tottime").print_stats(args.top)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check() -> int:
    """Greedy tokens of a shallow fp32 model, prefill and decode logits of it in bf16 against fp32."""
    import gdn

    torch.backends.cuda.matmul.allow_tf32 = False
    vocab, new = 4096, 24
    model, ids = build(4, torch.float32, vocab), prompt(700, vocab)
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    exact = model(ids).logits
    want = model.generate(ids, **options)
    gdn.hf.enable(model)
    fp32 = relative(model(ids).logits, exact)
    equal = torch.equal(model.generate(ids, **options), want)
    gdn.hf.disable(model)
    model.to(torch.bfloat16)
    errors = []
    for on in (False, True):
        if on:
            gdn.hf.enable(model)
        out = model(ids[:, :-8], use_cache=True)
        parts = [out.logits]
        for i in range(8):
            parts.append(model(ids[:, i - 8 : (i - 7) or None], past_key_values=out.past_key_values).logits)
        errors.append(relative(torch.cat(parts, 1), exact))
    theirs, ours = errors
    ok = equal and fp32 < 1e-4 and ours <= 1.1 * theirs
    print(
        f"check: fp32 greedy tokens equal: {equal}, fp32 logits {fp32:.1e} apart; bf16 logits to fp32: "
        f"PyTorch {theirs:.2e}, libgdn {ours:.2e}: {'ok' if ok else 'WRONG'}",
        flush=True,
    )
    return 0 if ok else 1


def table(rows: list[dict[str, Any]]) -> None:
    paths = list(dict.fromkeys(row["path"] for row in rows))
    print("| | " + " | ".join(paths) + " |\n|---|" + "---:|" * len(paths))
    for metric, tokens, unit in dict.fromkeys((r["metric"], r["tokens"], r["unit"]) for r in rows):
        values = {r["path"]: r["value"] for r in rows if (r["metric"], r["tokens"]) == (metric, tokens)}
        print(f"| {metric}, {tokens} tokens ({unit}) | " + " | ".join(str(values.get(p, "-")) for p in paths) + " |")


def write(path: Path, rows: list[dict[str, Any]], commit: str) -> None:
    """Rows of this run replace those of the same measurement; others stay."""
    kept: dict[tuple[str, ...], dict[str, Any]] = {}
    if path.exists():
        with path.open(newline="") as f:
            kept = {(r["metric"], r["tokens"], r["path"]): r for r in csv.DictReader(f)}
    for row in rows:
        row |= {"machine": torch.cuda.get_device_name(), "commit": commit, "date": today()}
        kept[row["metric"], str(row["tokens"]), row["path"]] = row
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, HEADER, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept.values())


def child(args: argparse.Namespace, path: str) -> list[dict[str, Any]]:
    """One path in a process of its own: its memory and its patches end with it."""
    command = [sys.executable, __file__, "--child", "measure", "--paths", path, "--layers", args.layers]
    command += ["--vocab", args.vocab, "--context", args.context, "--new-tokens", args.new_tokens, "--top", args.top]
    command += ["--prompts", *args.prompts] + ["--profile"] * args.profile
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout + f"{path}: failed ({done.returncode})", flush=True)
        return []
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, help="folder for model.csv")
    p.add_argument("--paths", default="pytorch,libgdn")
    p.add_argument("--prompts", type=int, nargs="+", default=[4096, 32768])
    p.add_argument("--context", type=int, default=4096, help="prompt length that decode continues")
    p.add_argument("--new-tokens", type=int, default=40)
    p.add_argument("--layers", type=int, default=32)
    p.add_argument("--vocab", type=int, default=248320)
    p.add_argument("--check", action="store_true")
    p.add_argument("--profile", action="store_true")
    p.add_argument("--top", type=int, default=24, help="kernels that --profile lists")
    p.add_argument("--commit", default=git_commit())
    p.add_argument("--child", choices=["measure", "check"], help=argparse.SUPPRESS)
    args = p.parse_args()
    with torch.no_grad():
        if args.child == "check":
            return check()
        if args.child == "measure":
            model, rows = build(args.layers, torch.bfloat16, args.vocab), []
            for path in args.paths.split("+"):
                rows += measure(args, path, model)
            print(json.dumps(rows))
            return 0
    failed = subprocess.call([sys.executable, __file__, "--child", "check"]) if args.check else 0
    rows: list[dict[str, Any]] = []
    for path in filter(None, args.paths.split(",")):
        rows += child(args, path)
    if rows:
        table(rows)
        if args.out:
            write(args.out / "model.csv", rows, args.commit)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
