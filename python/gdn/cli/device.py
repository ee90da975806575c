# SPDX-License-Identifier: MIT
"""``--device cuda``: which GPU a command works on, and calls whose tensors are copied there.

Memory, streams and graphs are PyTorch's; the calls are the C ABI's own, as on the CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from .. import _capi
from .console import UnavailableError, UsageError, need

_ALIGNMENT = 256  # device buffers keep their host address modulo this: misaligned views stay misaligned
_FLUSH_BYTES = 256 << 20  # a few times the L2 cache of today's GPUs


def add_device_flag(parser: Any) -> None:
    parser.add_argument("--device", default=None, metavar="NAME", help="cpu, cuda or cuda:N")


def parse_device(text: str | None) -> int | None:
    """Number of the GPU that the text names; None: the CPU (also without a text)."""
    text = text or "cpu"
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", text)
    if match is None:
        raise UsageError(f"argument '--device': found {text!r}, expected cpu, cuda or cuda:N")
    return None if text == "cpu" else int(match[1] or 0)


def device_id(args: argparse.Namespace) -> int | None:
    """Number of the GPU that --device names; None: the CPU."""
    return parse_device(args.device)


def require(device: int) -> Any:
    """torch, once this libgdn, PyTorch and the machine are known to have the GPU; says what is missing otherwise."""
    if not _capi.has_cuda():
        raise UnavailableError("--device cuda: this build of libgdn has no CUDA backend (see gdn info)")
    torch = need("torch", "--device cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device >= count:
        found = f"{count} CUDA devices" if count else "no CUDA device that PyTorch can use"
        raise UnavailableError(f"--device cuda: found {found}, expected device {device}")
    return torch


def _tensors(args: Any) -> Iterable[tuple[str, Any]]:
    """(field, gdn_tensor) of every tensor that a struct of arguments has."""
    for name, kind in args._fields_:
        if kind is ctypes.POINTER(_capi.Tensor):
            pointer = getattr(args, name)
            if pointer:
                yield name, pointer.contents


def _clone(args: Any) -> Any:
    clone = type(args)()
    ctypes.memmove(ctypes.byref(clone), ctypes.byref(args), ctypes.sizeof(args))
    return clone


class Placed:
    """The same arguments for a GPU, without any data: for plans."""

    def __init__(self, args: Any, device: int) -> None:
        self.args, self._keep = _clone(args), [args]
        for name, tensor in _tensors(args):
            placed = _capi.Tensor.from_buffer_copy(tensor)
            placed.device_type, placed.device_id, placed.data = _capi.CUDA, device, None
            self._keep.append(placed)
            setattr(self.args, name, ctypes.pointer(placed))


_SIZES = {_capi.F32: 4, _capi.BF16: 2, _capi.F16: 2, _capi.F64: 8, _capi.I32: 4, _capi.I64: 8, _capi.U8: 1}


def _span(tensor: Any) -> tuple[int, int]:
    """First byte and end of the memory between a view's first and last element."""
    begin, last = tensor.data or 0, 0
    for i in range(tensor.ndim):
        if tensor.shape[i] == 0:
            return begin, begin
        last += (tensor.shape[i] - 1) * tensor.strides[i]
    return begin, begin + (last + 1) * _SIZES[tensor.dtype]


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


