"""The compiled Triton kernels on inputs that are sharded over 4 processes, which share a GPU."""

import os
import pathlib
import subprocess
import sys

import pytest

from parity_tests.child import ROOT

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from parity_tests import sharded_torch  # noqa: E402

CASES = [name for name in sharded_torch.CASES if name.startswith("triton_")]


def test_sharded_torch_on_a_gpu(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "parity_tests.sharded_torch", str(tmp_path), *CASES]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=180
    )
    ends = [tmp_path / f"{c}.{rank}" for c in CASES for rank in range(sharded_torch.PROCESSES)]
    words = "".join(end.read_text() for end in ends if end.exists())
    assert not words, words
    assert all(end.exists() for end in ends), done.stderr[-3000:]
