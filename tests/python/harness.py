# SPDX-License-Identifier: MIT
"""Runs the shared cases through the C ABI.

Every output and every gap of a view is filled with NaN before the call and guard bytes surround each buffer; after it,
inputs, guards, gaps and all elements that the contract leaves alone must have their old bits.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gdn import _capi as capi
from gdn.cli.device import Mirror
from oracle.cases import DTYPES, Case, Inputs, Output, contract, draw, effective, expected, plan_slots

GUARD_BYTES = 4096
GUARD, FILL = 0xA5, 0xFF  # 0xFF.. is NaN in every float dtype and -1 in the index dtypes
DTYPE_CODES = {
    np.dtype(DTYPES[name]): code
    for name, code in {"f64": 4, "f32": 1, "bf16": 2, "f16": 3, "i32": 5, "i64": 6, "u8": 7}.items()
}
OPS = {"chunk_forward": capi.OP_CHUNK_FORWARD, "recurrent": capi.OP_RECURRENT}
BF16_BOUND = {"o": 5e-3, "state": 4.5e-3}


class Buffer:
    """A view inside guarded memory. order: axes from the slowest to the fastest; pads: unused elements at the end of
    each axis; steps: an element is used every `step` elements of its axis; offset: elements before the first one."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        order: tuple[int, ...] | None = None,
        pads: dict[int, int] | None = None,
        steps: dict[int, int] | None = None,
        offset: int = 0,
        name: str = "",
    ) -> None:
        self.name, self.dtype, self.shape = name, np.dtype(dtype), tuple(shape)
        order = order or tuple(range(len(shape)))
        pads, steps = pads or {}, steps or {}
        strides, span = [0] * len(shape), 1
        for axis in reversed(order):
            axis_id = axis - len(shape)  # negative ids in pads and steps count from the back
            step = steps.get(axis, steps.get(axis_id, 1))
            strides[axis] = span * step
            span *= max(shape[axis], 1) * step + pads.get(axis, pads.get(axis_id, 0))
        size = self.dtype.itemsize
        self.raw = np.full(2 * GUARD_BYTES + (span + offset) * size + 64, GUARD, np.uint8)
        start = GUARD_BYTES + (-(self.raw.ctypes.data + GUARD_BYTES)) % 64
        self._inner = slice(start, start + (span + offset) * size)
        self.raw[self._inner] = FILL
        self._first = offset
        self.strides = tuple(strides)
        self.view = self._strided(self.raw[self._inner].view(self.dtype))
        self._before: np.ndarray | None = None

    def _strided(self, flat: np.ndarray) -> np.ndarray:
        bytes_ = tuple(s * flat.itemsize for s in self.strides)
        return np.lib.stride_tricks.as_strided(flat[self._first :], self.shape, bytes_, writeable=True)

    def set(self, value: np.ndarray) -> Buffer:
        self.view[...] = value
        return self

    def tensor(self) -> capi.Tensor:
        t = capi.Tensor()
        t.data = self.raw.ctypes.data + self._inner.start + self._first * self.dtype.itemsize
        t.device_type, t.dtype, t.ndim = capi.CPU, DTYPE_CODES[self.dtype], len(self.shape)
        for i, (n, s) in enumerate(zip(self.shape, self.strides, strict=True)):
            t.shape[i], t.strides[i] = n, s
        return t

    def remember(self) -> None:
        self._before = self.raw.copy()

    def assert_kept(self, written: np.ndarray | None = None) -> None:
        """All bytes are as remembered, except elements under `written` (bool, leading axes of the view)."""
        changed = np.flatnonzero(self.raw != self._before)
        if changed.size == 0:
            return
        if written is not None and written.any():
            size = self.dtype.itemsize
            allowed = np.zeros((self._inner.stop - self._inner.start) // size, bool)
            self._strided(allowed)[...] |= written.reshape(written.shape + (1,) * (len(self.shape) - written.ndim))
            mask = np.zeros(self.raw.size, bool)
            mask[self._inner] = np.repeat(allowed, size)
            changed = changed[~mask[changed]]
        if changed.size:
            at = int(changed[0]) - self._inner.start
            raise AssertionError(
                f"{self.name}: {changed.size} bytes changed that belong to nobody, first at byte {at} of the buffer "
                f"of {self._inner.stop - self._inner.start} bytes (shape {self.shape}, strides {self.strides})"
            )


def describe_worst(got: np.ndarray, want: np.ndarray) -> str:
    """Worst index and both values; a NaN is the worst."""
    difference = np.abs(got - want)
    difference = np.where(np.isnan(difference), np.inf, difference)
    index = np.unravel_index(int(np.argmax(difference)), got.shape)
    return f"worst at {tuple(int(i) for i in index)}: found {got[index]!r}, expected {want[index]!r}"


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """||got - want|| / ||want||; infinite where got is not finite; exact zeros expected where want is all zero."""
    if got.size == 0:
        return 0.0
    if not np.isfinite(got).all():
        return np.inf
    norm = float(np.linalg.norm(want))
    error = float(np.linalg.norm(got - want))
    if norm == 0:
        return 0.0 if error == 0 else np.inf
    return error / norm


def _shape_args(case: Case, shape: tuple[int, ...]) -> dict[str, Any]:
    """Buffer arguments that a layout means for a token tensor [B, T, H, D] or [B, T, H]."""
    layout = case.layout
    if layout in ("contiguous", "packed"):
        return {}
    if layout == "misaligned":
        return {"offset": 1}
    if layout == "padded":
        return {"pads": {-1: 3}, "offset": 1}
    if layout == "strided":
        return {"steps": {-1: 2}, "offset": 1}
    if layout == "batch_step":
        return {"steps": {0: 2}}
    if layout == "head_major":
        return {"order": (0, 2, 1, 3)[: len(shape)] if len(shape) == 4 else (0, 2, 1)}
    if layout == "gates_interleaved":
        return {"steps": {-1: 2}} if len(shape) == 3 else {}
    if layout == "storage_rows":
        return {"pads": {-1: 128}} if len(shape) == 4 else {}
    raise ValueError(f"{case.id}: layout {layout!r}")


def _packed(arrays: list[np.ndarray], names: list[str]) -> list[Buffer]:
    """q, k, v as views of one row [q | k | v] per token; the first buffer owns the memory."""
    sizes = [a.shape[2] * a.shape[3] for a in arrays]
    owner = Buffer((*arrays[0].shape[:2], sum(sizes)), arrays[0].dtype, name="packed q|k|v")
    buffers, begin = [], 0
    for a, size, name in zip(arrays, sizes, names, strict=True):
        part = object.__new__(Buffer)
        part.__dict__.update(owner.__dict__)
        part.name, part.shape, part._first = name, a.shape, begin
        part.strides = (owner.strides[0], owner.strides[1], a.shape[3], 1)
        part.view = part._strided(owner.raw[owner._inner].view(owner.dtype))
        part.set(a)
        buffers.append(part)
        begin += size
    return buffers


class Call:
    """One prepared call of gdn_chunk_forward or gdn_recurrent."""

    def __init__(
        self,
        case: Case,
        x: Inputs,
        op: str,
        impl: str | None = None,
        num_threads: int = 0,
        device: int | None = None,
    ) -> None:
        self.case, self.x, self.op = case, x, op
        self.device = device  # number of a GPU: the call runs there, on copies of all buffers with their guards
        self.inputs: dict[str, Buffer] = {}
        self.outputs: dict[str, Buffer] = {}
        self.args = capi.RuleArgs()
        self.args.struct_size = ctypes.sizeof(capi.RuleArgs)
        self._keep: list[Any] = []
        self._tokens()
        self._states()
        a = self.args
        a.gate_form = capi.GATE_FORMS[case.gate_form]
        a.beta_form = capi.BETA_FORMS[case.beta_form]
        a.head_map = capi.HEAD_MAPS[case.head_map]
        a.state_layout = capi.STATE_LAYOUTS[case.state_layout]
        a.null_slots = capi.NULL_SLOTS[case.null_slots]
        a.qk_l2norm, a.round_qk, a.round_beta = int(case.qk_l2norm), int(case.round_qk), int(case.round_beta)
        a.scale, a.batch_invariant, a.num_threads = case.scale, int(case.batch_invariant), num_threads
        a.checkpoint_every = case.checkpoint_every or 0
        a.impl = impl.encode() if impl else None

    def _attach(self, field: str, buffer: Buffer, tensor: capi.Tensor | None = None) -> None:
        tensor = tensor or buffer.tensor()
        self._keep.append(tensor)
        setattr(self.args, field, ctypes.pointer(tensor))

    def _input(self, field: str, buffer: Buffer, tensor: capi.Tensor | None = None) -> None:
        self.inputs[field] = buffer
        self._attach(field, buffer, tensor)

    def _index(self, field: str, values: Any) -> None:
        if values is not None:
            array = np.asarray(values, DTYPES[self.case.index_dtype])
            self._input(field, Buffer(array.shape, array.dtype, name=field).set(array))

    def _tokens(self) -> None:
        case, x = self.case, self.x
        named = {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "beta": x.beta}
        if case.layout == "packed":
            for name, buffer in zip("qkv", _packed([x.q, x.k, x.v], ["q", "k", "v"]), strict=True):
                self._input(name, buffer)
                del named[name]
        for name, value in named.items():
            if value is not None:
                buffer = Buffer(value.shape, value.dtype, name=name, **_shape_args(case, value.shape))
                self._input(name, buffer.set(value))
        for name, value in (("A_log", x.A_log), ("dt_bias", x.dt_bias)):
            if value is not None:
                self._input(name, Buffer(value.shape, value.dtype, name=name).set(value))
        o_dtype = DTYPES[case.o_dtype or case.q_dtype or case.dtype]
        self._output("o", Buffer(x.v.shape, o_dtype, name="o", **_shape_args(case, x.v.shape)))
        if x.varlen:
            self._index("cu_seqlens", np.concatenate([[0], np.cumsum(x.lens)]))

    def _output(self, field: str, buffer: Buffer, tensor: capi.Tensor | None = None) -> None:
        self.outputs[field] = buffer
        self._attach(field, buffer, tensor)

    def _state_buffer(self, name: str, leading: tuple[int, ...], dtype: Any) -> tuple[Buffer, capi.Tensor]:
        """A K-first view (for NumPy) of a state tensor, and the tensor in the case's layout."""
        case, depth = self.case, len(leading)
        v_first = case.state_layout == "v_first"
        shape = (*leading, case.Hv, case.K, case.V)
        axes = list(range(len(shape)))
        if v_first:
            axes[-1], axes[-2] = axes[-2], axes[-1]
        pads = {}
        if case.state_pad == "row":
            pads = {axes[-1]: 5}
        elif case.state_pad == "slot":
            pads = {depth: 2}  # two more heads' worth of memory between slots
        buffer = Buffer(shape, dtype, order=tuple(axes), pads=pads, name=name)
        tensor = buffer.tensor()
        if v_first:
            i, j = len(shape) - 2, len(shape) - 1
            for array in (tensor.shape, tensor.strides):
                array[i], array[j] = array[j], array[i]
        return buffer, tensor

    def _states(self) -> None:
        case, x = self.case, self.x
        count = len(x.sequences())
        state_dtype = DTYPES[case.state_dtype]
        if x.initial is not None:
            buffer, tensor = self._state_buffer("initial_state", x.initial.shape[:1], state_dtype)
            buffer.set(x.initial)
            if case.final == "in_place":
                buffer.name = "final_state (in place)"
                self._attach("initial_state", buffer, tensor)
                self._output("final_state", buffer, tensor)
            else:
                self._input("initial_state", buffer, tensor)
        if case.final == "separate":
            dtype = DTYPES[case.final_dtype or case.state_dtype]
            rows = case.slots if case.write is not None else count
            self._output("final_state", *self._state_buffer("final_state", (rows,), dtype))
        if case.token_slots is None:
            self._index("initial_state_indices", case.read)
            self._index("final_state_indices", case.write)
        self._index("has_initial_state", case.has_initial)
        self._index("token_state_indices", case.token_slots)
        self._index("num_accepted", case.num_accepted)
        if case.snapshots:
            self._output("snapshots", *self._state_buffer("snapshots", (count, case.snapshots), state_dtype))
        if case.checkpoint_every:
            rows = case.checkpoint_slots or max(sum(n // case.checkpoint_every for _, _, n in x.sequences()), 1)
            dtype = DTYPES[case.checkpoint_dtype or case.state_dtype]
            self._output("checkpoints", *self._state_buffer("checkpoints", (rows,), dtype))
            self._index("checkpoint_indices", case.checkpoint_rows)

    def explain(self) -> dict[str, Any]:
        # On a GPU of the mirrored call: what an implementation takes depends on the addresses, too.
        if self.device is None:
            return capi.explain(OPS[self.op], self.args)
        mirror = self.mirror()  # kept while its tensors are looked at
        return capi.explain(OPS[self.op], mirror.args)

    def mirror(self) -> Mirror:
        """All buffers on the GPU, guards included."""
        raws = [buffer.raw for buffer in (*self.inputs.values(), *self.outputs.values())]
        return Mirror(self.args, self.device, [(raw.ctypes.data, raw.size) for raw in raws])

    def run(self) -> None:
        function = capi.lib.gdn_chunk_forward if self.op == "chunk_forward" else capi.lib.gdn_recurrent
        if self.device is None:
            capi.check(function(ctypes.byref(self.args)))
            return
        mirror = self.mirror()
        mirror.call(function)
        mirror.download()

    def run_checked(self, want: dict[str, Output]) -> None:
        """Runs; then everything that the contract leaves alone must have its old bits."""
        for buffer in (*self.inputs.values(), *self.outputs.values()):
            buffer.remember()
        self.run()
        for buffer in self.inputs.values():
            buffer.assert_kept()
        for field, buffer in self.outputs.items():
            buffer.assert_kept(want[OUTPUT_KEYS[field]].written)


OUTPUT_KEYS = {"o": "o", "final_state": "final", "checkpoints": "checkpoints", "snapshots": "snapshots"}


@lru_cache(maxsize=4)
def _cached(key: str, case: _Hashed) -> tuple[Inputs, dict[str, Output]]:
    inputs = draw(case.case)
    return inputs, expected(case.case, inputs)


@dataclass(frozen=True)
class _Hashed:
    """A case as a cache key."""

    text: str
    case: Case

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self.text == other.text


def inputs_and_oracle(case: Case) -> tuple[Inputs, dict[str, Output]]:
    """Inputs and fp64 outputs of a case; the last few cases are kept."""
    key = {k: v for k, v in case.items() if k not in ("ops", "contract", "layout", "batch_invariant", "state_pad")}
    return _cached(case.id, _Hashed(repr(sorted(key.items())), case))


@dataclass
class Result:
    """Errors of one run by output name, and the plan it ran with."""

    errors: dict[str, float]
    bounds: dict[str, float]
    impl: str
    isa: str
    values: dict[str, np.ndarray]


def bound_of(case: Case, op: str, impl: str, output: str, buffer: Buffer) -> float:
    """The contract's bound; a 16-bit tensor has at least the bound of 16-bit data."""
    bounds = contract(case)
    kind = "o" if output == "o" else "state"
    limit = bounds[kind]
    if "recurrent" in bounds and (op == "recurrent" or impl.startswith("reference")):
        limit = bounds["recurrent"]
    return max(limit, BF16_BOUND[kind]) if buffer.dtype.itemsize == 2 else limit


def loop_errors(case: Case, x: Inputs, want: dict[str, Output]) -> dict[str, float]:
    """Error of the same recurrence in fp32: the yardstick where the recurrence itself expands."""
    loop = expected(case, x, np.float32)
    return {
        name: relative_error(loop[name].value[w.written].astype(np.float64), w.value[w.written])
        for name, w in want.items()
    }


def run_case(case: Case, op: str, impl: str | None = None, num_threads: int = 0, device: int | None = None) -> Result:
    """Runs a case once and asserts its whole contract."""
    x, want = inputs_and_oracle(case)
    call = Call(case, x, op, impl, num_threads, device)
    plan = call.explain()
    call.run_checked(want)
    where = f"{case.id} ({op}, {plan['impl']})"
    ratio = contract(case).get("loop_ratio")
    loop = loop_errors(case, x, want) if ratio else {}
    errors, bounds, values, problems = {}, {}, {}, []
    for field, buffer in call.outputs.items():
        name = OUTPUT_KEYS[field]
        written = want[name].written
        got, ref = buffer.view[written].astype(np.float64), want[name].value[written]
        errors[name] = relative_error(got, ref)
        if ratio:
            bounds[name] = max(ratio * loop[name], 5e-6)
        else:
            bounds[name] = bound_of(case, op, plan["impl"], name, buffer)
        values[name] = buffer.view
        if errors[name] > bounds[name]:
            problems.append(
                f"{where} {name}: relative L2 error {errors[name]:.2e}, bound {bounds[name]:.1e}; "
                f"{describe_worst(got, ref)}"
            )
        if name == "o" and case.max_mean_abs and got.size and np.abs(got - ref).mean() >= case.max_mean_abs:
            problems.append(f"{where} o: mean absolute error {np.abs(got - ref).mean():.2e} >= {case.max_mean_abs}")
    slots, o = plan_slots(case, x), call.outputs["o"].view
    for n, (b, begin, length) in enumerate(x.sequences()):
        if slots.null[n] and np.any(o[b, begin : begin + length] != 0):
            problems.append(f"{where}: o rows of null sequence {n} are not zero")
    assert not problems, "\n".join(problems)
    return Result(errors, bounds, plan["impl"], plan.get("isa", ""), values)


def implementations(case: Case, op: str, device: int | None = None) -> list[str]:
    """Names of the implementations that accept a case on this machine."""
    x, _ = inputs_and_oracle(case)
    candidates = Call(case, x, op, device=device).explain()["candidates"]
    return [c["impl"] for c in candidates if c["accepted"]]


__all__ = [
    "Buffer",
    "Call",
    "Result",
    "capi",
    "describe_worst",
    "effective",
    "implementations",
    "inputs_and_oracle",
    "loop_errors",
    "relative_error",
    "run_case",
]
