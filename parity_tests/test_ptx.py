"""The PTX that Pallas's kernels bring along assembles: Triton's wheel has the assembler.

Lowering keeps PTX as text and the interpreter never sees it, so a typing error would show on a GPU
only.
"""

import importlib.util
import re
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

if any(importlib.util.find_spec(name) is None for name in ("jax", "triton")):
    pytest.skip("needs jax and triton", allow_module_level=True)

import jax.numpy as jnp
import numpy as np
import triton

from tvd_jax import pallas_ptx

SCALARS = {"value": SimpleNamespace(dtype=np.dtype("float32")), "index": np.int32(0)}


def ref(dtype: Any, size: int, shared: bool = False) -> SimpleNamespace:
    return SimpleNamespace(dtype=np.dtype(dtype), size=size, shared=shared)


def store(dtypes: str, *signs: int) -> Any:
    kinds = {"f": jnp.float32, "b": jnp.bfloat16, "h": jnp.float16}
    outputs = [(ref(kinds[d], 2048), s) for d, s in zip(dtypes, signs, strict=True)]
    return lambda: pallas_ptx.store_signed(
        ref("uint8", 512), outputs, SCALARS["value"], SCALARS["index"]
    )


BARRIER = ref("uint32", 2, shared=True)
VECTOR, SCALAR = np.zeros(512, np.float32), np.float32(0)
SHARED, GLOBAL = ref("float32", 4, shared=True), ref("uint8", 512)
CALLS = {
    "init": lambda: pallas_ptx.init_barriers(ref("uint32", 8, shared=True), 2),
    "wait": lambda: pallas_ptx.wait(BARRIER, SCALARS["index"]),
    "copy": lambda: pallas_ptx.copy_streamed(
        ref("float32", 2048), ref("float32", 2048, shared=True), BARRIER
    ),
    "prefetch": lambda: pallas_ptx.prefetch(ref("uint8", 512), SCALARS["index"]),
    "float32": store("f", 1),
    "bfloat16 negated": store("b", -1),
    "both float16": store("hh", 1, -1),
    "float32 and bfloat16": store("fb", 1, -1),
    "sum of warps": lambda: pallas_ptx.reduce_warps("add", VECTOR, SHARED),
    "maximum of warps": lambda: pallas_ptx.reduce_warps("max", VECTOR, SHARED),
    "low bytes": lambda: pallas_ptx.store_low_bytes(VECTOR, GLOBAL),
    "scalar store": lambda: pallas_ptx.store_scalar(ref("float32", 1), SCALARS["value"]),
    "below": lambda: pallas_ptx.below(VECTOR),
    "product": lambda: pallas_ptx.mul(VECTOR, VECTOR),
    "quotient of scalars": lambda: pallas_ptx.divide(SCALAR, SCALAR),
    "FMA of scalars": lambda: pallas_ptx.fma_scalar(SCALAR, SCALAR, SCALAR),
    "product of scalars": lambda: pallas_ptx.mul_scalar(SCALAR, SCALAR),
    "logarithm": lambda: pallas_ptx.log2(SCALAR),
}


def entry(asm: str, letters: list[str]) -> str:
    """A kernel whose parameters are the operands; the code twice, as where it is unrolled."""
    types = [{"l": ".b64", "r": ".b32", "f": ".f32"}[letter] for letter in letters]
    parameters = ", ".join(f".param {t} p{i}" for i, t in enumerate(types))
    loads = [f".reg {t} a{i}; ld.param{t} a{i}, [p{i}];" for i, t in enumerate(types)]
    body = re.sub(r"\$(\d)", r"a\1", asm)
    head = ".version 8.0\n.target sm_90a\n.address_size 64\n"
    return f"{head}.visible .entry kernel({parameters}) {{\n" + "\n".join([*loads, body, body, "}"])


def assemble(ptx: str, folder: Any) -> subprocess.CompletedProcess[str]:
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [
        triton.knobs.nvidia.ptxas.path,
        "-arch=sm_90a",
        source,
        "-o",
        folder / "kernel.cubin",
    ]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("name", CALLS)
def test_ptx_assembles(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    written = []

    def run(asm: str, refs: Any, scalars: Any) -> None:
        letters = ["r" if x.shared else "l" for x in refs]
        letters += ["f" if x.dtype == np.float32 else "r" for x in scalars]
        written.append(entry(asm, letters))

    def run_on_vector(asm: str, ref: Any, _: Any) -> None:
        written.append(entry(asm, ["r" if ref.shared else "l", *"ffff"]))

    def of_floats(asm: str, *operands: Any) -> None:
        written.append(entry(asm, ["f"] * (1 + len(operands))))

    monkeypatch.setattr(pallas_ptx, "_run", run)
    monkeypatch.setattr(pallas_ptx, "_run_on_vector", run_on_vector)
    for name_of in ("_elementwise", "_scalar"):
        monkeypatch.setattr(pallas_ptx, name_of, of_floats)
    CALLS[name]()
    (ptx,) = written
    done = assemble(ptx, tmp_path)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{ptx}"


def test_the_assembler_sees_a_wrong_operand(tmp_path: Any) -> None:
    done = assemble(entry("prmt.b32 $0, $0, $1, 0x5410;", ["l", "r"]), tmp_path)
    assert done.returncode != 0
