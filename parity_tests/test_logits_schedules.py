"""The forward Pallas kernel from logits has the same bits whatever runs first: see schedules.py."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("jax")

from parity_tests import schedules
from parity_tests.schedules import Deadlock, Overtaken, Race
from tvd_core.reference import logits_reference
from tvd_jax import logits_pallas
from tvd_jax.logits_pallas import _Copies, _Exchange, _Forward, _Statistics

SEEDS = 5
DTYPES = ("float16", "float32")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of the kernel. ``again``: tokens whose maximum lies far above their sample's."""

    tokens: int
    vocab: int
    slots: int
    dtypes: tuple[str, str] = ("float32", "float32")
    again: tuple[int, ...] = ()
    ignored: tuple[int, ...] = ()

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.tokens, self.vocab])
        s, t = (
            rng.standard_normal((self.tokens, self.vocab)).astype(dtype) for dtype in self.dtypes
        )
        if self.again:
            t[list(self.again), -1] = 100
        weights = np.ones(self.tokens, np.float32)
        weights[list(self.ignored)] = 0
        return s, t, weights


def run(case: Case, seed: int, **options: Any) -> dict[str, np.ndarray]:
    return schedules.forward(seed, *case.arrays(), slots=case.slots, **options)


def check(case: Case, seeds: int = SEEDS) -> None:
    """All three kernels give the bits of the first seed, and the forward is right."""
    first = run(case, 0)
    s, t, weights = case.arrays()
    right = logits_reference(s, t, weights=weights, reduction="per_token")
    np.testing.assert_allclose(first["tvd"], right, rtol=1e-5, atol=1e-6)
    alone = run(case, 0, statistics=_Statistics.ALONE, want_kl=False)
    given = np.concatenate([first["s_rows"][:2], first["t_rows"][:2]])
    differences = run(case, 0, statistics=_Statistics.GIVEN, given=given)
    for seed in range(1, seeds):
        assert_same(first, run(case, seed), seed)
        assert_same(alone, run(case, seed, statistics=_Statistics.ALONE, want_kl=False), seed)
        again = run(case, seed, statistics=_Statistics.GIVEN, given=given)
        assert_same(differences, again, seed)


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], seed: int) -> None:
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=f"{name}, seed {seed}")


# In units: rows of a part of one, of one, of what the ring holds, of one more, of twice as much. A
# tile is one unit of 256 elements, or two of 128 if both arrays are float32.
CASES = [
    Case(5, 40, 5),
    Case(4, 512, 8, again=(1, 2), ignored=(0,)),
    Case(4, 600, 8, again=(0, 3)),
    Case(4, 600, 5, again=(2,)),
    Case(3, 600, 2, again=(0, 2), ignored=(1,)),
    Case(3, 1100, 4),
    Case(5, 900, 4, ("float16", "float16"), again=(1, 4)),
    Case(4, 300, 3, ("float16", "float32"), again=(0,)),
    Case(1, 700, 3, ("float16", "float16"), again=(0,)),
    Case(2, 256, 6, ignored=(0, 1)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.tokens}-{case.vocab}-{case.slots}")
def test_logits_bits_do_not_depend_on_the_schedule(case: Case) -> None:
    check(case)


def test_logits_random_cases_do_not_depend_on_the_schedule() -> None:
    draw = random.Random(0)
    for _ in range(12):
        tokens = draw.randint(1, 6)
        check(
            Case(
                tokens,
                draw.randint(1, 1300),
                draw.randint(1, 8),
                (draw.choice(DTYPES), draw.choice(DTYPES)),
                again=tuple(draw.sample(range(tokens), draw.randint(0, tokens))),
                ignored=tuple(draw.sample(range(tokens), draw.randint(0, 1))),
            ),
            seeds=3,
        )


# --- what a mistake looks like -------------------------------------------------------------------


def nothing(*_: Any) -> None:
    pass


def slots_are_not_waited_for(self: _Copies, order: Any, number: Any, copy: Any) -> Any:
    if copy < self.rows * self.ring.copies:
        self.fetch(copy, self.ring.slot(order, number))
    return copy + 1


def sample_is_not_waited_for(self: _Copies, r: Any) -> None:
    if r < self.rows:
        barrier = self.smem["sample_full"].at[0]
        self.copy_sub_tile(self.row_of(r), 0, self.plan.vocab, barrier)


def meeting_of_one(self: _Exchange) -> None:
    """Goes on without the others."""


def one_part_for_all_rows(self: _Forward, r: Any) -> Any:
    return logits_pallas._Parts.DIFFERENCES


MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a slot is filled before it is free": (_Copies, "refill", slots_are_not_waited_for),
    "a slot is never given free": (_Forward, "release", nothing),
    "the sample is overwritten": (_Copies, "fetch_sample", sample_is_not_waited_for),
    "nobody waits for the others' sums": (_Exchange, "wait", meeting_of_one),
    "a row's sums overwrite the last one's": (_Forward, "differences_part", one_part_for_all_rows),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    seen = pytest.raises((AssertionError, Deadlock, Overtaken, Race))
    with mock.patch.object(*MISTAKES[mistake]), seen:
        check(Case(6, 600, 8, again=(1, 2)), seeds=60)