class Mirror:
    """A prepared call on host memory, copied to a GPU: same bytes, same views, same overlaps, same misalignment.

    memory: (address, bytes) of more host memory to copy (guards around a buffer, say); what the tensors span always is.
    """

    def __init__(self, args: Any, device: int, memory: Iterable[tuple[int, int]] = ()) -> None:
        self._torch = require(device)
        self.device = self._torch.device("cuda", device)
        spans = [(address, address + size) for address, size in memory]
        spans += [_span(tensor) for _, tensor in _tensors(args)]
        self._regions = [(begin, end, self._buffer(begin, end)) for begin, end in _merged(spans)]
        self.args, self._keep = _clone(args), [args]
        self.upload()
        for name, tensor in _tensors(args):
            placed = _capi.Tensor.from_buffer_copy(tensor)
            placed.device_type, placed.device_id = _capi.CUDA, device
            placed.data = self._address(tensor.data or 0)
            self._keep.append(placed)
            setattr(self.args, name, ctypes.pointer(placed))

    def _buffer(self, begin: int, end: int) -> Any:
        """Device bytes at the same address modulo _ALIGNMENT."""
        block = self._torch.empty(end - begin + _ALIGNMENT, dtype=self._torch.uint8, device=self.device)
        offset = (begin - block.data_ptr()) % _ALIGNMENT
        return block[offset : offset + end - begin]

    def _host(self, begin: int, end: int) -> Any:
        return self._torch.frombuffer((ctypes.c_uint8 * (end - begin)).from_address(begin), dtype=self._torch.uint8)

    def locate(self, host: int) -> tuple[Any, int] | None:
        """The device bytes (uint8) that hold a host address, and where in them; None: no tensor spans it."""
        for begin, end, buffer in self._regions:
            if begin <= host < end:
                return buffer, host - begin
        return None

    def _address(self, host: int) -> int:
        """Where a host address went; an empty tensor's stays."""
        found = self.locate(host)
        return host if found is None else found[0].data_ptr() + found[1]

    def upload(self) -> None:
        for begin, end, buffer in self._regions:
            buffer.copy_(self._host(begin, end))

    def download(self) -> None:
        """Copies everything back over the host memory, after what is still running on the current stream."""
        for begin, end, buffer in self._regions:
            self._host(begin, end).copy_(buffer)

    def call(self, function: Any) -> None:
        """Launches on the current stream."""
        self.args.stream = self._torch.cuda.current_stream(self.device).cuda_stream
        _capi.check(function(ctypes.byref(self.args)))


def run_on(device: int | None, function: Any, args: Any) -> None:
    """One call: on the CPU as it is, on a GPU with its memory copied there and back."""
    if device is None:
        _capi.check(function(ctypes.byref(args)))
        return
    mirror = Mirror(args, device)
    mirror.call(function)
    mirror.download()


def explain_on(device: int | None, op: int, args: Any) -> dict[str, Any]:
    """gdn_explain of the call on that device."""
    return _capi.explain(op, args if device is None else Placed(args, device).args)


class Timer:
    """Times calls as replays of a captured graph, the L2 cache flushed before each."""

    def __init__(self, device: int) -> None:
        self._torch = torch = require(device)
        torch.cuda.set_device(device)
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def measure(self, call: Callable[[], None], seconds: float, reps: int, flush: bool = True) -> list[float]:
        """Seconds of every replay, between two events on the GPU; at least 3, more until `seconds` have passed."""
        torch = self._torch
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        self._replay(graph, 3, flush)  # warm-up
        samples = self._replay(graph, reps or 10, flush)
        while not reps and sum(samples) < seconds and len(samples) < 2000:
            samples += self._replay(graph, 50, flush)
        return samples

    def _replay(self, graph: Any, count: int, flush: bool) -> list[float]:
        """All replays are queued before the first is waited for: the host's own time does not count."""
        torch = self._torch
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in events:
            if flush:
                self._flush.zero_()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in events]

    def limits(self) -> tuple[float, float]:
        """(TFLOP/s of a bf16 matrix product, GB/s read + written of a copy), measured now."""
        torch = self._torch
        a, b = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        product = statistics.median(self.measure(lambda: torch.mm(a, b, out=out), 0, 10, flush=False))
        source = torch.zeros(min(1 << 30, torch.cuda.mem_get_info()[0] // 4), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        copy = statistics.median(self.measure(lambda: target.copy_(source), 0, 10, flush=False))
        return 2 * 8192**3 / product / 1e12, 2 * source.numel() / copy / 1e9
