"""What docs/moving-from-liger.md says of Liger-Kernel and of this project, row by row."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("liger_kernel")

import tvd_torch  # noqa: E402  (needs torch)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = Path(__file__).resolve().parent.parent / "docs/moving-from-liger.md"
# The interpreter passes a Python float where the compiler has a scalar with a method `to`.
LINE = "scale = scale.to(tl.float32)"


@pytest.fixture(scope="module")
def liger(tmp_path_factory):
    """Liger's function; without a GPU with the one line changed that the interpreter cannot run."""
    (root,) = importlib.util.find_spec("liger_kernel").submodule_search_locations
    path = Path(root) / "ops/tvd.py"
    if DEVICE == "cpu":
        text = path.read_text()
        assert text.count(LINE) == 1
        path = tmp_path_factory.mktemp("liger") / "tvd.py"
        path.write_text(text.replace(LINE, "scale = tl.cast(scale, tl.float32)"))
    spec = importlib.util.spec_from_file_location("liger_tvd", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def apply(*arguments):
        with np.errstate(all="ignore"):
            return module.LigerTVDLossFunction.apply(*arguments)

    return apply


def _rows(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, 10, generator=generator).softmax(-1).to(DEVICE, dtype)
    p, q = x[0].clone(), x[1].clone()
    q[0, 0] = p[0, 0]  # a tie
    return p.requires_grad_(), q.requires_grad_()


def _gradient(loss, x):
    return torch.autograd.grad(loss, x, allow_unused=True)[0]


def _nan(liger):
    grads = []
    for function in (liger, tvd_torch.tvd_loss):
        p, q = _rows()
        with torch.no_grad():
            p[1, 2] = float("nan")
        loss = function(p, q)
        assert loss.isnan()
        grads.append(_gradient(loss, p)[1, 2].item())
    assert grads[0] == pytest.approx(-0.5 / 3) and np.isnan(grads[1])


def _all_ignored(liger):
    p, q = _rows()
    labels = torch.full((3,), -100, device=DEVICE)
    with pytest.raises(ZeroDivisionError):
        liger(p, q, labels)
    loss = tvd_torch.tvd_loss(p, q, labels)
    assert loss == 0 and not _gradient(loss, p).any()


def _no_tokens(liger):
    p = torch.ones(0, 10, device=DEVICE)
    with pytest.raises(ZeroDivisionError):
        liger(p, p)
    assert tvd_torch.tvd_loss(p, p) == 0


def _gradient_of_q(liger):
    p, q = _rows()
    assert _gradient(liger(p, q), q) is None
    loss = tvd_torch.tvd_loss(p, q)
    dp, dq = torch.autograd.grad(loss, (p, q))
    assert dq.any() and torch.equal(dq, -dp)


def _float64(liger):
    p, q = _rows(torch.float64)
    assert liger(p, q).dtype == torch.float32
    assert tvd_torch.tvd_loss(p, q).dtype == torch.float64


def _other_shape(liger):
    p, q = (x.detach() for x in _rows())
    narrow = p[:, :8].contiguous()  # so that Liger reads nothing outside of q
    assert torch.allclose(liger(narrow, q), liger(narrow, q[:, :8]))
    with pytest.raises(ValueError):
        tvd_torch.tvd_loss(narrow, q)


def _leading_shape(liger):
    p, q = (x.detach() for x in _rows())
    with pytest.raises(ValueError, match="unpack"):
        liger(p[None], q[None])
    assert tvd_torch.tvd_loss(p[None], q[None]) == tvd_torch.tvd_loss(p, q)


CASES = {
    "NaN in a kept row": _nan,
    "all labels ignored": _all_ignored,
    "no tokens": _no_tokens,
    "gradient of `q`": _gradient_of_q,
    "float64": _float64,
    "other shape of `q`": _other_shape,
    "leading shape": _leading_shape,
}


@pytest.mark.parametrize("case", CASES)
def test_the_row_of_the_page(case, liger):
    CASES[case](liger)


def test_every_row_of_the_page_is_tested():
    table = PAGE.read_text().partition("| case |")[2]
    assert re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE) == list(CASES)


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "none"])
def test_the_rest_is_the_same(reduction, liger):
    labels = torch.tensor([1, -100, 2], device=DEVICE)
    p, q = _rows()
    theirs = liger(p, q, labels, reduction, -100)
    options = {"reduction": reduction, "ignore_index": -100}
    dp = _gradient(theirs.sum(), p)
    assert dp[0, 0] == 0  # the tie
    for ours in (
        tvd_torch.tvd_loss(p, q, labels, **options),
        tvd_torch.TVDLoss(**options)(p, q, labels),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(_gradient(ours.sum(), p), dp, rtol=1e-6, atol=0)


def test_logits_take_the_place_of_softmax(liger):
    labels = torch.tensor([1, -100, 2], device=DEVICE)
    student, teacher = (5 * x.detach() for x in _rows())
    student.requires_grad_()
    theirs = liger(student.softmax(-1), teacher.softmax(-1), labels)
    ours = tvd_torch.tvd_from_logits(student, teacher, labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        _gradient(ours, student), _gradient(theirs, student), rtol=1e-4, atol=1e-7
    )
