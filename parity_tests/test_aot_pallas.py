"""The Pallas kernels lower for CUDA with plain CPU JAX: Mosaic rules that no interpreter checks.

Interpreting kernels does not see Mosaic GPU's limits on layouts, copies and dtypes; lowering does.
``make gpu-compile`` goes on to PTX and machine code.
"""

import importlib.util
import re

import pytest

if importlib.util.find_spec("jax") is None:
    pytest.skip("needs jax", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

import tvd_jax
from parity_tests.pallas_cases import CASES, TOKENS, Case
from tvd_jax import compat


def _lower(function, *arguments) -> str:
    """Text of the module that ``function`` lowers to for CUDA."""
    with compat.assume_cuda():
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


def _kernels(module: str) -> set[str]:
    return set(re.findall(r"tvd_(?:forward_short|forward|reduce|backward)", module))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lowers_for_cuda(case):
    module = _lower(case.function(), *case.arguments())
    assert "mosaic_gpu" in module
    assert _kernels(module) == case.kernels


# From logits: whole units of mixed dtypes; rows that are padded; every term of a gradient.
LOGITS_CASES = [
    (tvd_jax.tvd_from_logits, 131072, "float32", "bfloat16"),
    (tvd_jax.hybrid_loss, 20000, "bfloat16", "bfloat16"),
    (tvd_jax.cross_entropy_tvd_loss, 9001, "float32", "float32"),
    # Rows of two dtypes that are filled up to two widths.
    (tvd_jax.tvd_from_logits, 50257, "float32", "bfloat16"),
    (tvd_jax.tvd_from_logits, 1001, "float16", "float32"),
]


@pytest.mark.parametrize(
    ("loss", "vocab", "s_dtype", "t_dtype"),
    LOGITS_CASES,
    ids=[f"{c[0].__name__}-{c[1]}-{c[2]}-{c[3]}" for c in LOGITS_CASES],
)
def test_logits_lower_for_cuda(loss, vocab, s_dtype, t_dtype):
    def function(student, teacher, labels):
        def of(*logits):
            return loss(*logits, labels, implementation="pallas")

        return jax.value_and_grad(of, (0, 1))(student, teacher)

    logits = (jax.ShapeDtypeStruct((TOKENS, vocab), dtype) for dtype in (s_dtype, t_dtype))
    module = _lower(function, *logits, jax.ShapeDtypeStruct((TOKENS,), "int32"))
    assert set(re.findall(r"logits_(?:forward|backward)", module)) == {
        "logits_forward",
        "logits_backward",
    }


@pytest.mark.parametrize(
    ("dtype", "t_dtype", "columns"),
    [("bfloat16", "bfloat16", 9001), ("float32", "bfloat16", 2049)],
)
def test_logits_of_shards_lower_for_cuda(dtype, t_dtype, columns):
    def function(student, teacher):
        def of(*logits):
            return tvd_jax.hybrid_loss(*logits, implementation="pallas", axis_name="shards")

        return jax.value_and_grad(of, (0, 1))(student, teacher)

    over = jax.vmap(function, axis_name="shards")
    shape = (2, TOKENS, columns)
    logits = (jax.ShapeDtypeStruct(shape, each) for each in (dtype, t_dtype))
    module = _lower(over, *logits)
    assert set(re.findall(r"logits_(?:forward|statistics|differences|backward)", module)) == {
        "logits_statistics",
        "logits_differences",
        "logits_backward",
    }


def test_nothing_of_input_size_is_written_without_gradient():
    module = _lower(Case(4096, grad=False).function(), *Case(4096).arguments())
    calls = [line for line in module.splitlines() if "mosaic_gpu" in line]
    assert calls
    for line in calls:
        outputs = line.rpartition("->")[2]
        assert f"{TOKENS}x4096x" not in outputs and "ui8" not in outputs, outputs


def test_exports_for_cuda():
    pytest.importorskip("flatbuffers")
    case = Case(4096, labels=True)
    with compat.assume_cuda():
        exported = jax.export.export(jax.jit(case.function()), platforms=("cuda",))(
            *case.arguments()
        )
    assert jax.export.deserialize(exported.serialize()).platforms == ("cuda",)


def test_the_check_can_fail():
    def body(x_gmem, out_gmem):
        out_gmem[...] = x_gmem[...] + 1.0  # 100 elements: a warpgroup's registers hold n * 128

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((100,), jnp.float32),
        grid=(1,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    with pytest.raises(Exception, match="layout"):
        _lower(kernel, jax.ShapeDtypeStruct((100,), jnp.float32))
