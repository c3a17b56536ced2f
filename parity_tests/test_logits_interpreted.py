"""The Pallas kernels from logits in the interpreter: a few calls, because each takes 20 s and more.

In a process of its own: the interpreter runs each of the four warpgroups of a block in a thread of
XLA's pool, and waits there, so that the pool must have more threads than two cores give it.
"""

import importlib.util
from typing import Any

import pytest

from parity_tests import child, routes

CODE = """
import numpy as np
from tvd_core import config
from tvd_jax import compat
from parity_tests import logits_oracle, routes, vmapped_shards
from parity_tests.logits_budget import logits
route = {route}
s, t = logits({tokens}, {vocab})
s, t = s.astype("{s_dtype}"), t.astype(np.float32)
labels = np.zeros({tokens}, np.int32)
{change}
logits_oracle.check(route, s, t, labels, upstream=-1.75, wrt={wrt!r})
print("checked")
"""


def interpreted() -> bool:
    return importlib.util.find_spec("jax") is not None and routes.get("jax-pallas").interpreted


pytestmark = pytest.mark.skipif(not interpreted(), reason="needs Pallas's interpreter")


IGNORED = "labels[0] = -100; s[0] = np.nan; "


@pytest.mark.parametrize(
    ("s_dtype", "tokens", "vocab", "wrt", "change"),
    [
        # Two tiles, the last partial; a row that is no multiple of 16 bytes.
        ("float32", 1, 8300, "pq", ""),
        # An ignored row of NaN; a sample far below the maximum, so that the sums are made again,
        # of a student's row that ends with a sub-tile and a teacher's that is filled up beyond it.
        ("float16", 2, 4092, "p", IGNORED + "s[1, :2000] = -np.inf; t[1, 4000] = 300"),
    ],
    ids=["two-tiles", "two-dtypes-ignored-and-again"],
)
def test_logits_in_pallas_interpreter(
    s_dtype: str, tokens: int, vocab: int, wrt: str, change: str
) -> None:
    check('routes.get("jax-pallas")', s_dtype, tokens=tokens, vocab=vocab, wrt=wrt, change=change)


# One block, so that slots are given free and filled again: rows of three units.
ONE_BLOCK = "compat.sm_count = lambda: 1; s[1, :2000] = -np.inf; t[1, 9] = 300; "


@pytest.mark.parametrize(
    "change",
    [
        # The ring holds a row and the first tile of the next, which is begun early.
        ONE_BLOCK,
        # It holds two units of the three; the other goes through it twice.
        ONE_BLOCK + "config.logits_pallas_slots = lambda *_: 2",
    ],
    ids=["resident", "ring-shorter-than-a-row"],
)
def test_logits_of_several_rows_in_pallas_interpreter(change: str) -> None:
    """The second row is summed again from its maximum."""
    check('routes.get("jax-pallas")', tokens=3, vocab=8200, wrt="p", change=change)


def test_logits_shards_in_pallas_interpreter() -> None:
    """Two tokens of two shards, one of which holds nothing of the first."""
    route = 'vmapped_shards.VmappedShards("pallas", 2)'
    check(route, tokens=2, vocab=1202, wrt="p", change="s[0, 601:] = -np.inf")


def check(route: str, s_dtype: str = "float32", **values: Any) -> None:
    code = CODE.format(route=route, s_dtype=s_dtype, **values)
    assert child.run(code, JAX_NUM_CPU_DEVICES="8").endswith("checked")
