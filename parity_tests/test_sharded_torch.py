"""Losses of inputs that are sharded over 4 processes, on a CPU with gloo: each case of one run."""

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.distributed

if not torch.distributed.is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

from parity_tests import sharded_torch

LIMIT = 300  # seconds, for all cases


def run_all(directory: pathlib.Path) -> tuple[str, str]:
    """The directory with a file for each case that came to its end, and what was printed."""
    with subprocess.Popen(
        [sys.executable, "-m", "parity_tests.sharded_torch", str(directory)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as processes:
        try:
            printed, _ = processes.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(processes.pid, signal.SIGKILL)  # the four, which this one started
            printed, _ = processes.communicate()
    return str(directory), printed


@pytest.fixture(scope="module")
def run(
    once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[pathlib.Path, str]:
    directory, printed = once("sharded_torch", lambda: run_all(tmp_path_factory.mktemp("sharded")))
    return pathlib.Path(directory), printed


@pytest.mark.parametrize("name", sharded_torch.CASES)
def test_sharded_torch(run: tuple[pathlib.Path, str], name: str) -> None:
    directory, printed = run
    files = [directory / f"{name}.{rank}" for rank in range(sharded_torch.PROCESSES)]
    words = "".join(file.read_text() for file in files if file.exists())
    assert not words, words
    assert all(file.exists() for file in files), f"not come to its end:\n{printed[-3000:]}"
