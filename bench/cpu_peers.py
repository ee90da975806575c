# SPDX-License-Identifier: MIT
"""libgdn against ggml and Transformers' fallback on the CPU: same process, same data, runs taken in turns.

    python bench/cpu_peers.py [--quick] [--threads 2] [--out bench/results]

builds ggml from the llama-cpp-python sdist on first use. Without a network: --gdn-lib, --ggml-lib (repeatable) and
--fma-peak name what was built elsewhere. Results that disagree end the run with exit code 1.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "python")]
HEADER = "op,label,seqlens,h_k,h_v,dtype,impl,version,median_us,min_us,max_us,commit,date".split(",")
D = 128


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gdn-lib", help="libgdn.so (default: the installed package's, or GDN_LIBRARY)")
    p.add_argument(
        "--ggml-lib",
        action="append",
        default=[],
        help="libggml_peer_*.so or a folder of them; the fastest usable one counts",
    )
    p.add_argument("--ggml-sdist", help="llama-cpp-python sdist that is already here")
    p.add_argument("--no-ggml", action="store_true")
    p.add_argument("--no-transformers", action="store_true")
    p.add_argument("--fma-peak", help="built bench/cpp/fma_peak.cpp")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--reps", type=int, default=9)
    p.add_argument("--parts", default="peak,prefill,flat,decode,head,memory")
    p.add_argument("--machine", help="name of the results folder (default: from the CPU)")
    p.add_argument("--out", default=str(ROOT / "bench" / "results"))
    p.add_argument("--commit", help="commit of the measured library (default: git's)")
    p.add_argument("--quick", action="store_true", help="small sizes: shows that everything runs; figures mean nothing")
    p.add_argument("--build-only", action="store_true", help="build ggml and fma_peak, print their paths, stop")
    p.add_argument("--memory-child", help=argparse.SUPPRESS)
    return p.parse_args()


ARGS = parse()
os.environ["OMP_NUM_THREADS"] = os.environ["GDN_NUM_THREADS"] = str(ARGS.threads)
if ARGS.gdn_lib:
    os.environ["GDN_LIBRARY"] = str(Path(ARGS.gdn_lib).resolve())

import numpy as np  # noqa: E402 (thread counts are read at import)

from peers import GdnCall, Ggml, GgmlCall, build_fma_peak, build_ggml, cpu_flags  # noqa: E402

rows: list[list[Any]] = []
facts: list[list[str]] = []
failures: list[str] = []


def fact(name: str, value: Any, unit: str = "") -> None:
    facts.append([name, str(value), unit])
    print(f"  {name}: {value} {unit}", flush=True)


def commit() -> str:
    if ARGS.commit:
        return ARGS.commit
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def machine() -> str:
    """Short name such as amd-epyc-7b13-2c."""
    if ARGS.machine:
        return ARGS.machine
    name = next(
        (s.split(":", 1)[1] for s in Path("/proc/cpuinfo").read_text().splitlines() if s.startswith("model name")), ""
    )
    name = re.sub(r"\(.*?\)|@.*|\b(cpu|processor|\d+-core)\b", " ", (name or platform.machine()).lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-") + f"-{os.cpu_count()}c"


def inputs(n: int, t: int, hk: int, hv: int, dtype: str = "f32", seed: int = 0) -> dict[str, np.ndarray]:
    """q, k unit; v N(0,1); g = logsigmoid(N)/16 with a quarter of the heads 0; beta = sigmoid(N). g, beta fp32."""
    import ml_dtypes

    rng = np.random.default_rng(seed)
    kind = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}[dtype]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    def unit(*shape: int) -> np.ndarray:
        x = normal(*shape)
        x /= np.sqrt((x * x).sum(-1, keepdims=True))
        return x.astype(kind)

    g = (-np.log1p(np.exp(-normal(n, t, hv))) / 16).astype(np.float32)
    g[:, :, rng.permutation(hv)[: hv // 4]] = 0
    beta = (1 / (1 + np.exp(-normal(n, t, hv)))).astype(np.float32)
    return {"q": unit(n, t, hk, D), "k": unit(n, t, hk, D), "v": normal(n, t, hv, D).astype(kind), "g": g, "beta": beta}


class Contender:
    """What is timed: run() `calls` times; settle() before others are measured."""

    def __init__(
        self, name: str, version: str, dtype: str, run: Callable[[], None], settle: Callable[[], None] | None = None
    ) -> None:
        self.name, self.version, self.dtype, self.run, self.settle = name, version, dtype, run, settle
        self.seconds: list[float] = []


def measure(contenders: list[Contender], reps: int, calls: int = 1) -> None:
    """Runs taken in turns: round by round every contender once, one untimed call first (wakes its threads)."""
    for rep in range(reps):
        order = contenders if rep % 2 == 0 else contenders[::-1]
        for c in order:
            c.run()
            begin = time.perf_counter()
            for _ in range(calls):
                c.run()
            c.seconds.append((time.perf_counter() - begin) / calls)
            if c.settle:
                c.settle()
            time.sleep(0.02)  # pools that poll fall asleep


def record(op: str, label: str, seqlens: str, hk: int, hv: int, contenders: list[Contender], per: float = 1.0) -> None:
    """One row each; times are divided by `per`."""
    for c in contenders:
        us = sorted(1e6 * s / per for s in c.seconds)
        median = statistics.median(us)
        date = datetime.date.today().isoformat()
        rows.append(
            [
                op,
                label,
                seqlens,
                hk,
                hv,
                c.dtype,
                c.name,
                c.version,
                f"{median:.3f}",
                f"{us[0]:.3f}",
                f"{us[-1]:.3f}",
                commit(),
                date,
            ]
        )
        print(f"  {label:28s} {c.name:24s} {c.dtype:10s} {median:14.2f} us  [{us[0]:.2f}, {us[-1]:.2f}]", flush=True)


def compare(what: str, ours: np.ndarray, theirs: np.ndarray, bound: float) -> None:
    """Results of two implementations on the same data."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    error = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    print(f"  {what}: relative distance {error:.2e} (bound {bound:.0e})", flush=True)
    if not error <= bound:
        failures.append(f"{what}: {error:.2e} > {bound:.0e}")


