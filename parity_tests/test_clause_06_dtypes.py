"""Contract clause 6: float32, bfloat16, float16 and any mix; float32 accumulation and loss."""

import numpy as np
import pytest

from parity_tests import inputs, oracle, routes
from parity_tests.routes import Route
from tvd_core.contract import REDUCTIONS


@pytest.mark.parametrize(("p_dtype", "q_dtype"), inputs.DTYPE_PAIRS, ids="-".join)
@pytest.mark.parametrize("vocab", [70, 2600])
def test_clause_06_dtype_pair(route: Route, p_dtype: str, q_dtype: str, vocab: int) -> None:
    """Gradients in their inputs' dtypes and a float32 loss: checked by ``oracle.check``."""
    oracle.check(route, *inputs.rows(3, vocab, p_dtype, q_dtype), reduction="mean", upstream=64.0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_clause_06_loss_of_half_inputs_is_float32(route: Route, reduction: str) -> None:
    p, q = inputs.rows(3, 70, "bfloat16", "float16")
    assert route.loss(p, q, reduction=reduction).dtype == np.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_clause_06_accumulates_in_float32(route: Route, dtype: str) -> None:
    """2**-11 added 4096 times to a sum that starts at 1 stays at 1 in either half type."""
    p = np.full((1, 4097), 2.0**-11)
    p[0, 0] = 1.0
    loss = route.loss(inputs.cast(p, dtype), inputs.cast(0 * p, dtype), reduction="sum")
    assert loss == 1.5


def test_clause_06_float64_in_eager_pytorch() -> None:
    torch = pytest.importorskip("torch")
    import tvd_torch

    p, q = (torch.tensor(x, dtype=torch.float64) for x in inputs.rows(3, 70))
    for implementation in (None, "eager"):
        loss = tvd_torch.tvd_loss(p, q, implementation=implementation)
        assert loss.dtype == torch.float64
        expected = 0.5 * (p - q).abs().sum() / 3
        torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)


def test_clause_06_float64_in_xla() -> None:
    pytest.importorskip("jax")
    from parity_tests.x64 import enable_x64

    route = routes.get("jax-xla")
    p, q = (x.astype(np.float64) for x in inputs.rows(3, 70))
    with enable_x64():
        result = route.run(p, q)
    assert result.loss.dtype == result.dp.dtype == result.dq.dtype == np.float64
    expected = 0.5 * np.abs(p - q).sum() / 3
    np.testing.assert_allclose(result.loss, expected, rtol=1e-14, atol=0)


def test_clause_06_kernels_refuse_float64(kernel_route: Route) -> None:
    p, q = inputs.rows(3, 70)
    p64, q64 = p.astype(np.float64), q.astype(np.float64)
    if kernel_route.framework == "jax":
        from parity_tests.x64 import enable_x64

        with enable_x64(), pytest.raises(TypeError) as raised:
            kernel_route.loss(p64, q)
    else:
        with pytest.raises(TypeError) as raised:
            kernel_route.loss(p64, q)
        with pytest.raises(TypeError, match="got q float64"):
            kernel_route.loss(p, q64)
    fallback = {"torch": "eager", "jax": "xla"}[kernel_route.framework]
    assert str(raised.value) == (
        f"implementation {kernel_route.implementation!r} takes float32, bfloat16 or float16, "
        f"got p float64: cast it or use implementation {fallback!r}"
    )
