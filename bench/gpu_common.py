# SPDX-License-Identifier: MIT
"""What the GPU benchmark's parts share: shapes, inputs, records that can be resumed, timing, the machine's ceilings."""

from __future__ import annotations

import csv
import datetime
import itertools
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
HEADER = "op,label,seqlens,h_k,h_v,dtype,impl,version,median_us,min_us,max_us,commit,date".split(",")
ACCURACY_HEADER = "op,label,seqlens,h_k,h_v,impl,version,o_rel_l2,state_rel_l2,finite,reference,commit,date".split(",")
ENERGY_HEADER = "label,seqlens,h_k,h_v,impl,version,joules_per_1000_tokens,watts,seconds,commit,date".split(",")
D = 128
FLUSH_BYTES = 128 << 20  # more than twice the H200's L2
FIRST_PATTERNS = ("32768", "8192+8192+8192+8192", "8192", "2048", "+".join(["1024"] * 8), "28672+4096")


@dataclass(frozen=True)
class Shape:
    """One row of gpu_shapes.csv: packed sequences of these lengths, K = V = 128."""

    label: str
    seqlens: str
    h_k: int
    h_v: int

    @property
    def lengths(self) -> list[int]:
        return [int(n) for n in self.seqlens.split("+")]

    @property
    def heads(self) -> str:
        return f"{self.h_k}x{self.h_v}"

    @property
    def flop(self) -> float:
        """Matmul work in 64-token chunks: [K;Q] S, T R, P U, K^T U and QK^T, KK^T, all per value head."""
        chunks = sum(-(-n // 64) for n in self.lengths)
        return 2.0 * chunks * self.h_v * (3 * 64 * D * D + 2 * 64 * 64 * D + 2 * 64 * 64 * D)


def read_shapes(path: Path = ROOT / "bench" / "gpu_shapes.csv") -> list[Shape]:
    with path.open(newline="") as f:
        return [Shape(r["label"], r["seqlens"], int(r["h_k"]), int(r["h_v"])) for r in csv.DictReader(f)]


def ordered(shapes: Iterable[Shape]) -> list[Shape]:
    """Length pattern by length pattern over all head configurations, so that a truncated run covers every one."""
    shapes = list(shapes)
    patterns = list(dict.fromkeys(s.seqlens for s in shapes))
    patterns.sort(key=lambda p: FIRST_PATTERNS.index(p) if p in FIRST_PATTERNS else len(FIRST_PATTERNS))
    return sorted(shapes, key=lambda s: patterns.index(s.seqlens))


Inputs = dict[str, torch.Tensor]


def make_inputs(shape: Shape, device: str, seed: int = 0) -> Inputs:
    """q, k [1, T, Hk, 128] unit bf16; v [1, T, Hv, 128] N(0,1) bf16; g, beta [1, T, Hv] fp32; h0 [N, Hv, K, V] fp32.

    g = logsigmoid(N(0,1))/16, and 0 on a random quarter of the value heads (those never forget)."""
    torch.manual_seed(seed)
    lengths, hk, hv = shape.lengths, shape.h_k, shape.h_v
    tokens = sum(lengths)

    def unit(heads: int) -> torch.Tensor:
        return F.normalize(torch.randn(1, tokens, heads, D, device=device), dim=-1).bfloat16()

    q, k = unit(hk), unit(hk)
    v = torch.randn(1, tokens, hv, D, device=device, dtype=torch.bfloat16)
    g = F.logsigmoid(torch.randn(1, tokens, hv, device=device)) / 16
    beta = torch.randn(1, tokens, hv, device=device).sigmoid()
    h0 = torch.randn(len(lengths), hv, D, D, device=device)
    g[:, :, torch.randperm(hv, device=device)[math.ceil(0.75 * hv) :]] = 0
    offsets = [0]
    for n in lengths:
        offsets.append(offsets[-1] + n)
    cu = torch.tensor(offsets, dtype=torch.int32, device=device)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "h0": h0, "cu_seqlens": cu}


def recurrence64(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition in fp64, token by token: o [1, T, Hv, V], states [N, Hv, K, V]."""
    q, k, v, g, beta = (x[name][0].double() for name in ("q", "k", "v", "g", "beta"))
    group = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    o, states = torch.zeros_like(v), x["h0"].double().clone()
    bounds = x["cu_seqlens"].tolist()
    for n, (begin, end) in enumerate(itertools.pairwise(bounds)):
        s = states[n]
        for t in range(begin, end):
            s = s * g[t].exp()[:, None, None]
            u = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], s))
            s = s + k[t][:, :, None] * u[:, None, :]
            o[t] = torch.einsum("hk,hkv->hv", q[t], s) * D**-0.5
        states[n] = s
    return o[None], states


def rel_l2(ours: torch.Tensor, right: torch.Tensor) -> float:
    """Relative L2 distance, accumulated in fp64 slice by slice (the tensors may be gigabytes)."""
    difference = norm = 0.0
    for a, b in zip(ours.reshape(-1).split(1 << 26), right.reshape(-1).split(1 << 26), strict=True):
        a, b = a.double(), b.double()
        difference += float((a - b).square().sum())
        norm += float(b.square().sum())
    return math.sqrt(difference / norm) if norm > 0 else math.sqrt(difference)


class Record:
    """A CSV that survives interruption: rows are kept by (label, seqlens, heads, impl) and saved after every shape."""

    def __init__(self, path: Path, header: list[str]) -> None:
        self.path, self.header = path, header
        self.rows: dict[tuple[str, ...], dict[str, str]] = {}
        if path.exists():
            with path.open(newline="") as f:
                reader = csv.DictReader(f)
                if reader.fieldnames != header:
                    raise ValueError(f"{path}: found header {reader.fieldnames}, expected {header}")
                for row in reader:
                    self.rows[self.key(row)] = row

    @staticmethod
    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in ("label", "seqlens", "h_k", "h_v", "impl"))

    def has(self, shape: Shape, impl: str) -> bool:
        return (shape.label, shape.seqlens, str(shape.h_k), str(shape.h_v), impl) in self.rows

    def add(self, **row: Any) -> None:
        text = {name: str(row[name]) for name in self.header}
        self.rows[self.key(text)] = text

    def drop(self, impls: Iterable[str]) -> None:
        impls = set(impls)
        self.rows = {key: row for key, row in self.rows.items() if row["impl"] not in impls}

    def save(self) -> None:
        """Sorted by the shape list, then implementation; replaced in one step so that a killed run loses nothing."""
        order = {(s.label, s.seqlens, str(s.h_k), str(s.h_v)): i for i, s in enumerate(read_shapes())}
        rows = sorted(self.rows.items(), key=lambda item: (order.get(item[0][:4], len(order)), item[0]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", newline="") as f:
            writer = csv.DictWriter(f, self.header, lineterminator="\n")
            writer.writeheader()
            writer.writerows(row for _, row in rows)
        temporary.replace(self.path)


class Facts:
    """facts.csv (fact,value,unit): later values replace earlier ones of the same name."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, {}
        if path.exists():
            with path.open(newline="") as f:
                self.rows = {r["fact"]: (r["value"], r["unit"]) for r in csv.DictReader(f)}

    def set(self, name: str, value: Any, unit: str = "") -> None:
        self.rows[name] = (str(value), unit)
        print(f"  {name}: {value} {unit}", flush=True)

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="") as f:
            writer = csv.writer(f, lineterminator="\n")
            writer.writerow(["fact", "value", "unit"])
            writer.writerows([name, *value] for name, value in self.rows.items())


Results = tuple[torch.Tensor, torch.Tensor]


class Runner:
    """A prepared call: run() repeats it and leaves the results in `results`. On CUDA it is a captured graph."""

    def __init__(self, call: Callable[[], Results], device: str) -> None:
        self.call, self.results = call, call()
        self.times_us: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._cuda = device.startswith("cuda")
        if self._cuda:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                call()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.results = call()
            self.run()
            torch.cuda.synchronize()

    def run(self) -> None:
        if self._cuda:
            self._graph.replay()
        else:
            self.results = self.call()

    def timed_run(self) -> None:
        """One replay between two events; collect() reads them, so that nothing waits between replays."""
        if not self._cuda:
            begin = time.perf_counter()
            self.run()
            self.times_us.append(1e6 * (time.perf_counter() - begin))
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.run()
        end.record()
        self._events.append((begin, end))

    def collect(self) -> list[float]:
        if self._cuda:
            torch.cuda.synchronize()
            self.times_us += [1e3 * begin.elapsed_time(end) for begin, end in self._events]
            self._events.clear()
        return self.times_us


def measure(runners: list[Runner], reps: int, device: str) -> None:
    """Replays taken in turns, L2 flushed before each."""
    flush = torch.empty(FLUSH_BYTES if device.startswith("cuda") else 1, dtype=torch.uint8, device=device)
    for rep in range(reps):
        for runner in runners if rep % 2 == 0 else runners[::-1]:
            flush.zero_()
            runner.timed_run()
    for runner in runners:
        runner.collect()


def _cuda_median_ms(call: Callable[[], Any], reps: int = 11) -> float:
    call()
    times = []
    for _ in range(reps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measure_energy(runner: Runner, seconds: float) -> tuple[float, float, int]:
    """(joules, seconds, replays) of a steady loop of at least `seconds`, by NVML's energy counter."""
    import pynvml

    pynvml.nvmlInit()
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    measure([runner], 3, "cuda")
    replays = max(10, int(1e6 * seconds / statistics.median(runner.times_us)))

    def loop() -> None:
        for _ in range(replays):
            runner.run()
        torch.cuda.synchronize()

    loop()  # clocks and temperature settle
    before, begin = pynvml.nvmlDeviceGetTotalEnergyConsumption(device), time.perf_counter()
    loop()
    elapsed = time.perf_counter() - begin
    return (pynvml.nvmlDeviceGetTotalEnergyConsumption(device) - before) / 1e3, elapsed, replays


def measure_ceilings(device: str) -> dict[str, float]:
    """bf16 matmul (8192^3, random data) in TFLOP/s, device copy (4 GiB read + 4 GiB written) in GB/s."""
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    matmul = 2 * n**3 / _cuda_median_ms(lambda: torch.mm(a, b, out=out)) / 1e9
    source, target = (torch.empty(4 << 30, dtype=torch.uint8, device=device) for _ in range(2))
    copy = 2 * source.numel() / _cuda_median_ms(lambda: target.copy_(source)) / 1e6
    return {"matmul_bf16_TFLOPs": matmul, "copy_GBs": copy}


def query_gpu(fields: str) -> list[str]:
    """nvidia-smi's answer, or nothing where it does not run."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [part.strip() for part in done.stdout.splitlines()[0].split(",")] if done.returncode == 0 else []


def today() -> str:
    return datetime.date.today().isoformat()


def git_commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:
        return "unknown"
