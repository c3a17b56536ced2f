"""Contract clause 1: per token 0.5 * sum |p - q|, in the form that does not cancel."""

import numpy as np
import pytest

from parity_tests import budget, inputs, oracle
from parity_tests.routes import Route
from tvd_core.reference import tvd_reference


@pytest.mark.parametrize("vocab", inputs.TILE_EDGES)
def test_clause_01_value_at_tile_edges(route: Route, vocab: int) -> None:
    oracle.check(route, *inputs.rows(2, vocab), reduction="sum")


@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("vocab", [2, 7, 1000])
def test_clause_01_disjoint_distributions_give_exactly_1(
    route: Route, dtype: str, vocab: int
) -> None:
    p = np.zeros((2, vocab))
    q = np.zeros((2, vocab))
    p[:, 0] = q[0, -1] = q[1, 1] = 1.0
    loss = route.loss(inputs.cast(p, dtype), inputs.cast(q, dtype), reduction="per_token")
    np.testing.assert_array_equal(loss, np.ones(2, np.float32))


def test_clause_01_value_does_not_cancel(route: Route) -> None:
    """Nearly equal rows: ``1 - sum(min)`` would lose every digit of a distance of 1e-6."""
    p, _ = inputs.rows(2, 3000)
    q = p.copy()
    q[:, ::2] *= np.float32(1 + 2e-6)
    loss = route.loss(p, q, reduction="per_token")
    budget.check_loss(loss, tvd_reference(p, q, reduction="per_token"), 2, 3000)


def test_clause_01_inputs_need_not_sum_to_1(route: Route) -> None:
    p, q = inputs.rows(2, 600)
    oracle.check(route, -3.0 * p, 50.0 * q)


def test_clause_01_symmetric_in_p_and_q(route: Route) -> None:
    p, q = inputs.rows(3, 600)
    oracle.assert_same_bits("loss", route.loss(p, q), route.loss(q, p))