def gdn_version(capi: Any, call: GdnCall) -> str:
    return f"{capi.version()} {call.plan['impl']}"


def pick_ggml() -> Ggml | None:
    """The fastest usable build of ggml on this CPU."""
    if ARGS.no_ggml:
        return None
    flags = cpu_flags()
    isas = [isa for isa, flag in (("avx2", "avx2"), ("avx512", "avx512f")) if flag in flags]
    paths: list[Path] = []
    for given in map(Path, ARGS.ggml_lib):
        paths += sorted(given.glob("**/libggml_peer_*.so")) if given.is_dir() else [given]
    paths = paths or build_ggml(ARGS.ggml_sdist, isas or ["native"])
    best, best_seconds = None, float("inf")
    x, state = inputs(1, 256, 16, 32), np.zeros((1, 32, D, D), np.float32)
    for path in paths:
        if "avx512" in path.name and "avx512f" not in flags:
            continue
        ggml = Ggml(path.resolve())
        call = GgmlCall(ggml, ARGS.threads, x, [state])
        trial = Contender("ggml", ggml.isa, "fp32/fp32", call.run, call.pause)
        measure([trial], 3)
        print(f"ggml {ggml.isa}: {1e6 * min(trial.seconds) / 256 / 32:.2f} us per token and head")
        if min(trial.seconds) < best_seconds:
            best, best_seconds = ggml, min(trial.seconds)
        call.close()
    return best


def part_peak(capi: Any) -> None:
    """Ceilings, measured by a program of its own and by the library."""
    binary = ARGS.fma_peak or str(build_fma_peak())
    for threads in sorted({1, ARGS.threads}):
        out = subprocess.run([binary, str(threads)], capture_output=True, text=True, check=True).stdout
        for name, value, unit in (line.split() for line in out.splitlines()):
            fact(f"{name}_{threads}t", value, unit)
    gflops, copy = capi.measure_peak(ARGS.threads)
    fact(f"gdn_measure_peak_{capi.get_isa()}_{ARGS.threads}t", f"{gflops:.1f}", "GFLOP/s")
    fact(f"gdn_measure_copy_{ARGS.threads}t", f"{copy:.2f}", "GB/s")


def fma_ceiling(isa: str) -> float:
    """GFLOP/s of the independent measurement for an implementation's instruction set."""
    wanted = "fma_avx512" if isa in ("avx512", "amx") else "fma_avx2"
    return next((float(v) for n, v, _ in facts if n == f"{wanted}_{ARGS.threads}t"), float("nan"))


