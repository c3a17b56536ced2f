"""What interpreters.py replaces in the interpreters gives what it replaces."""

import contextlib

import numpy as np
import pytest

from parity_tests import inputs, interpreters, routes
from parity_tests.oracle import assert_same_bits

TRITON, PALLAS = routes.get("torch-triton"), routes.get("jax-pallas")
in_triton = pytest.mark.skipif(not TRITON.interpreted, reason="needs Triton's interpreter")
in_pallas = pytest.mark.skipif(not PALLAS.interpreted, reason="needs Pallas's interpreter")


@in_triton
@pytest.mark.parametrize("debug", [False, True])
def test_triton_checks_an_overflow_as_before(debug: bool) -> None:
    from triton import language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder()
    builder.options = interpreter.InterpreterOptions(debug=debug)
    semantic = type(interpreter.interpreter_semantic)(builder)
    before = semantic.binary_op_sanitize_overflow_impl
    largest, one = (
        tl.tensor(
            interpreter.TensorHandle(np.array([x, 1], np.int32), tl.int32),
            tl.block_type(tl.int32, [2]),
        )
        for x in (2**31 - 1, 1)
    )
    for check in (before, interpreters.check_overflow_where_it_can_fail(before)):
        fails = pytest.raises(AssertionError, match="int32 overflow detected")
        with fails if debug else contextlib.nullcontext():
            check(largest, one, semantic.add)
        check(one, one, semantic.add)


@in_triton
def test_triton_has_its_language_back_after_a_launch() -> None:
    from triton import language as tl

    TRITON.run(*inputs.rows(2, 17))
    assert all(map(tl.core.is_builtin, (tl.load, tl.store, tl.tensor.__add__)))


@in_triton
def test_numpys_dtypes_of_triton_are_remembered_apart() -> None:
    from triton import language as tl
    from triton.runtime import interpreter

    scalars = (tl.int1, tl.float16, tl.bfloat16, tl.float32, tl.uint8, tl.int32, tl.int64)
    quick = interpreters.remember_dtypes(interpreter._get_np_dtype)
    for scalar in scalars * 2:
        width = max(scalar.primitive_bitwidth // 8, 1)
        for dtype, size in (
            (scalar, width),
            (tl.block_type(scalar, [4]), width),
            (tl.pointer_type(scalar), 8),
            (tl.block_type(tl.pointer_type(scalar), [4]), 8),
        ):
            assert quick(dtype).itemsize == size
            assert quick(dtype) == interpreter._get_np_dtype(dtype)


@in_pallas
def test_pallas_computes_the_same_bits_in_quick_callbacks() -> None:
    from tvd_jax import compat
    from tvd_jax.loss import forward_with_codes

    p, q = inputs.rows(2, 600, "bfloat16")
    with compat.interpret_mode():
        slow = forward_with_codes(p, q, implementation="pallas")
    quick = PALLAS.forward(p, q)
    for name, x, y in zip(("loss", "per_token", "codes"), vars(quick).values(), slow, strict=True):
        assert_same_bits(name, x, np.asarray(y))
