# SPDX-License-Identifier: MIT
"""The case list on a GPU: through the C ABI with guarded buffers, for every implementation that accepts, and through
gdn.torch on the same views."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gdn.torch as ops
from cuda_support import needs_cuda
from gdn._capi import Tensor
from gdn.cli.device import Mirror
from harness import DTYPE_CODES, Call, bound_of, contract, implementations, inputs_and_oracle, loop_errors, run_case
from harness import relative_error as error_of
from oracle.cases import DTYPES, Case, load_cases

pytestmark = needs_cuda
CASES = load_cases()
_TORCH = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i32": torch.int32, "i64": torch.int64,
    "u8": torch.uint8, "f64": torch.float64,
}  # fmt: skip
TORCH_DTYPES = {DTYPE_CODES[np.dtype(DTYPES[name])]: dtype for name, dtype in _TORCH.items() if name in DTYPES}


def _params(cases: list[Case]) -> list[Any]:
    slow = {True: pytest.mark.slow, False: ()}
    return [pytest.param(c, op, id=f"{c.id}-{op}", marks=slow[c.slow]) for c in cases for op in c.ops]


@pytest.mark.parametrize(("case", "op"), _params(CASES))
def test_case(case: Case, op: str) -> None:
    names = implementations(case, op, device=0)
    assert names, f"{case.id}: no CUDA implementation accepts"
    for impl in names:
        assert run_case(case, op, impl, device=0).impl == impl
    assert run_case(case, op, device=0).impl == names[0]  # the first that accepts is the one that runs
    if _in_torch(case):
        _run_torch(case, op)


def _in_torch(case: Case) -> bool:
    """gdn.torch allocates o in v's dtype and a separate final state in float32, one row per sequence."""
    separate_pool = case.final == "separate" and (case.write is not None or case.token_slots is not None)
    more_outputs = case.checkpoint_every or case.snapshots or case.token_slots is not None
    return not separate_pool and not (more_outputs and case.final != "in_place")


def _view(mirror: Mirror, tensor: Tensor) -> torch.Tensor:
    """A host tensor of the call as a torch tensor of the mirrored memory, with the same strides."""
    dtype = TORCH_DTYPES[tensor.dtype]
    shape, strides = list(tensor.shape[: tensor.ndim]), list(tensor.strides[: tensor.ndim])
    found = mirror.locate(tensor.data)
    if found is None or 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype, device=mirror.device)
    buffer, skip = found
    size = (buffer.numel() - skip) // dtype.itemsize * dtype.itemsize
    flat = buffer[skip : skip + size].view(dtype)
    return flat.as_strided(shape, strides, flat.storage_offset())


def _arguments(case: Case, call: Call, mirror: Mirror) -> dict[str, Any]:
    """Keyword arguments of gdn.torch's function for a case."""
    names = "q k v g beta A_log dt_bias cu_seqlens initial_state initial_state_indices has_initial_state".split()
    if case.final == "in_place":
        names += ["final_state_indices"]
        names += ["checkpoints", "checkpoint_indices"] if call.op == "chunk_forward" else []
        names += ["token_state_indices", "num_accepted", "snapshots"] if call.op == "recurrent" else []
    kwargs: dict[str, Any] = {}
    for name in names:
        pointer = getattr(call.args, name)
        kwargs[name] = _view(mirror, pointer.contents) if pointer else None
    if kwargs.get("checkpoints") is not None:
        kwargs["checkpoint_every"] = case.checkpoint_every
    return kwargs | {
        "gate": case.gate_form,
        "beta_form": case.beta_form,
        "head_map": case.head_map,
        "scale": case.scale or None,
        "qk_l2norm": case.qk_l2norm,
        "state_layout": case.state_layout,
        "null_slots": case.null_slots,
        "round_qk": case.round_qk,
        "round_beta": case.round_beta,
        "batch_invariant": case.batch_invariant,
        "output_final_state": case.final == "separate",
        "inplace": case.final == "in_place",
    }


def _run_torch(case: Case, op: str) -> None:
    """The same case through gdn.torch: results against the oracle, rows that the call does not write are zero."""
    x, want = inputs_and_oracle(case)
    call = Call(case, x, op, device=0)
    impl = call.explain()["impl"]
    mirror = call.mirror()
    with torch.no_grad():
        o, state = getattr(ops, op)(**_arguments(case, call, mirror))
    mirror.download()  # what was updated in place, and a wait
    found = {"o": o.double().cpu().numpy()}
    if case.final == "separate":
        state = state.double().cpu().numpy()
        found["final"] = state.swapaxes(-1, -2) if case.state_layout == "v_first" else state
    ratio = contract(case).get("loop_ratio")
    loop = loop_errors(case, x, want) if ratio else {}
    fields = {"o": "o", "final": "final_state"}
    for name, value in found.items():
        written = want[name].written
        error = error_of(value[written], want[name].value[written])
        bound = max(ratio * loop[name], 5e-6) if ratio else bound_of(case, op, impl, name, call.outputs[fields[name]])
        if name == "o" and o.dtype.itemsize == 2:
            bound = max(bound, 5e-3)
        assert error <= bound, f"{case.id} ({op}, torch) {name}: relative L2 error {error:.2e}, bound {bound:.1e}"
        assert not value[~written].any(), f"{case.id} ({op}, torch) {name}: what the call does not write is not zero"
    if case.final == "in_place":
        buffer, written = call.outputs["final_state"], want["final"].written
        error = error_of(buffer.view[written].astype(np.float64), want["final"].value[written])
        bound = max(ratio * loop["final"], 5e-6) if ratio else bound_of(case, op, impl, "final", buffer)
        assert error <= bound, (
            f"{case.id} ({op}, torch) state in place: relative L2 error {error:.2e}, bound {bound:.1e}"
        )


def test_torch_takes_most_cases() -> None:
    """_in_torch leaves few cases to the C ABI alone."""
    taken = [case for case in CASES if _in_torch(case)]
    assert len(taken) > 0.8 * len(CASES)