def ours_by_impl(capi: Any, op: str, x: dict[str, np.ndarray], state: np.ndarray, **kw: Any) -> list[GdnCall]:
    """The default choice, then every other SIMD implementation that accepts the call."""
    calls = [GdnCall(capi, op, ARGS.threads, x, state, **kw)]
    for candidate in calls[0].plan["candidates"]:
        name = candidate["impl"]
        if candidate["accepted"] and name != calls[0].plan["impl"] and not re.search("reference|baseline", name):
            calls.append(GdnCall(capi, op, ARGS.threads, x, state, impl=name, **kw))
    return calls


def transformers_call(
    op: str, x: dict[str, np.ndarray], state: np.ndarray
) -> tuple[Callable[[], None], list[Any], str]:
    """torch_chunk / torch_recurrent of modeling_qwen3_5 on the same memory (grouped heads, K-first)."""
    import ml_dtypes
    import torch
    import transformers
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    torch.set_num_threads(ARGS.threads)
    name = "torch_chunk_gated_delta_rule" if op == "chunk_forward" else "torch_recurrent_gated_delta_rule"
    function = getattr(qwen, name)

    def tensor(a: np.ndarray) -> torch.Tensor:
        if a.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(a)

    t = {k: tensor(v) for k, v in x.items()}
    s = tensor(state)
    result: list[Any] = [None, None]

    def run() -> None:
        with torch.inference_mode():
            result[:] = function(
                t["q"], t["k"], t["v"], g=t["g"], beta=t["beta"], initial_state=s, output_final_state=True
            )

    try:
        run()
    except RuntimeError:  # releases up to 5.17: the layer repeats q and k for the value heads, outside what is timed
        group = t["v"].shape[2] // t["q"].shape[2]
        t |= {k: t[k].repeat_interleave(group, dim=2) for k in ("q", "k")}
    return run, result, f"{transformers.__version__} torch {torch.__version__}"


def part_prefill(capi: Any, ggml: Ggml | None) -> None:
    t, hk, hv = (256 if ARGS.quick else 4096), 16, 32
    share = []
    beside_bf16 = None  # ggml has fp32 only; it also takes its turns among the bf16 runs, where its row is named so
    for dtype, label in (("f32", "fp32/fp32"), ("bf16", "bf16/fp32")):
        x = inputs(1, t, hk, hv, dtype)
        state = np.random.default_rng(1).standard_normal((1, hv, D, D), dtype=np.float32) * 0.1
        contenders, grouped = [], ours_by_impl(capi, "chunk_forward", x, state)
        for i, call in enumerate(grouped):
            name = "libgdn" if i == 0 else f"libgdn[{call.plan['impl']}]"
            contenders.append(Contender(name, gdn_version(capi, call), label, call.run))
            share.append((contenders[-1], call.plan["isa"]))
        if ggml and dtype == "f32":
            theirs = GgmlCall(ggml, ARGS.threads, x, [state])  # tiled heads, V-first: the same numbers read another way
            tiled = GdnCall(capi, "chunk_forward", ARGS.threads, x, state, head_map="tiled", layout="v_first")
            theirs.run()
            tiled.run()
            for what, a, b in zip(("o", "state"), (tiled.o, tiled.final), theirs.result(), strict=True):
                compare(f"prefill {what}, libgdn and ggml", a, b, 1e-5)
            contenders.append(Contender("libgdn (ggml's layouts)", gdn_version(capi, tiled), label, tiled.run))
            contenders.append(Contender("ggml", f"llama-cpp-python 0.3.36 {ggml.isa}", label, theirs.run, theirs.pause))
            beside_bf16 = Contender("ggml (beside bf16)", contenders[-1].version, label, theirs.run, theirs.pause)
        elif beside_bf16:
            contenders.append(beside_bf16)
        if not ARGS.no_transformers:
            run, result, version = transformers_call("chunk_forward", x, state)
            run()
            grouped[0].run()
            bound = 1e-5 if dtype == "f32" else 5e-3
            compare(f"prefill o {label}, libgdn and Transformers", grouped[0].o, result[0].float().numpy(), bound)
            compare(f"prefill state {label}, libgdn and Transformers", grouped[0].final, result[1].numpy(), bound)
            contenders.append(Contender("transformers", version, label, run))
        measure(contenders, ARGS.reps)
        record("chunk_forward", f"prefill T={t}", str(t), hk, hv, contenders)
    for c, isa in share:
        gflops = 6 * D * D * t * hv / statistics.median(c.seconds) / 1e9
        ceiling = fma_ceiling(isa)
        fact(
            f"prefill_{c.dtype}_{c.version.split()[-1]}",
            f"{gflops:.1f}",
            f"GFLOP/s ({100 * gflops / ceiling:.0f} % of the fp32 FMA peak)",
        )


