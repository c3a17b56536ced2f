"""Every address that the Triton kernels touch belongs to one of their arguments.

Values would not show it: what is read beyond a row is selected away, and what is written beyond one
is repaired by the next program, which the interpreter runs later and a GPU at the same time.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parity_tests import inputs, routes
from tvd_core import config
from tvd_core.contract import REDUCTIONS

torch = pytest.importorskip("torch")
ROUTE = routes.get("torch-triton")
pytestmark = pytest.mark.skipif(not ROUTE.interpreted, reason="needs Triton's interpreter")

# Rows of less than a window; of a tile, and a window more in some; of several; aligned ones.
VOCABS = (1, 17, 63, 600, 2035, 2048, 2049, 4095, 4160)


class Bounds:
    """Stands in for the interpreter's loads and stores, and counts the addresses outside."""

    def __init__(self, interpreter: Any) -> None:
        self.interpreter = interpreter
        self.arguments: list[tuple[int, int]] = []
        self.rows: list[np.ndarray] = []
        self.outside = self.touched = self.written_twice = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.interpreter, name)

    def _check(self, pointers: np.ndarray, mask: np.ndarray, size: int) -> None:
        touched = pointers[mask].astype(np.int64)
        inside = np.zeros(touched.shape, bool)
        for start, end in self.arguments:
            inside |= (touched >= start) & (touched + size <= end)
        self.touched += touched.size
        self.outside += int((~inside).sum())

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check(pointers, mask, np.dtype(dtype).itemsize)
        return self.interpreter.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._check(pointers, mask, value.dtype.itemsize)
        self.rows.append(pointers[mask].astype(np.int64))
        return self.interpreter.store(pointers, value, mask)


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bounds]:
    from triton.runtime import interpreter

    from tvd_core import triton_kernels
    from tvd_torch import triton_launch

    watch = Bounds(interpreter._interpreter)
    monkeypatch.setattr(interpreter, "_interpreter", watch)

    def recording(kernel: Any) -> Any:
        class Launcher:
            def __getitem__(self, grid: Any) -> Any:
                def launch(*args: Any, **options: Any) -> None:
                    tensors = [x for x in args if isinstance(x, torch.Tensor)]
                    watch.arguments = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors]
                    watch.rows = []
                    kernel[grid](*args, **options)
                    stored = np.concatenate(watch.rows)
                    watch.written_twice += stored.size - np.unique(stored).size

                return launch

        return Launcher()

    names = ("tvd_forward_kernel", "tvd_reduce_kernel", "tvd_backward_kernel")
    kernels = SimpleNamespace(**{n: recording(getattr(triton_kernels, n)) for n in names})
    monkeypatch.setattr(triton_launch, "_kernels", lambda: kernels)
    yield watch


CASES = [("float32", vocab) for vocab in VOCABS]
CASES += [("bfloat16", vocab) for vocab in (17, 2035, 4160)]


@pytest.mark.parametrize(("dtype", "vocab"), CASES)
def test_kernels_stay_inside_of_their_arguments(bounds: Bounds, vocab: int, dtype: str) -> None:
    for tokens, reductions in ((1, ("none",)), (5, REDUCTIONS)):
        p, q = inputs.rows(tokens, vocab, dtype)
        for reduction in reductions:
            ROUTE.run(p, q, reduction=reduction)
            assert bounds.outside == 0, (tokens, reduction)
    assert bounds.touched > 10 * vocab
    # Bytes of codes are shared by 4 elements, but each has one writer; so has everything else.
    assert bounds.written_twice == 0


@pytest.mark.parametrize("vocab", [17, 2035, 4160])
def test_the_backward_asks_ahead_for_codes_that_exist(
    bounds: Bounds, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a row of 2035 there are 2 windows for 1 tile of codes."""
    from triton import language

    from tvd_core import triton_kernels

    p, q = inputs.rows(34, vocab)
    monkeypatch.setattr(config, "BACKWARD_PREFETCH", 64)
    ROUTE.run(p, q, wrt="p")
    assert bounds.outside == 0
    asked, bounds.touched = bounds.touched, 0
    monkeypatch.setattr(triton_kernels, "PREFETCHED", language.constexpr(128))  # for none of them
    ROUTE.run(p, q, wrt="p")
    assert asked > bounds.touched > 0


def test_an_address_outside_is_seen(bounds: Bounds) -> None:
    p, q = (torch.rand(2, 600) for _ in "pq")
    labels = torch.zeros(1, dtype=torch.int64)  # one for two rows, past the public check
    from tvd_torch import triton_launch

    triton_launch.forward(p, q, labels, None, None, "per_token", -100, False)
    assert bounds.outside == 1
