"""Pallas's race detector over the kernels, on the shapes that take each way through them.

It sees blocks that write or read the same element of an array. It does not see a missing barrier or
fence between the threads and the copies of one block: with either of the kernels' own taken away it
finds nothing. For those, and for Triton, whose interpreter runs one program after another, the
bits of test_clause_07_determinism.py on a GPU are the evidence; the forward from logits has
test_logits_schedules.py too.
"""

from typing import Any

import numpy as np
import pytest

from parity_tests import inputs, oracle, routes

jax = pytest.importorskip("jax")

ROUTE = routes.get("jax-pallas")
pytestmark = pytest.mark.skipif(not ROUTE.interpreted, reason="needs Pallas's interpreter")


@pytest.mark.parametrize(
    ("tokens", "vocab", "dtype"),
    [
        (3, 4096, "float32"),  # aligned rows, several tiles
        (2, 2047, "float32"),  # unaligned rows
        (9, 1271, "bfloat16"),  # odd rows of 2-byte elements, more than one block of rows
    ],
)
def test_pallas_kernels_do_not_race(tokens: int, vocab: int, dtype: str) -> None:
    from tvd_jax import compat

    p, q = inputs.rows(tokens, vocab, dtype)
    labels, weights = inputs.labels_for(tokens), inputs.weights_for(tokens)
    jax.clear_caches()  # what is already traced has no detector
    with ROUTE.running(detect_races=True):
        oracle.check(ROUTE, p, q, labels, weights=weights, upstream=0.5)
        assert not compat.races_found()
    jax.clear_caches()


def test_a_route_leaves_the_detector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A route turns the interpreter on for itself; the one that a test asked for has to win."""
    from tvd_jax import compat

    asked, original = [], compat.interpret_mode

    def noting(**options: Any) -> Any:
        asked.append(options)
        return original(**options)

    monkeypatch.setattr(compat, "interpret_mode", noting)
    with ROUTE.running(detect_races=True):
        ROUTE.loss(*inputs.rows(1, 600))
    assert asked == [{"detect_races": True}]


def _two_blocks_write(shared: bool) -> Any:
    """A kernel of two blocks that write the same element, or one each."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(out: Any) -> None:
        block = jax.lax.axis_index("blocks")
        out[0 if shared else block] = jax.numpy.float32(1) + block

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2,), np.float32),
        grid=(2,),
        grid_names=("blocks",),
    )()


def test_the_race_detector_finds_a_race() -> None:
    from tvd_jax import compat

    jax.clear_caches()
    found = []
    for shared in (False, True):
        try:
            with ROUTE.running(detect_races=True):
                jax.block_until_ready(_two_blocks_write(shared))
                found.append(compat.races_found())
        except Exception as error:  # JAX 0.12 raises where older versions set a flag
            found.append("race" in str(error).lower())
    jax.clear_caches()
    assert found[0] is False
    if not found[1]:
        pytest.skip(f"the detector of JAX {jax.__version__} does not see this race")