def part_flat(capi: Any) -> None:
    """Cost per token from T = 512 to 262,144."""
    hk, hv = 4, 8
    for dtype, label in (("f32", "fp32/fp32"), ("bf16", "bf16/fp32")):
        for t in (512, 2048) if ARGS.quick else (512, 1024, 2048, 4096, 16384, 65536, 262144):
            x = inputs(1, t, hk, hv, dtype)
            call = GdnCall(capi, "chunk_forward", ARGS.threads, x, np.zeros((1, hv, D, D), np.float32))
            c = Contender("libgdn", gdn_version(capi, call), label, call.run)
            measure([c], 3 if t > 65536 else ARGS.reps, calls=max(1, 4096 // t))
            record("chunk_forward", f"flat T={t}", str(t), hk, hv, [c])
            fact(f"flat_{label}_T{t}", f"{1e6 * statistics.median(c.seconds) / t / hv:.4f}", "us per token and head")


def part_decode(capi: Any, ggml: Ggml | None) -> None:
    """One step: state in the cache (one layer again and again), and streamed (layer after layer, as a model does)."""
    hk, hv = 16, 32
    label = "fp32/fp32"
    for n in (1, 4):
        x = inputs(n, 1, hk, hv)
        rng = np.random.default_rng(2)
        # At least 512 MiB of states: past the last-level cache of any machine this runs on.
        streamed = max(2, (64 << 20 if ARGS.quick else 512 << 20) // (n * hv * D * D * 4))
        for layers in (1, streamed):
            states = [rng.standard_normal((n, hv, D, D), dtype=np.float32) * 0.1 for _ in range(layers)]
            original = [s.copy() for s in states]
            kw: dict[str, Any] = {"head_map": "tiled", "layout": "v_first"}
            contenders: list[Contender] = []
            if ggml:
                theirs = GgmlCall(ggml, ARGS.threads, x, original)
                theirs.run()
                check = GdnCall(capi, "recurrent", ARGS.threads, x, original[-1], **kw)
                check.run()
                for what, a, b in zip(("o", "state"), (check.o, check.final), theirs.result(layers - 1), strict=True):
                    compare(f"decode N={n} {what}, libgdn and ggml", a, b, 1e-5)
            for name, in_place in (("libgdn", True), ("libgdn (state copied)", False)):
                calls = [GdnCall(capi, "recurrent", ARGS.threads, x, s, in_place=in_place, **kw) for s in states]

                def run(calls: list[GdnCall] = calls) -> None:
                    for call in calls:
                        call.run()

                contenders.append(Contender(name, gdn_version(capi, calls[0]), label, run))
            if ggml:
                contenders.append(
                    Contender("ggml", f"llama-cpp-python 0.3.36 {ggml.isa}", label, theirs.run, theirs.pause)
                )
            if not ARGS.no_transformers:
                runs = [transformers_call("recurrent", x, s)[0] for s in original]
                version = transformers_call("recurrent", x, original[0])[2]

                def run_all(runs: list[Callable[[], None]] = runs) -> None:
                    for one in runs:
                        one()

                contenders.append(Contender("transformers", version, label, run_all))
            measure(contenders, ARGS.reps, calls=50 if layers == 1 else 1)
            where = "resident" if layers == 1 else f"streamed {layers} layers"
            record("recurrent", f"decode N={n} {where}", str(n), hk, hv, contenders, per=layers)
            if ggml:
                theirs.close()


def part_head(capi: Any) -> None:
    """A single head must use both cores."""
    t = 512 if ARGS.quick else 4096
    for dtype, label in (("f32", "fp32/fp32"), ("bf16", "bf16/fp32")):
        x, state = inputs(1, t, 1, 1, dtype), np.zeros((1, 1, D, D), np.float32)
        contenders = []
        for threads in sorted({1, ARGS.threads}):
            call = GdnCall(capi, "chunk_forward", threads, x, state)
            contenders.append(Contender(f"libgdn {threads}t", gdn_version(capi, call), label, call.run))
        measure(contenders, ARGS.reps, calls=3)
        record("chunk_forward", f"one head T={t}", str(t), 1, 1, contenders)
        one, two = (statistics.median(c.seconds) for c in (contenders[0], contenders[-1]))
        fact(f"one_head_speedup_{label}_{ARGS.threads}t", f"{one / two:.2f}", "x")


def part_memory() -> None:
    """Peak memory of a call beyond its inputs and outputs, each dtype in a process of its own."""
    for dtype in ("f32", "bf16"):
        command = [sys.executable, __file__, *sys.argv[1:], "--memory-child", dtype]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        extra, total = int(out[-2]), int(out[-1])
        fact(
            f"memory_beyond_{dtype}",
            f"{100 * extra / total:.3f}",
            f"% of {total >> 20} MiB inputs and outputs ({extra >> 10} KiB)",
        )


def peak_rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    raise RuntimeError("no VmHWM in /proc/self/status")


def memory_child(capi: Any, dtype: str) -> None:
    t, hk, hv = (4096 if ARGS.quick else 65536), 4, 8
    x = inputs(1, t, hk, hv, dtype)
    call = GdnCall(capi, "chunk_forward", ARGS.threads, x, np.zeros((1, hv, D, D), np.float32))
    call.o[...] = 0
    call.final[...] = 0
    Path("/proc/self/clear_refs").write_text("5")  # peak RSS starts over at what is held now
    before = peak_rss()
    call.run()
    total = sum(a.nbytes for a in x.values()) + call.o.nbytes + 2 * call.final.nbytes
    print(peak_rss() - before, total)


def write() -> None:
    folder = Path(ARGS.out) / machine()
    folder.mkdir(parents=True, exist_ok=True)
    for op in sorted({r[0] for r in rows}):
        with (folder / f"{op}.csv").open("w", newline="") as f:
            csv.writer(f).writerows([HEADER, *[r for r in rows if r[0] == op]])
    with (folder / "facts.csv").open("w", newline="") as f:
        csv.writer(f).writerows([["fact", "value", "unit"], *facts])
    print(f"written: {folder}")


def ratios() -> None:
    """Peers' median over ours, per label."""
    for label in dict.fromkeys(r[1] for r in rows):
        group = [r for r in rows if r[1] == label]
        mine = {r[5]: float(r[8]) for r in group if r[6] == "libgdn"}
        for r in group:
            if r[6] in ("ggml", "transformers"):
                for dtype, ours in mine.items():
                    print(f"  {label:28s} {r[6]:14s} {r[5]} / libgdn {dtype}: {float(r[8]) / ours:.2f} x")


def main() -> int:
    if ARGS.build_only:
        flags = cpu_flags()
        print(*build_ggml(ARGS.ggml_sdist, ["avx2", "avx512"] if "avx2" in flags else ["native"]), build_fma_peak())
        return 0
    from gdn import _capi as capi

    capi.set_num_threads(ARGS.threads)
    if ARGS.memory_child:
        memory_child(capi, ARGS.memory_child)
        return 0
    parts = ARGS.parts.split(",")
    fact("cpu", machine())
    fact("threads", ARGS.threads)
    fact("libgdn", f"{capi.version()} {commit()} isa {capi.get_isa()}")
    fact("load_before", round(os.getloadavg()[0], 2), "(anything above 0.3 spoils the figures)")
    ggml = pick_ggml() if {"prefill", "decode"} & set(parts) else None
    steps: dict[str, Callable[[], None]] = {
        "peak": lambda: part_peak(capi),
        "prefill": lambda: part_prefill(capi, ggml),
        "flat": lambda: part_flat(capi),
        "decode": lambda: part_decode(capi, ggml),
        "head": lambda: part_head(capi),
        "memory": part_memory,
    }
    for name in parts:
        print(f"== {name}", flush=True)
        steps[name]()
    print("== ratios")
    ratios()
    write()
    for text in failures:
        print(f"DISAGREE {text}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
