# SPDX-License-Identifier: MIT
"""chunk_forward on one GPU: libgdn beside FlashQLA, FlashInfer and FLA, in one process, on the same data.

    python bench/gpu_peers.py --gdn-lib build/libgdn.so [--out bench/results/h200] [--budget 520]
    python bench/gpu_peers.py ... --variant simt,impl=chunk_simt --variant split2,GDN_SCHEDULE=split --impls libgdn
    ncu --profile-from-start off --csv --page raw --metrics sm__cycles_active.avg,sm__cycles_elapsed.max \\
        --log-file ncu.csv python bench/gpu_peers.py ... --profile ncu_sections.csv   (then gpu_tables.py --ncu)

The shapes are gpu_shapes.csv (K = V = 128, bf16, fp32 states, initial and final state on). Every implementation's CUDA
graph is replayed in turns with L2 flushed between; every result is compared with libgdn's token loop on the same data,
which itself is compared with the fp64 recurrence first. Rows are saved after every shape, and shapes that have theirs
are skipped: call again until nothing is left. --redo IMPL measures one anew. Exit code 1: libgdn was wrong somewhere.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from gpu_common import (
    ACCURACY_HEADER,
    ENERGY_HEADER,
    HEADER,
    Facts,
    Inputs,
    Record,
    Results,
    Runner,
    Shape,
    git_commit,
    make_inputs,
    measure,
    measure_ceilings,
    measure_energy,
    ordered,
    query_gpu,
    read_shapes,
    recurrence64,
    rel_l2,
    today,
)
from gpu_impls import PEERS, GdnCall, GdnLibrary, Implementation, gdn_torch, libgdn, parse_variant


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gdn-lib", type=Path, help="libgdn.so (default: GDN_LIBRARY)")
    p.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results" / "h200")
    p.add_argument("--impls", default="libgdn,flash_qla,flashinfer,fla", help="also: libgdn_torch")
    p.add_argument("--variant", action="append", default=[], metavar="LABEL[,impl=NAME][,VAR=VALUE]...")
    p.add_argument("--heads", default="", help="only these, e.g. 16x64,16x32")
    p.add_argument("--patterns", type=int, help="only the first so many length patterns (of 19)")
    p.add_argument("--limit", action="append", default=["fla=6"], metavar="IMPL=N", help="patterns per implementation")
    p.add_argument("--late", default="fla", help="measured when the others have all their rows (it compiles longest)")
    p.add_argument("--warm", default="", metavar="IMPLS", help="fill their compile caches first, heads in parallel")
    p.add_argument("--warm-child", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--redo", action="append", default=[], metavar="IMPL", help="drop its rows first")
    p.add_argument("--reps", type=int, default=15)
    p.add_argument("--budget", type=float, default=520, help="seconds; no shape is started after that")
    p.add_argument(
        "--reference", default="chunk_simt", help="libgdn's implementation that the others are compared with"
    )
    p.add_argument("--no-check", action="store_true", help="times only")
    p.add_argument("--energy", action="store_true", help="joules per 1,000 tokens in place of times (energy.csv)")
    p.add_argument("--commit", help="commit of the measured library (default: git's)")
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: tries the driver without a GPU")
    p.add_argument("--shapes", type=Path, help="another shape list")
    p.add_argument(
        "--profile", type=Path, help="no timing: one call per implementation between marker kernels, for ncu"
    )
    return p.parse_args(argv)


# docs/precision.md's contract for bf16 inputs, fp32 states, unit keys, beta <= 1. libgdn must hold it; peers'
# errors are recorded only.
O_BOUND, STATE_BOUND = 5e-3, 4.5e-3
REFERENCE_BOUND = 1e-5  # the fp32 token loop with fp32 o against fp64


def wanted_impls(args: argparse.Namespace) -> list[tuple[str, Callable[[], Implementation]]]:
    """Names and makers; making one may compile for half a minute, so only what is still to be measured is made."""
    makers: list[tuple[str, Callable[[], Implementation]]] = []
    for name in filter(None, args.impls.split(",")):
        if name == "libgdn":
            makers.append((name, lambda: libgdn(args.gdn_lib)))
        elif name == "libgdn_torch":
            makers.append((name, lambda: gdn_torch(args.gdn_lib)))
        elif name in PEERS:
            makers.append((name, PEERS[name]))
        else:
            raise SystemExit(f"--impls: found {name!r}, expected some of libgdn, libgdn_torch, {', '.join(PEERS)}")
    for text in args.variant:
        makers.append(("libgdn:" + text.split(",")[0], lambda text=text: parse_variant(args.gdn_lib, text)))
    return makers


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Driver:
    def __init__(self, args: argparse.Namespace, begin: float) -> None:
        self.args, self.begin, self.device = args, begin, args.device
        self.times = Record(args.out / "chunk_forward.csv", HEADER)
        self.accuracy = Record(args.out / "chunk_forward_accuracy.csv", ACCURACY_HEADER)
        self.facts = Facts(args.out / "facts.csv")
        self.commit = args.commit or git_commit()
        self.wrong: list[str] = []
        for record in (self.times, self.accuracy):
            record.drop(args.redo)
        shapes = read_shapes(args.shapes) if args.shapes else read_shapes()
        heads = [h for h in args.heads.split(",") if h]
        shapes = ordered(s for s in shapes if not heads or s.heads in heads)
        self.patterns = list(dict.fromkeys(s.seqlens for s in shapes))
        self.shapes = [s for s in shapes if s.seqlens in self.patterns[: args.patterns]]
        self.limits = {name: int(n) for name, _, n in (text.partition("=") for text in args.limit)}
        self.impls: dict[str, Implementation | None] = {}  # None: could not be made
        self.makers = dict(wanted_impls(args))
        self.late = [name for name in args.late.split(",") if name in self.makers]

    def left(self) -> float:
        return self.args.budget - (time.time() - self.begin)

    def missing(self, shape: Shape) -> list[str]:
        """Implementations without a row for this shape, in the order of --impls."""
        names = []
        for name in self.makers:
            limit = self.limits.get(name)
            outside = limit is not None and shape.seqlens not in self.patterns[:limit]
            if not outside and not self.times.has(shape, name) and not (name in self.impls and not self.impls[name]):
                names.append(name)
        return names

    def make(self, name: str) -> Implementation | None:
        """The implementation, with the time of its import and first call on the way (what a fresh process pays)."""
        if name in self.impls:
            return self.impls[name]
        try:
            begin = time.time()
            impl = self.makers[name]()
            imported = time.time() - begin
            x = make_inputs(Shape("first call", "128", 2, 2), self.device)
            begin = time.time()
            impl.prepare(x)()
            synchronize(self.device)
            self.facts.set(f"import_{name}_s", f"{imported:.2f}", "s")
            unit = "ms (warm disk cache)" if name in self.args.warm.split(",") else "ms"
            self.facts.set(f"first_call_{name}_ms", f"{1e3 * (time.time() - begin):.1f}", unit)
            self.impls[name] = impl
        except Exception:
            print(f"cannot run {name}:\n{traceback.format_exc()[-1500:]}", flush=True)
            self.impls[name] = None
            if name.startswith("libgdn"):
                self.wrong.append(f"{name} cannot run")
        return self.impls[name]

    def check_reference(self) -> None:
        """The token loop that everything is compared with, against the fp64 recurrence; a ragged small case."""
        x = make_inputs(Shape("reference", "65+0+1+190", 2, 4), self.device, seed=1)
        o, state = self.reference(x)
        right_o, right_state = recurrence64(x)
        errors = rel_l2(o, right_o), rel_l2(state, right_state)
        print(f"{self.args.reference} against fp64: o {errors[0]:.2e}, state {errors[1]:.2e}", flush=True)
        if not max(errors) <= REFERENCE_BOUND:
            raise SystemExit(f"the reference is wrong: {errors}, expected at most {REFERENCE_BOUND}")
        self.facts.set("reference_o_rel_l2", f"{errors[0]:.3e}")
        self.facts.set("reference_state_rel_l2", f"{errors[1]:.3e}")

    def reference(self, x: Inputs) -> Results:
        call = GdnCall(self.gdn, self.args.reference, x, torch.float32)
        result = call()
        synchronize(self.device)
        return result

    def warm(self) -> None:
        """A process per head configuration compiles for its own; what has no disk cache gains nothing by it."""
        names = [
            n for n in self.args.warm.split(",") if n in self.makers and any(n in self.missing(s) for s in self.shapes)
        ]
        heads = list(dict.fromkeys(s.heads for s in self.shapes if self.missing(s))) if names else []
        begin = time.time()
        shapes = ["--shapes", str(self.args.shapes)] if self.args.shapes else []
        command = [
            sys.executable,
            __file__,
            "--warm-child",
            "--device",
            self.device,
            "--impls",
            ",".join(names),
            *shapes,
        ]
        children = [
            subprocess.Popen([*command, "--heads", h, "--patterns", "6"], stdout=subprocess.DEVNULL) for h in heads
        ]
        for child in children:
            try:
                child.wait(timeout=max(1.0, self.left()))
            except subprocess.TimeoutExpired:
                child.kill()
        print(
            f"warmed {', '.join(names) or 'nothing'} for {len(heads)} head counts: {time.time() - begin:.0f} s",
            flush=True,
        )

    def run_warm_child(self) -> None:
        for shape in self.shapes:
            x = make_inputs(shape, self.device)
            for name in self.makers:
                if impl := self.make(name):
                    impl.prepare(x)()
                    synchronize(self.device)

    def describe_machine(self) -> None:
        self.gdn = GdnLibrary(self.args.gdn_lib)
        if self.device == "cpu":
            return
        facts = self.facts
        facts.set("gpu", torch.cuda.get_device_name())
        for name, value in zip(
            ("driver", "clock_max_sm_MHz", "power_limit_W"),
            query_gpu("driver_version,clocks.max.sm,power.limit"),
            strict=False,
        ):
            facts.set(name, value)
        facts.set("torch", torch.__version__)
        for name, value in measure_ceilings(self.device).items():
            facts.set(name, f"{value:.0f}", name.rsplit("_", 1)[-1])
        for name, value in zip(
            ("clock_sm_MHz", "temperature_C", "power_W"),
            query_gpu("clocks.sm,temperature.gpu,power.draw"),
            strict=False,
        ):
            facts.set(name + "_after_matmul", value)

    def prepared(self, shape: Shape, names: list[str], x: Inputs) -> list[tuple[Implementation, Runner, str]]:
        """Captured calls; an implementation that fails four times is left out from then on."""
        ready = []
        for name in names:
            impl = self.make(name)
            if impl is None:
                continue
            try:
                ready.append((impl, Runner(impl.prepare(x), self.device), impl.version(x)))
            except Exception as error:
                print(f"FAILED {name} {shape.heads} {shape.seqlens}: {error!r:.400}", flush=True)
                synchronize(self.device)
                impl.failures += 1
                if name.startswith("libgdn"):
                    self.wrong.append(f"{name} {shape.heads} {shape.seqlens}: {error!r:.200}")
                if impl.failures >= 4:
                    self.impls[name] = None
        return ready

    def compare(self, shape: Shape, x: Inputs, ready: list[tuple[Implementation, Runner, str]]) -> dict[str, str]:
        """Results of one more replay over NaN-filled outputs; "" or what is wrong, per implementation."""
        right_o, right_state = self.reference(x)
        verdicts = {}
        for impl, runner, version in ready:
            for tensor in runner.results:
                tensor.fill_(float("nan"))
            runner.run()
            synchronize(self.device)
            o, state = runner.results
            finite = bool(o.isfinite().all()) and bool(state.isfinite().all())
            errors = rel_l2(o, right_o), rel_l2(state, right_state)
            self.accuracy.add(
                op="chunk_forward",
                label=shape.label,
                seqlens=shape.seqlens,
                h_k=shape.h_k,
                h_v=shape.h_v,
                impl=impl.name,
                version=version,
                o_rel_l2=f"{errors[0]:.3e}",
                state_rel_l2=f"{errors[1]:.3e}",
                finite=int(finite),
                reference=self.args.reference,
                commit=self.commit,
                date=today(),
            )
            good = finite and errors[0] <= O_BOUND and errors[1] <= STATE_BOUND
            verdicts[impl.name] = "" if good else f"o {errors[0]:.2e} state {errors[1]:.2e} finite {finite}"
            if not good and impl.name.startswith("libgdn"):
                self.wrong.append(f"{impl.name} {shape.heads} {shape.seqlens}: {verdicts[impl.name]}")
        return verdicts

    def run_shape(self, shape: Shape, names: list[str]) -> None:
        x = make_inputs(shape, self.device)
        ready = self.prepared(shape, names, x)
        measure([runner for _, runner, _ in ready], self.args.reps, self.device)
        clock = query_gpu("clocks.sm") if self.device == "cuda" else []
        verdicts = {} if self.args.no_check else self.compare(shape, x, ready)
        line = []
        for impl, runner, version in ready:
            us = sorted(runner.times_us)
            median = statistics.median(us)
            line.append(f"{impl.name} {median:.1f}" + (f" ({verdicts[impl.name]})" if verdicts.get(impl.name) else ""))
            self.times.add(
                op="chunk_forward",
                label=shape.label,
                seqlens=shape.seqlens,
                h_k=shape.h_k,
                h_v=shape.h_v,
                dtype="bf16/fp32",
                impl=impl.name,
                version=version,
                median_us=f"{median:.2f}",
                min_us=f"{us[0]:.2f}",
                max_us=f"{us[-1]:.2f}",
                commit=self.commit,
                date=today(),
            )
        for clock_mhz in clock:
            low = min(int(clock_mhz), int(self.facts.rows.get("clock_sm_MHz_lowest_seen", (clock_mhz, ""))[0]))
            self.facts.rows["clock_sm_MHz_lowest_seen"] = (str(low), "MHz")
        self.save()
        name = shape.seqlens if len(shape.seqlens) < 22 else f"{len(shape.lengths)} x {shape.lengths[0]}"
        print(f"{shape.heads:>6} {name:22s} {'; '.join(line)}", flush=True)

    def save(self) -> None:
        self.times.save()
        self.accuracy.save()
        self.facts.save()

    def energy(self) -> None:
        """About 3 s per shape and implementation; the clock's own noise is averaged away, the idle power is not."""
        record = Record(self.args.out / "energy.csv", ENERGY_HEADER)
        for shape in self.shapes:
            x = make_inputs(shape, self.device)
            for name in self.makers:
                impl = self.make(name)
                if impl is None or self.left() < 0:
                    continue
                joules, seconds, replays = measure_energy(Runner(impl.prepare(x), self.device), 1.5)
                per_1000 = 1e3 * joules / replays / sum(shape.lengths)
                record.add(
                    label=shape.label,
                    seqlens=shape.seqlens,
                    h_k=shape.h_k,
                    h_v=shape.h_v,
                    impl=name,
                    version=impl.version(x),
                    joules_per_1000_tokens=f"{per_1000:.5f}",
                    watts=f"{joules / seconds:.0f}",
                    seconds=f"{seconds:.2f}",
                    commit=self.commit,
                    date=today(),
                )
                record.save()
                print(f"{shape.heads:>6} {shape.seqlens[:22]:22s} {name} {per_1000:.4f} J/1000 tokens", flush=True)

    def profile(self) -> None:
        """One call per shape and implementation, a marker kernel (spin_kernel) before each; for ncu."""
        sections = []
        for shape in self.shapes:
            x = make_inputs(shape, self.device)
            for name in self.makers:
                impl = self.make(name)
                if impl is None or self.left() < 0:
                    continue
                call = impl.prepare(x)
                call()
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStart()
                torch.cuda._sleep(1000)
                call()
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStop()
                sections.append([shape.label, shape.seqlens, shape.h_k, shape.h_v, name])
        with self.args.profile.open("w", newline="") as f:
            csv.writer(f, lineterminator="\n").writerows([["label", "seqlens", "h_k", "h_v", "impl"], *sections])

    def run(self) -> int:
        if self.args.warm_child:
            self.run_warm_child()
            return 0
        self.describe_machine()
        if self.args.profile:
            self.profile()
            return 0
        if self.args.energy:
            self.energy()
            return 0
        if not self.args.no_check:
            self.check_reference()
        if self.args.warm:
            self.warm()
        todo = [s for s in self.shapes if self.missing(s)]
        print(f"{len(todo)} of {len(self.shapes)} shapes to measure, {self.left():.0f} s left", flush=True)
        for late in (False, True):
            for shape in todo:
                if self.left() < 0:
                    print("out of time: call again to go on", flush=True)
                    break
                if names := [name for name in self.missing(shape) if (name in self.late) == late]:
                    self.run_shape(shape, names)
        self.save()
        undone = sum(bool(self.missing(s)) for s in self.shapes)
        print(f"{undone} shapes left; {time.time() - self.begin:.0f} s", flush=True)
        print("\n".join(f"WRONG {what}" for what in self.wrong), flush=True)
        return 1 if self.wrong else 0


def main(argv: list[str] | None = None) -> int:
    begin = time.time()
    args = parse(argv)
    path = args.gdn_lib or os.environ.get("GDN_LIBRARY")
    if not path:
        raise SystemExit("--gdn-lib (or GDN_LIBRARY): found nothing, expected the path of libgdn.so")
    args.gdn_lib = Path(path).resolve()
    os.environ["GDN_LIBRARY"] = str(args.gdn_lib)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: found none, expected one (--device cpu tries the driver without)")
    with torch.no_grad():
        return Driver(args, begin).run()


if __name__ == "__main__":
    sys.exit(main())
