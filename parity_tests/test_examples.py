"""The examples run, their loss curves agree, and speculative sampling accepts as 1 - TVD says."""

import importlib
import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the extra `examples`")
pytest.importorskip("accelerate", reason="needs the extra `examples`")
pytest.importorskip("equinox", reason="needs the extra `examples`")
pytest.importorskip("optax", reason="needs the extra `examples`")

STEPS = 12
BOUND = 1e-5  # of the loss, stated in examples/README.md

# The libraries' own deprecations are not what is tested here.
pytestmark = pytest.mark.filterwarnings("default")

# Of whole runs, for the two examples whose inputs are the same in both frameworks. The gradient of
# |p - q| jumps at ties, so rounding grows faster with TVD than with KL.
WHOLE_RUN = {"teacher": 1e-5, "tvd": 2e-3, "kl": 1e-5, "hybrid": 5e-4}

_results = {}


@cache
def written():
    """One text for both frameworks: a draw that rounding flips would change all that follows."""
    from examples import distill_torch, lab

    ids, _ = lab.text()
    return lab.continuations(ids, distill_torch.logits(distill_torch.train_teacher(ids, STEPS)[0]))


def result(name):
    if name not in _results:
        options = {"written": written()} if name.startswith("draft") else {}
        _results[name] = importlib.import_module(f"examples.{name}").run(STEPS, 4, **options)
    return _results[name]


@pytest.mark.parametrize(
    "pair",
    [("distill_torch", "distill_jax"), ("distill_torch", "distill_trainer"),
     ("draft_torch", "draft_jax")],
    ids=" ".join,
)  # fmt: skip
def test_equal_inputs_give_equal_loss_curves(pair):
    first, second = (result(name)["curves"] for name in pair)
    for loss in ("teacher", "tvd", "kl", "hybrid"):
        assert len(first[loss]) == len(second[loss]) == STEPS
        assert np.std(first[loss]) > 100 * BOUND  # the loss moves, so equality says something
        difference = np.abs(np.subtract(first[loss], second[loss])).max()
        assert difference < BOUND, f"{loss}: {difference}"


@pytest.mark.parametrize(
    "name", ["distill_torch", "distill_trainer", "distill_jax", "draft_torch", "draft_jax"]
)
def test_acceptance_is_predicted_and_output_is_the_teachers(name):
    for loss, r in result(name)["acceptance"].items():
        deviation = (r["measured"] - r["predicted"]) / r["standard_error"]
        assert abs(deviation) < 4, f"{loss}: {deviation} standard errors"
        assert r["output_p_value"] > 1e-3, loss


def test_committed_curves_keep_the_stated_bounds():
    folder = Path(__file__).parent.parent / "examples" / "results"
    first, second = (
        json.loads((folder / f"distill_{name}.json").read_text())["curves"]
        for name in ("torch", "jax")
    )
    for loss, bound in WHOLE_RUN.items():
        difference = np.abs(np.subtract(first[loss], second[loss])).max()
        assert difference < bound, f"{loss}: {difference}"


def test_a_wrong_acceptance_rule_is_noticed(monkeypatch):
    """Drawing rejected tokens from the teacher, not from the residual, skews the output."""
    from examples import lab

    def logits(seed):
        row = np.random.default_rng(seed).normal(size=lab.VOCAB).astype(np.float32)
        return lambda contexts: np.tile(row, (len(contexts), 1))

    context = np.zeros(lab.CONTEXT, np.int64)
    assert lab.output_p_value(context, logits(0), logits(1), 4000) > 1e-3
    monkeypatch.setattr(lab, "residual", lambda p, q: q)
    assert lab.output_p_value(context, logits(0), logits(1), 4000) <= 1e-3


def test_an_example_prints_its_rates_and_leaves_the_committed_files(monkeypatch, tmp_path, capsys):
    from examples import lab

    assert lab.OUTPUT.parent.name == "build"  # which git ignores
    monkeypatch.setattr(lab, "OUTPUT", tmp_path / "examples")
    monkeypatch.setattr(sys, "argv", ["distill_torch", "--steps", "3"])
    rates = {"predicted": 0.76, "measured": 0.77, "standard_error": 0.005, "output_p_value": 0.5}
    rates |= {"trials": 9, "tokens_per_teacher_call": 3.1}
    lab.main("distill_torch", lambda steps, rounds: {"acceptance": {"tvd": rates}, "steps": steps})
    _, line, wrote = capsys.readouterr().out.splitlines()
    assert line.split() == ["tvd", "0.7600", "0.7700", "±", "0.0098", "3.10"]
    path = tmp_path / "examples" / "distill_torch.json"
    assert wrote == f"wrote {path}" and json.loads(path.read_text())["steps"] == 3
