# SPDX-License-Identifier: MIT
"""What the tests on a GPU share: when they run, captured graphs, and ways to notice a wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gdn import _capi

SLEEP_CYCLES = 400_000_000  # about 0.2 s at a GPU's clock: nothing that a host does in a call takes as long


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not _capi.has_cuda():
        return "this build of libgdn has no CUDA backend"
    return None


needs_cuda = pytest.mark.skipif(_why_not() is not None, reason=_why_not() or "")


def to_cuda(value: Any) -> Any:
    """Tensors inside tuples, lists and dicts, on the GPU with their strides."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, (tuple, list)):
        return type(value)(to_cuda(v) for v in value)
    if isinstance(value, dict):
        return {name: to_cuda(v) for name, v in value.items()}
    return value


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of the call, and the call's results as the graph writes them. A wait or an allocation by libgdn inside
    the call makes the capture fail."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


@contextmanager
def busy_gpu() -> Iterator[Callable[[], bool]]:
    """The GPU sleeps on the current stream; the function that it gives says whether it still does."""
    done = torch.cuda.Event()
    torch.cuda._sleep(SLEEP_CYCLES)
    done.record()
    try:
        yield lambda: not done.query()
    finally:
        torch.cuda.synchronize()


@contextmanager
def torch_refuses_waits() -> Iterator[None]:
    """Every wait that PyTorch knows of raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
