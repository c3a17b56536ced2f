"""Each line of docs/moving-from-liger.md, against the Liger-Kernel that is installed."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("liger_kernel")

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

import tvd_torch
from tvd_torch import cross_entropy_tvd_loss, tvd_from_logits, tvd_loss

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/moving-from-liger.md").read_text()
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
REDUCTIONS = ("none", "sum", "mean", "batchmean")
LABELS = torch.tensor([1, -100, 3, 9], device=DEVICE)
only_on_a_gpu = pytest.mark.skipif(not ON_GPU, reason="what it shows is to be seen on a GPU only")

# Liger 0.8.5 does not run in Triton's interpreter, where a kernel's number is Python's.
UNINTERPRETABLE = "scale = scale.to(tl.float32)"
INTERPRETABLE = "scale = tl.cast(scale, tl.float32)"


@pytest.fixture(scope="module")
def liger(tmp_path_factory):
    """``LigerTVDLossFunction``; in the interpreter with the one line above changed."""
    installed = importlib.import_module("liger_kernel.ops.tvd")
    if ON_GPU:
        return installed.LigerTVDLossFunction
    source = Path(inspect.getfile(installed)).read_text()
    assert source.count(UNINTERPRETABLE) == 1
    path = tmp_path_factory.mktemp("liger") / "interpretable_tvd.py"  # Triton reads the source
    path.write_text(source.replace(UNINTERPRETABLE, INTERPRETABLE))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LigerTVDLossFunction


@pytest.fixture(scope="module")
def fused():
    return importlib.import_module("liger_kernel.transformers").LigerFusedCETVDLoss()


def _rows(seed=0, shape=(4, 10), dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape, generator=generator)
    return torch.softmax(logits, -1).to(DEVICE, dtype).requires_grad_()


def _logits(seed=0, shape=(4, 10)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE).requires_grad_()


def _gradient(loss, of, upstream=3.0):
    return torch.autograd.grad(loss, of, torch.full_like(loss, upstream))[0]


def _tests():
    return {name for name in globals() if name.startswith("test_")}


def test_every_line_of_the_page_names_its_test():
    lines = re.findall(r"^\| .* \|$", PAGE, re.MULTILINE)
    named = [
        re.search(r"`(test_\w+)`(?: \(GPU\))? \|$", line) for line in lines if "test |" not in line
    ]
    assert len(named) > 20 and all(named)
    assert {match[1] for match in named} | set(re.findall(r"`(test_\w+)`", PAGE)) <= _tests()
    about_the_page = {"test_every_line_of_the_page_names_its_test"}
    assert _tests() - about_the_page == set(re.findall(r"`(test_\w+)`", PAGE))
    assert re.search(r"Liger-Kernel (\S+)\.", PAGE)[1] == importlib.metadata.version("liger-kernel")


# --- the same call -------------------------------------------------------------------------------


def test_the_page_before_and_after(liger, monkeypatch):
    module = importlib.import_module("liger_kernel.transformers.tvd")
    monkeypatch.setattr(module, "LigerTVDLossFunction", liger)
    losses, names = [], {}
    inputs, *examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(inputs.replace('"cuda"', repr(DEVICE)), names)
    for example in examples:
        exec(example, names)
        losses.append((names["loss"], _gradient(names["loss"], names["p"])))
    (before, gradient_before), (after, gradient_after) = losses
    torch.testing.assert_close(before, after)
    torch.testing.assert_close(gradient_before, gradient_after)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_values_and_gradients_agree(liger, reduction):
    p, q = _rows(0), _rows(1)
    theirs = liger.apply(p, q, LABELS, reduction, -100)
    ours = tvd_loss(p, q, LABELS, reduction=reduction, ignore_index=-100)
    torch.testing.assert_close(theirs, ours)
    torch.testing.assert_close(_gradient(theirs, p), _gradient(ours, p))


def test_the_functions_default_reduction_differs():
    functional = importlib.import_module("liger_kernel.transformers.functional")
    module = importlib.import_module("liger_kernel.transformers").LigerTVDLoss
    assert inspect.signature(functional.liger_tvd).parameters["reduction"].default == "mean"
    for ours in (module, tvd_torch.TVDLoss, tvd_loss):
        assert inspect.signature(ours).parameters["reduction"].default == "batchmean"


def test_logits_take_the_place_of_softmax(liger):
    student, teacher = _logits(0), _logits(1)
    theirs = liger.apply(student.softmax(-1), teacher.softmax(-1), LABELS)
    ours = tvd_from_logits(student, teacher, LABELS)
    torch.testing.assert_close(theirs, ours)
    torch.testing.assert_close(_gradient(theirs, student), _gradient(ours, student))


def test_fused_terms_agree(fused):
    student, teacher = _logits(0), _logits(1)
    ce, tvd = fused(student, teacher, LABELS)
    our_ce = cross_entropy_tvd_loss(student, teacher, LABELS, tvd_weight=0, reduction="per_token")
    our_tvd = tvd_from_logits(student, teacher, LABELS, reduction="per_token")
    for theirs, ours in ((ce, our_ce), (tvd, our_tvd)):
        torch.testing.assert_close(theirs, ours)
    with_both = torch.autograd.grad(ce.sum() + tvd.sum(), student)
    torch.testing.assert_close(
        with_both, torch.autograd.grad(our_ce.sum() + our_tvd.sum(), student)
    )


def test_fused_sum_agrees(fused):
    student, teacher = _logits(0), _logits(1)
    ce, tvd = fused(student, teacher, LABELS)
    theirs = (0.25 * ce + 2 * tvd).sum() / 3
    ours = cross_entropy_tvd_loss(student, teacher, LABELS, ce_weight=0.25, tvd_weight=2)
    torch.testing.assert_close(theirs, ours)
    torch.testing.assert_close(_gradient(theirs, student), _gradient(ours, student))


def test_fused_temperature_is_an_argument(fused):
    student, teacher = _logits(0), _logits(1)
    _, theirs = fused(student / 2.5, teacher / 2.5, LABELS)
    ours = tvd_from_logits(student, teacher, LABELS, temperature=2.5, reduction="per_token")
    torch.testing.assert_close(theirs, ours)
    torch.testing.assert_close(_gradient(theirs, student), _gradient(ours, student))


def test_liger_has_no_other_distance_like_this():
    folder = Path(importlib.import_module("liger_kernel").__file__).parent
    with_it = {
        file.stem
        for part in ("transformers", "chunked_loss")
        for file in (folder / part).glob("*.py")
        if re.search(r"tvd|total.variation", file.read_text(), re.IGNORECASE)
    }
    assert with_it == {"__init__", "functional", "tvd", "fused_ce_tvd"}


# --- what changes --------------------------------------------------------------------------------


def test_ties(liger):
    p = _rows(0)
    q = p.detach().clone()
    q[:, ::2] = _rows(1).detach()[:, ::2]
    for loss in (liger.apply(p, q), tvd_loss(p, q)):
        gradient = _gradient(loss, p)
        assert (gradient[:, 1::2] == 0).all() and (gradient[:, ::2] != 0).all()


def test_nan(liger):
    p, q = _rows(0), _rows(1)
    with torch.no_grad():
        p[0, 3] = torch.nan
    theirs, ours = liger.apply(p, q, None, "sum"), tvd_loss(p, q, reduction="sum")
    assert theirs.isnan() and ours.isnan()
    assert _gradient(theirs, p)[0, 3] == -0.5 * 3
    gradient = _gradient(ours, p)
    assert gradient.isnan().sum() == 1 and gradient[0, 3].isnan()


@pytest.mark.parametrize("reduction", ["batchmean", "mean"])
def test_all_labels_ignored(liger, reduction):
    p, q, ignored = _rows(0), _rows(1), torch.full_like(LABELS, -100)
    with pytest.raises(ZeroDivisionError):
        liger.apply(p, q, ignored, reduction)
    loss = tvd_loss(p, q, ignored, reduction=reduction)
    assert loss == 0 and (_gradient(loss, p) == 0).all()


@pytest.mark.parametrize("reduction", ["batchmean", "mean"])
def test_no_tokens(liger, reduction):
    p, q = _rows(shape=(0, 10)), _rows(shape=(0, 10))
    with pytest.raises(ZeroDivisionError):
        liger.apply(p, q, None, reduction)
    loss = tvd_loss(p, q, reduction=reduction)
    assert loss == 0 and _gradient(loss, p).shape == (0, 10)


def test_gradient_of_q(liger):
    p, q = _rows(0), _rows(1)
    theirs, ours = liger.apply(p.detach(), q), tvd_loss(p.detach(), q)
    assert theirs.requires_grad
    theirs.backward()
    assert q.grad is None
    torch.testing.assert_close(_gradient(ours, q), -_gradient(tvd_loss(p, q.detach()), p))
    assert not tvd_loss(p.detach(), q.detach()).requires_grad


def test_gradient_of_the_teacher(fused):
    student, teacher = _logits(0), _logits(1)
    ce, tvd = fused(student.detach(), teacher, LABELS)
    (ce.sum() + tvd.sum()).backward()
    assert teacher.grad is None
    loss = cross_entropy_tvd_loss(student, teacher, LABELS)
    assert (_gradient(loss, teacher) != 0).any()
    with pytest.raises(RuntimeError, match="does not require grad"):
        _gradient(tvd_from_logits(student.detach(), teacher.detach()), teacher)


def test_float64(liger):
    p, q = _rows(0, dtype=torch.float64), _rows(1, dtype=torch.float64)
    if torch.cuda.is_available():
        with pytest.raises(triton.CompilationError, match="loss_sum"):
            liger.apply(p, q)
    else:
        assert liger.apply(p, q).dtype == torch.float32
    assert tvd_loss(p, q).dtype == torch.float64


@only_on_a_gpu
def test_bfloat16(liger):
    p, q = _rows(0, (64, 4096), torch.bfloat16), _rows(1, (64, 4096), torch.bfloat16)
    exact = 0.5 * (p.double() - q.double()).abs()
    theirs, ours = liger.apply(p, q, None, "none"), tvd_loss(p, q, reduction="none")
    assert theirs.dtype == ours.dtype == torch.float32
    of_theirs, of_ours = (((x - exact).abs() / exact.clamp(min=1e-9)).max() for x in (theirs, ours))
    assert of_ours < 1e-6 and of_theirs > 1e-3  # bfloat16 rounds by up to 2**-9


def test_mixed_dtypes(liger):
    p, q = _rows(0), _rows(1, dtype=torch.float16)
    torch.testing.assert_close(liger.apply(p, q), tvd_loss(p, q))
    torch.testing.assert_close(tvd_loss(p, q), tvd_loss(p, q.float()))


def test_shapes_that_differ(liger):
    p, memory = _rows(0), _rows(1)
    q = (
        memory.detach().reshape(-1)[:24].reshape(4, 6)
    )  # of memory that goes on: the read is harmless
    loss = liger.apply(p, q, None, "none")
    beyond = memory.detach().reshape(-1)[24:28]  # what lies behind the last row
    torch.testing.assert_close(loss[3, 6:], 0.5 * (p.detach()[3, 6:] - beyond).abs())
    with pytest.raises(ValueError, match="q must have the shape of p"):
        tvd_loss(p, q, reduction="none")


def test_leading_dimensions(liger):
    p, q = _rows(0, (2, 3, 10)), _rows(1, (2, 3, 10))
    with pytest.raises(ValueError, match="too many values to unpack"):
        liger.apply(p, q)
    flat = liger.apply(p.reshape(6, 10), q.reshape(6, 10))
    torch.testing.assert_close(tvd_loss(p, q), flat)


def test_unknown_reduction(liger):
    with pytest.raises(KeyError):
        liger.apply(_rows(0), _rows(1), None, "average")
    with pytest.raises(ValueError, match="reduction must be one of batchmean, sum, mean"):
        tvd_torch.TVDLoss(reduction="average")


def test_fused_label_outside_the_vocab(fused):
    student, teacher = _logits(0), _logits(1)
    outside = torch.tensor([0, 0, 0, -1], device=DEVICE)
    ce, _ = fused(student, teacher, outside)
    read = student.detach()[2, -1]  # the element before the row
    torch.testing.assert_close(ce[3], student.detach()[3].logsumexp(0) - read)
    ours = cross_entropy_tvd_loss(student, teacher, outside, reduction="per_token")
    assert ours.isnan().tolist() == [False, False, False, True]


def test_what_is_kept(liger):
    p, q = _rows(0, (2, 2048)), _rows(1, (2, 2048))

    def kept(loss):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append(x.numel() * x.element_size()) or x, lambda x: x
        ):
            loss(p, q)
        return sum(sizes)

    assert kept(liger.apply) == p.numel() * 4
    codes = p.numel() // 4
    ours = kept(lambda p, q: tvd_loss(p, q, implementation="triton"))
    assert codes <= ours <= codes + 64  # and a few numbers


def test_what_is_written_without_a_gradient(liger):
    p, q = _rows(0, (2, 2048)), _rows(1, (2, 2048))

    def written(loss):
        with torch.no_grad(), _Tensors() as tensors:
            loss(p, q)
        return max(tensors.sizes)

    assert written(liger.apply) == p.numel()
    assert written(lambda p, q: tvd_loss(p, q, implementation="triton")) <= p.shape[0]


class _Tensors(TorchDispatchMode):
    """Numbers of elements of the tensors that are allocated inside it.

    By these operations: Triton's interpreter moves tensors to the host and back with others.
    """

    ALLOCATE = ("empty", "empty_like", "zeros", "zeros_like")

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.ALLOCATE:
            self.sizes.append(made.numel())
        return made


@only_on_a_gpu
def test_the_host_does_not_wait(liger):
    p, q = _rows(0), _rows(1)
    tvd_loss(p, q, LABELS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tvd_loss(p, q, LABELS)
        with pytest.raises(RuntimeError, match="synchroniz"):
            liger.apply(p, q, LABELS)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_torch_func_grad(liger):
    p, q = _rows(0).detach(), _rows(1).detach()
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda p: liger.apply(p, q))(p)
    expected = _gradient(tvd_loss(p.requires_grad_(), q), p, upstream=1.0)
    torch.testing.assert_close(torch.func.grad(lambda p: tvd_loss(p, q))(p.detach()), expected)
