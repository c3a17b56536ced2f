"""Contract clause 2: [..., vocab], any leading dimensions; labels and weights of that shape."""

import numpy as np
import pytest

from parity_tests import inputs, oracle
from parity_tests.routes import Route

LEADING = [(), (1,), (5,), (2, 3), (2, 1, 2), (1, 1, 1, 2)]


@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_clause_02_any_leading_shape(route: Route, leading: tuple[int, ...]) -> None:
    tokens = int(np.prod(leading))
    p, q = (x.reshape(*leading, 70) for x in inputs.rows(tokens, 70))
    labels = inputs.labels_for(tokens).reshape(leading)
    weights = inputs.weights_for(tokens).reshape(leading)
    result = oracle.check(route, p, q, labels, weights=weights)
    assert result.loss.shape == ()
    per_token = route.loss(p, q, labels, weights=weights, reduction="per_token")
    assert per_token.shape == leading


@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_clause_02_tokens_are_the_product_of_the_leading_shape(
    route: Route, leading: tuple[int, ...]
) -> None:
    tokens = int(np.prod(leading))
    p, q = inputs.rows(tokens, 70)
    nested = route.loss(p.reshape(*leading, 70), q.reshape(*leading, 70))
    oracle.assert_same_bits("loss", nested, route.loss(p, q))
