"""Every route by name: a route that this machine cannot run is skipped here, with the reason."""

import numpy as np
import pytest

from parity_tests import inputs, oracle, routes


@pytest.mark.parametrize("named_route", routes.ROUTES, ids=routes.NAMES)
def test_route_can_run(named_route: routes.Route) -> None:
    if not named_route.can_run:
        pytest.skip(named_route.mode.removeprefix("skipped: "))
    oracle.check(named_route, *inputs.rows(3, 600))


def test_a_wrong_value_is_caught() -> None:
    """The checks of this suite fail where they have to: one float32 ulp too far in one value."""
    expected = np.float64(0.75)
    tolerance = oracle.budget.loss_tolerance(4, 8) * expected
    near, far = (np.float32(expected + factor * tolerance) for factor in (0.5, 1.5))
    oracle.budget.check_loss(near, expected, 4, 8)
    with pytest.raises(AssertionError, match="budget"):
        oracle.budget.check_loss(far, expected, 4, 8)
    with pytest.raises(AssertionError, match="where it is NaN"):
        oracle.budget.check_loss(np.float32(np.nan), expected, 4, 8)


def test_a_wrong_gradient_is_caught() -> None:
    route = routes.get("torch-eager")
    right = np.array([0.5, -0.5, 0.0])
    for at, wrong in ((0, -0.5), (1, np.nextafter(np.float32(-0.5), np.float32(0))), (2, 1e-45)):
        actual = right.astype(np.float32)
        actual[at] = wrong
        if at == 1:
            actual[at] *= 1 - 1e-5
        with pytest.raises(AssertionError, match="budget"):
            oracle.budget.check_gradient("dp", actual, right, 4, route=route)
