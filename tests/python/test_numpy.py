# SPDX-License-Identifier: MIT
"""gdn.numpy and the ctypes binding, without torch."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import gdn
import gdn.numpy as ops
from gdn import _capi

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from oracle.recurrence import l2norm, recurrence, sigmoid

HEADER = Path(__file__).resolve().parents[2] / "include"
STRUCTS = {
    "gdn_tensor": _capi.Tensor,
    "gdn_rule_args": _capi.RuleArgs,
    "gdn_conv1d_args": _capi.Conv1dArgs,
    "gdn_gate_args": _capi.GateArgs,
    "gdn_rmsnorm_gated_args": _capi.RmsnormGatedArgs,
    "gdn_glu_args": _capi.GluArgs,
    "gdn_qk_rmsnorm_rope_args": _capi.QkRmsnormRopeArgs,
}
ENUMS = {
    "GDN_INVALID_ARGUMENT": _capi.INVALID_ARGUMENT,
    "GDN_UNSUPPORTED": _capi.UNSUPPORTED,
    "GDN_OUT_OF_MEMORY": _capi.OUT_OF_MEMORY,
    "GDN_INTERNAL": _capi.INTERNAL,
    "GDN_F32": _capi.F32,
    "GDN_BF16": _capi.BF16,
    "GDN_F16": _capi.F16,
    "GDN_F64": _capi.F64,
    "GDN_I32": _capi.I32,
    "GDN_I64": _capi.I64,
    "GDN_U8": _capi.U8,
    "GDN_GATE_RAW": _capi.GATE_FORMS["raw"],
    "GDN_GATE_LINEAR": _capi.GATE_FORMS["linear"],
    "GDN_BETA_SIGMOID": _capi.BETA_FORMS["sigmoid"],
    "GDN_BETA_SIGMOID2": _capi.BETA_FORMS["sigmoid2"],
    "GDN_HEADS_TILED": _capi.HEAD_MAPS["tiled"],
    "GDN_STATE_V_FIRST": _capi.STATE_LAYOUTS["v_first"],
    "GDN_NULL_NON_POSITIVE": _capi.NULL_SLOTS["non_positive"],
    "GDN_ACT_SILU": _capi.ACTIVATIONS["silu"],
    "GDN_ACT_SIGMOID": _capi.ACTIVATIONS["sigmoid"],
    "GDN_OP_RECURRENT": _capi.OP_RECURRENT,
    "GDN_MAX_DIMS": _capi.MAX_DIMS,
}


def test_structs_match_the_header(tmp_path: Path) -> None:
    """Size, and offset and size of every field, and the enums, as a C compiler sees them."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "a C compiler is needed"
    lines = []
    for name, struct in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in struct._fields_:
            lines.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));'
            )
    lines += [f'printf("{name} %d\\n", (int){name});' for name in ENUMS]
    source = "#include <stdio.h>\n#include <gdn/gdn.h>\nint main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    (tmp_path / "layout.c").write_text(source)
    subprocess.run([compiler, f"-I{HEADER}", "-o", "layout", "layout.c"], cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout.splitlines()
    want = []
    for name, struct in STRUCTS.items():
        want.append(f"{name} {ctypes.sizeof(struct)}")
        for field, _ in struct._fields_:
            want.append(f"{name}.{field} {getattr(struct, field).offset} {getattr(struct, field).size}")
    want += [f"{name} {value}" for name, value in ENUMS.items()]
    assert printed == want


def test_every_field_of_the_header_is_mirrored() -> None:
    text = (HEADER / "gdn" / "gdn.h").read_text()
    for name, struct in STRUCTS.items():
        body = text.split(f"typedef struct {name} {{")[1].split(f"}} {name};")[0]
        for field, _ in struct._fields_:
            assert field in body
        assert body.count(";") - _semicolons_in_comments(body) == len(struct._fields_), name


def _semicolons_in_comments(body: str) -> int:
    comments = [part.split("*/")[0] for part in body.split("/*")[1:]]
    return sum(comment.count(";") for comment in comments)


def _inputs(dtype=np.float32, tokens=23, seed=0):
    r = np.random.default_rng(seed)
    q, k = (l2norm(r.standard_normal((2, tokens, 2, 16))).astype(dtype) for _ in range(2))
    v = r.standard_normal((2, tokens, 4, 24)).astype(dtype)
    g = -r.random((2, tokens, 4)).astype(np.float32) / 8
    beta = r.random((2, tokens, 4)).astype(dtype)
    state = r.standard_normal((2, 4, 16, 24)).astype(np.float32)
    return q, k, v, g, beta, state


def _error(found, want) -> float:
    found = np.asarray(found, np.float64)
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rule", [ops.chunk_forward, ops.recurrent])
def test_rule(dtype, rule) -> None:
    q, k, v, g, beta, state = _inputs(dtype)
    want_o, want_s = recurrence(q, k, v, g, beta, 0.25, state)
    o, s = rule(q, k, v, g, beta, initial_state=state, output_final_state=True)
    assert o.dtype == dtype and s.dtype == np.float32
    assert _error(o, want_o) <= (5e-6 if dtype == np.float32 else 5e-3)
    assert _error(s, want_s) <= (5e-6 if dtype == np.float32 else 4.5e-3)


def test_out_and_inplace_and_strides() -> None:
    q, k, v, g, beta, state = _inputs(tokens=1)
    want_o, want_s = recurrence(q, k, v, g, beta, 0.25, state)
    big = np.full((4, 1, 4, 48), np.nan, np.float32)
    out = big[::2, :, :, ::2]
    pool = np.full((2, 4, 16, 32), np.nan, np.float32)
    pool[..., :24] = state
    view = pool[..., :24]
    o, s = ops.recurrent(q, k, v, g, beta, initial_state=view, final_state=view, out=out)
    assert o is out and s is view
    assert _error(out, want_o) <= 5e-6 and _error(view, want_s) <= 5e-6
    assert np.isnan(big[1::2]).all() and np.isnan(big[..., 1::2]).all() and np.isnan(pool[..., 24:]).all()


class _Interface:
    """Only __array_interface__, as many array libraries have."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.__array_interface__ = array, array.__array_interface__


class _Dlpack:
    """Only DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_protocols() -> None:
    q, k, v, g, beta, _ = _inputs()
    want, _ = ops.chunk_forward(q, k, v, g, beta)
    out = np.empty_like(v)
    ops.chunk_forward(_Interface(q), _Dlpack(k), memoryview(v), _Dlpack(g[::1]), _Interface(beta), out=_Dlpack(out))
    np.testing.assert_array_equal(out, want)
    strided = np.zeros((2, 23, 2, 32), np.float32)
    strided[..., ::2] = k
    o, _ = ops.chunk_forward(q, _Dlpack(strided[..., ::2]), v, g, beta)
    np.testing.assert_array_equal(o, want)
    writable = bytearray(v.nbytes)
    ops.chunk_forward(q, k, v, g, beta, out=memoryview(writable).cast("f", v.shape))
    np.testing.assert_array_equal(np.frombuffer(writable, np.float32).reshape(v.shape), want)


def test_torch_tensors_through_dlpack() -> None:
    torch = pytest.importorskip("torch")
    q, k, v, g, beta, _ = _inputs()
    want, _ = ops.chunk_forward(*(a.astype(ml_dtypes.bfloat16) for a in (q, k, v)), g, beta)
    tensors = [torch.from_numpy(a).bfloat16() for a in (q, k, v)]
    o, _ = ops.chunk_forward(*tensors, torch.from_numpy(g), torch.from_numpy(beta))
    assert o.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(o.view(np.uint16), want.view(np.uint16))


def test_conv_gate_norm_rotary() -> None:
    r = np.random.default_rng(1)
    x, weight = r.standard_normal((2, 9, 6)).astype(np.float32), r.standard_normal((6, 4)).astype(np.float32)
    y = ops.causal_conv1d(x.transpose(0, 2, 1), weight, activation="silu")
    padded = np.concatenate([np.zeros((2, 3, 6)), x], 1)
    want = sum(padded[:, j : j + 9] * weight[:, j] for j in range(4)).transpose(0, 2, 1)
    assert y.shape == (2, 6, 9) and y.strides[1] == 4 and _error(y, want * sigmoid(want)) <= 2e-6
    state = np.zeros((2, 6, 3), np.float32)
    for t in range(9):
        step = ops.causal_conv1d(x.transpose(0, 2, 1)[..., t : t + 1], weight, initial_state=state, final_state=state)
        assert _error(step[..., 0], want[..., t]) <= 2e-6

    a = r.standard_normal((3, 4)).astype(np.float32)
    g, beta = ops.gate(a, a, np.zeros(4, np.float32))
    assert _error(g, -np.log1p(np.exp(a.astype(np.float64)))) <= 1e-6 and _error(beta, sigmoid(a)) <= 1e-6
    assert ops.gate(b=a)[0] is None

    n = ops.rmsnorm_gated(a, eps=0.0)
    assert _error(n, a / np.sqrt((a.astype(np.float64) ** 2).mean(-1, keepdims=True))) <= 1e-6
    q = r.standard_normal((1, 2, 3, 8)).astype(np.float32)
    q_out, k_out, gate = ops.qk_rmsnorm_rope(
        np.concatenate([q, q], -1), q, positions=np.zeros((1, 2), np.int64), theta=1e4, rotary_dim=4, q_has_gate=True
    )
    np.testing.assert_array_equal(q_out, k_out)
    np.testing.assert_array_equal(gate, q)
    assert _error(k_out, q / np.sqrt((q.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)) <= 1e-6


def test_errors() -> None:
    q, k, v, _, _, state = _inputs()
    with pytest.raises(gdn.InvalidArgumentError, match=r"chunk_forward: argument 'k': found shape \[2, 23, 2, 15\]"):
        ops.chunk_forward(q, k[..., :15], v)
    with pytest.raises(ValueError, match="argument 'q': found None"):
        ops.chunk_forward(None, k, v)
    with pytest.raises(gdn.InvalidArgumentError, match="argument 'q': found dtype complex64"):
        ops.chunk_forward(q.astype(np.complex64), k, v)
    with pytest.raises(gdn.InvalidArgumentError, match="'q': found dtype >f4"):
        ops.chunk_forward(q.astype(">f4"), k, v)
    frozen = np.empty_like(v)
    frozen.flags.writeable = False
    with pytest.raises(gdn.InvalidArgumentError, match="'out': found a read-only array"):
        ops.chunk_forward(q, k, v, out=frozen)
    with pytest.raises(gdn.InvalidArgumentError, match="argument 'v'.*negative|argument 'v'.*stride"):
        ops.chunk_forward(q, k, v[:, ::-1])
    with pytest.raises(NotImplementedError, match="K = 600"):
        ops.recurrent(np.zeros((1, 1, 1, 600), np.float32), np.zeros((1, 1, 1, 600), np.float32), v[:1, :1, :1])
    with pytest.raises(gdn.InvalidArgumentError, match="'state_layout': found 'KV'"):
        ops.chunk_forward(q, k, v, state_layout="KV")
    with pytest.raises(TypeError, match="initial_sate"):
        ops.chunk_forward(q, k, v, initial_sate=state)
    with pytest.raises(gdn.InvalidArgumentError, match=r"causal_conv1d: argument 'x': found 2 dimensions"):
        ops.causal_conv1d(q[0, 0], q[0, 0])
    device = _Dlpack(q)
    device.__class__ = type("_Cuda", (_Dlpack,), {"__dlpack_device__": lambda self: (2, 0)})
    with pytest.raises(gdn.InvalidArgumentError, match="'q': found an array on DLPack device type 2.*gdn.torch takes"):
        ops.chunk_forward(device, k, v)


def test_library_functions() -> None:
    assert gdn.__version__ == gdn.version() and gdn.abi_version() == 1
    info = gdn.info()
    assert info["version"] == gdn.__version__ and gdn.get_isa() == info["isa"]["active"]
    threads = gdn.get_num_threads()
    gdn.set_num_threads(1)
    assert gdn.get_num_threads() == 1
    gdn.set_num_threads(0)
    assert gdn.get_num_threads() == threads
    with pytest.raises(gdn.InvalidArgumentError):
        gdn.set_num_threads(-1)
    with pytest.raises(gdn.Error, match="sse9"):
        gdn.set_isa("sse9")
    gdn.release_memory()


def _python(code: str) -> str:
    """Runs code in a fresh process where importing torch fails."""
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers'):\n"
        "            raise ModuleNotFoundError('No module named ' + repr(name), name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    result = subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_without_torch() -> None:
    code = (
        "import numpy as np, gdn, gdn.numpy\n"
        "x = np.ones((1, 3, 1, 8), np.float32)\n"
        "o, s = gdn.numpy.chunk_forward(x, x, x, output_final_state=True)\n"
        "print(o.shape, s.shape, 'torch' in sys.modules)\n"
        "try: gdn.chunk_gated_delta_rule\n"
        "except ModuleNotFoundError as e: print(e)\n"
    )
    assert _python(code).splitlines() == ["(1, 3, 1, 8) (1, 1, 8, 8) False", "No module named 'torch'"]


def test_import_is_light() -> None:
    """import gdn loads neither torch nor numpy, and knows its submodules."""
    code = "import gdn\nprint('torch' in sys.modules, 'numpy' in sys.modules, 'hf' in dir(gdn))"
    assert _python(code) == "False False True"
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = gdn.no_such_name


@pytest.mark.parametrize("op", ["chunk_forward", "recurrent"])
def test_nan_gates_show(op: str) -> None:
    """A NaN in any gate form or logit reaches every later output, as in the recurrence."""
    run = getattr(gdn.numpy, op)
    x = np.full((1, 8, 1, 4), 0.5, np.float32)
    bad, zero = np.zeros((1, 8, 1), np.float32), np.zeros((1, 8, 1), np.float32)
    bad[0, 3] = np.nan
    a_log = np.zeros(1, np.float32)
    calls = [
        dict(g=bad, beta=zero),
        dict(g=bad + 1, beta=zero, gate="linear"),
        dict(g=bad, beta=zero, gate="raw", A_log=a_log),
        dict(g=zero, beta=bad, beta_form="sigmoid"),
        dict(g=zero, beta=bad),
    ]
    for options in calls:
        o, state = run(x, x, x, output_final_state=True, initial_state=np.ones((1, 1, 4, 4), np.float32), **options)
        assert np.isfinite(o[0, :3]).all(), options
        assert np.isnan(o[0, 3:]).all() and np.isnan(state).all(), options


def test_new_outputs_hold_zeros_where_nothing_is_written() -> None:
    """Rows past cu_seqlens[N] and the final states of null sequences, in outputs that the call itself allocates."""
    x = np.full((1, 600, 2, 16), 0.5, np.float32)
    for _ in range(3):
        garbage = np.full((1, 600, 2, 16), np.nan, np.float32)
        del garbage
        o, _ = gdn.numpy.chunk_forward(x, x, x, cu_seqlens=np.array([0, 500]), qk_l2norm=True)
        assert (o[0, 500:] == 0).all() and (o[0, :500] != 0).any()
    pool = np.ones((4, 2, 16, 16), np.float32)
    y = np.full((2, 5, 2, 16), 0.5, np.float32)
    o, state = gdn.numpy.chunk_forward(
        y, y, y, initial_state=pool, initial_state_indices=np.array([3, -1]), output_final_state=True
    )
    assert (state[1] == 0).all() and (o[1] == 0).all() and (state[0] != 0).any()


def test_scale_that_is_zero_in_fp32_is_refused() -> None:
    """0 stands for the default in the C ABI, so a scale that rounds to it must not slip through."""
    x = np.full((1, 4, 1, 4), 0.5, np.float32)
    with pytest.raises(ValueError, match="argument 'scale': found 1e-60"):
        gdn.numpy.chunk_forward(x, x, x, scale=1e-60)
