"""Sharded calls of the JAX package: each case of ``sharded_jax``, run in one child process."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from parity_tests.child import ROOT

if importlib.util.find_spec("jax") is None:
    pytest.skip("needs jax", allow_module_level=True)

from parity_tests import sharded_jax


def run() -> dict[str, str | None]:
    """What went wrong in each case, by name."""
    command = [sys.executable, "-W", "ignore", "-m", "parity_tests.sharded_jax"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def problems(once: Callable[..., Any]) -> dict[str, str | None]:
    return once("sharded_jax", run)


@pytest.mark.parametrize("name", sharded_jax.CASES)
def test_sharded_jax(name: str, problems: dict[str, str | None]) -> None:
    assert problems[name] is None, problems[name]
