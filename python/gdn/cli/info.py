# SPDX-License-Identifier: MIT
"""``gdn info``."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import Any

from .. import _capi
from .console import Console

_PACKAGES = ("torch", "transformers", "numpy", "safetensors", "ml_dtypes")


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "info", parents=[common], help="CPU, instruction sets, threads, GPUs, build", description=__doc__
    )
    parser.add_argument("--peak", action="store_true", help="measure the multiply-add peak and the copy rate too")
    parser.set_defaults(run=run)


def collect(peak: bool = False) -> dict[str, Any]:
    """What `gdn info --json` prints."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    result = {
        **_capi.info(),
        "library": _capi.library_path(),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "packages": packages,
    }
    if peak:
        gflops, copy = _capi.measure_peak()
        result["peak"] = {"fma_gflops": gflops, "copy_gb_per_s": copy}
    return result


def _gpu(device: dict[str, Any]) -> str:
    """One GPU for people; bad_metadata: what a call found on the device and could not report."""
    text = f"{device['id']}: {device['name']}, compute capability {device['major']}.{device['minor']}"
    text += f", {device['memory_bytes'] / 2**30:.0f} GiB"
    text += "" if device["usable"] else ", no code for it in this build"
    counters = device.get("split_counters", {})
    text += "".join(f", {value} {name.replace('_', ' ')}" for name, value in counters.items() if value)
    return text + (f", bad metadata: {device['bad_metadata']}" if device["bad_metadata"] else "")


def _names(values: list[str]) -> str:
    return ", ".join(values) or "none"


def run(args: argparse.Namespace, console: Console) -> int:
    found = collect(args.peak)
    isa, build = found["isa"], found["build"]
    devices = found["cuda_devices"]
    gpus = _names([_gpu(d) for d in devices])
    if not devices and found.get("cuda_unavailable"):
        gpus += f": {found['cuda_unavailable']}"
    rows = [
        ("libgdn", f"{found['version']}, ABI {found['abi']}, commit {build['git']}"),
        ("library", found["library"]),
        ("build", f"{build['compiler']}; CUDA backend: {'yes' if build['cuda'] else 'no'}"),
        ("CPU", f"{found['cpu']}, {found['cores']} cores"),
        ("ISAs compiled", _names(isa["compiled"])),
        ("ISAs usable here", _names(isa["usable"])),
        ("ISA in use", isa["active"]),
        ("threads", found["threads"]),
        ("GPUs", gpus if build["cuda"] else "not looked for: this build is CPU-only"),
        ("Python", f"{found['python']}, {found['system']}"),
        ("packages", _names([f"{name} {v or '-'}" for name, v in found["packages"].items()])),
    ]
    if "peak" in found:
        rows.append(("fp32 multiply-add peak", f"{found['peak']['fma_gflops']:.1f} GFLOP/s, measured now"))
        rows.append(("copy rate", f"{found['peak']['copy_gb_per_s']:.1f} GB/s read + written, measured now"))
    console.table(("", ""), rows, left=2)
    console.document(found)
    return 0
