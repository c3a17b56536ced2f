"""The Triton kernels compile for NVIDIA GPUs on a machine that has none. See aot_triton.py."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "triton")),
    reason="needs torch and triton",
)


def _run(tmp_path, *arguments):
    """Runs aot_triton in a process of its own: an interpreting Triton does not compile."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)  # compile everything anew
    command = [sys.executable, "-W", "ignore", "-m", "parity_tests.aot_triton", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_variant_compiles_without_spills_and_with_16_byte_float32_rows(arch, tmp_path):
    run = _run(tmp_path, "--arch", str(arch))
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"sm_{arch}: " in run.stdout and ", 0 with problems" in run.stdout


@pytest.mark.parametrize(
    ("plant", "words"),
    [("spills", "spills or uses local memory"), ("narrow", ": 0 16-byte ld.global, 32 narrower")],
)
def test_the_check_can_fail(plant, words, tmp_path):
    run = _run(tmp_path, "--plant", plant)
    assert run.returncode == 1, run.stderr
    assert words in run.stdout and "1 with problems" in run.stdout
