"""Rows of logits that are cut, on one device: the kernels' passes of their own for it, in JAX.

Over processes and devices: test_sharded_torch.py and test_sharded_jax.py.
"""

from typing import Any

import numpy as np
import pytest

from parity_tests import inputs, logits_oracle
from parity_tests.logits_budget import logits
from parity_tests.routes import Route
from parity_tests.test_logits_stats_and_losses import of_cross_entropy, of_hybrid

pytest.importorskip("jax")

from parity_tests.vmapped_shards import VmappedShards

TOKENS = 5
LABELS = np.array([1, 3, -100, 599, 7], np.int32)
WEIGHTS = np.array([1.0, 0.5, 3.0, 0.0, 2.0], np.float32)


@pytest.mark.parametrize(
    ("shards", "vocab", "dtype"),
    [
        (4, 4 * 150, "float32"),
        (2, 2 * 8300, "float32"),  # more than a tile, no multiple of it
        (3, 3 * 2049, "bfloat16"),  # parts that start nowhere in particular
        (2, 2 * 16384, "float16"),
    ],
)
def test_logits_shards(logits_jax_route: Route, shards: int, vocab: int, dtype: str) -> None:
    route = VmappedShards(logits_jax_route.implementation, shards)
    s, t = logits(TOKENS, vocab, dtype)
    options: dict[str, Any] = {"temperature": 0.7, "upstream": -1.75, "weights": WEIGHTS}
    logits_oracle.check(route, s, t, LABELS, **options)
    for wrt in ("", "p", "q"):
        logits_oracle.check(route, s, t, LABELS, wrt=wrt)


def test_logits_shards_that_hold_nothing(logits_jax_route: Route) -> None:
    """Parts of a row that are all -inf; a maximum far above the other parts'; a NaN in one part."""
    s, t = logits(4, 1200, masked=0.0)
    s[0, :600] = t[0, 300:600] = -np.inf
    s[1, 900:] += 400.0
    t[2, :300] += 300.0
    route = VmappedShards(logits_jax_route.implementation, 4)
    logits_oracle.check(route, s, t, np.zeros(4, np.int32))
    s[3, 700] = np.nan
    result = route.run(s, t, function="tvd_from_logits", reduction="per_token", upstream=np.ones(4))
    assert np.isfinite(result.loss[:3]).all() and np.isnan(result.loss[3])
    for gradient in (result.dp, result.dq):
        assert np.isfinite(gradient[:3]).all() and np.isnan(gradient[3]).all()


def test_logits_shards_of_other_losses(logits_jax_route: Route) -> None:
    """A term of the teacher's gradient is the divergence of the whole row; a label is in a part."""
    route = VmappedShards(logits_jax_route.implementation, 4)
    s, t = logits(TOKENS, 600, masked=0.0)
    options: dict[str, Any] = {"weights": WEIGHTS, "temperature": 1.5}
    logits_oracle.check_tokens(
        route, "hybrid_loss", s, t, LABELS, of_hybrid(1.0), eta=1.0, **options
    )
    factors = {"ce_weight": 0.25, "tvd_weight": 3.0}
    values = of_cross_entropy(LABELS, **factors)
    logits_oracle.check_tokens(
        route, "cross_entropy_tvd_loss", s, t, LABELS, values, **factors, **options
    )


def test_logits_shards_have_the_statistics_of_the_row(logits_jax_route: Route) -> None:
    s, t = (logits_jax_route.array(x) for x in logits(TOKENS, 600))
    labels = logits_jax_route.array(inputs.labels_for(TOKENS))
    options = {"function": "tvd_from_logits", "return_stats": True}
    _, whole = logits_jax_route.call(s, t, labels, **options)
    _, found = VmappedShards(logits_jax_route.implementation, 4).call(s, t, labels, **options)
    for one, two in zip(found, whole, strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-6, atol=2e-7)
