"""A few of the random cases of random_bits.py, in the interpreters or on a GPU; and its summary."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from parity_tests import random_bits, routes
from parity_tests.random_bits import CONTENTS, Configuration, compare, configuration
from parity_tests.routes import Route

SMALL = 6000  # elements: an interpreted tile takes 15-30 ms


def small(number: int) -> Configuration:
    config = configuration(number, SMALL)
    return dataclasses.replace(config, tokens=min(config.tokens, 4))


@pytest.mark.parametrize("number", range(4))
def test_random_cases_have_the_models_bits(kernel_route: Route, number: int) -> None:
    config = small(number)
    for seed in (number, (number + 3) % len(CONTENTS)):
        kind = CONTENTS[seed]
        if kernel_route.interpreted and kind == "denormal" and kernel_route.framework == "jax":
            continue  # XLA flushes them to 0 on a CPU
        for name, (compared, differ) in compare(kernel_route, config, seed).items():
            if kernel_route.interpreted and "bfloat16" in config.dtypes and name in ("dp", "dq"):
                continue  # Triton's interpreter truncates float32 to bfloat16
            assert compared > 0 and differ == 0, (config, kind, name)


def test_configurations_cover_the_contract() -> None:
    configs = [configuration(i) for i in range(60)]
    for field in ("reduction", "dtypes", "labels", "weights"):
        assert len({getattr(config, field) for config in configs}) > 1
    assert max(config.vocab for config in configs) > 100_000
    assert all(config.tokens * config.vocab <= 2**23 for config in configs)
    assert len({dataclasses.astuple(config) for config in configs}) > 55


def test_a_difference_is_counted(kernel_route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    right = random_bits.per_token_float32
    monkeypatch.setattr(
        random_bits, "per_token_float32", lambda p, q: np.nextafter(right(p, q), np.float32(2))
    )
    counts = compare(kernel_route, small(1), seed=1)
    assert counts["per_token"][1] == counts["per_token"][0] > 0 and counts["codes"][1] == 0


def test_differences_from_logits_are_counted() -> None:
    """Two routes that promise no equal bits, and one beside itself."""
    eager, other = routes.get("torch-eager"), routes.get("jax-xla")
    if not (eager.can_run and other.can_run):
        pytest.skip("needs both frameworks")
    differ = 0
    for number in range(4):
        config = dataclasses.replace(
            random_bits.logits_configuration(number, SMALL), tokens=2, vocab=600
        )
        found = random_bits.compare_logits(eager, [eager, other], config, seed=number)
        assert {differ for _, differ in found["torch-eager"].values()} == {0}
        differ += sum(differ for _, differ in found["jax-xla"].values())
    assert differ > 0


def test_the_summary_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bits.json"
    arguments = ["--configurations", "0", "--seeds", "6", "-o", str(path)]
    monkeypatch.setattr(sys, "argv", ["random_bits", *arguments])
    assert random_bits.main() == 0
    summary = json.loads(path.read_text())
    assert summary["cases"] == 0 and summary["environment"]["versions"]
