"""Draw ``examples/plots`` from ``examples/results``: ``python -m examples.plot``."""

import json
from pathlib import Path

import matplotlib
import numpy as np

from examples.lab import LOSSES

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent


def load(name):
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def acceptance():
    """Predicted 1 - TVD against measured acceptance, with 95 % intervals."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.6), layout="constrained")
    kinds = {
        "distilled on text": ("distill_torch", "distill_trainer", "distill_jax"),
        "draft trained on the teacher's output": ("draft_torch", "draft_jax"),
    }
    for axis, (title, names) in zip(axes, kinds.items(), strict=True):
        results = {name: load(name)["acceptance"] for name in names}
        for column, name in enumerate(names):
            for row, loss in enumerate(LOSSES):
                r = results[name][loss]
                x = row + 0.2 * (column - (len(names) - 1) / 2)
                axis.errorbar(x, r["measured"], 1.96 * r["standard_error"], fmt="o", capsize=3,
                              color=f"C{column}", label=name if row == 0 else None)  # fmt: skip
                axis.plot(x, r["predicted"], "_", color="black", markersize=14,
                          label="predicted, 1 - TVD" if column == row == 0 else None)  # fmt: skip
        axis.set_xticks(range(len(LOSSES)), LOSSES)
        axis.set(title=title, ylabel="acceptance rate", xlabel="loss of the student")
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    figure.savefig(HERE / "plots" / "acceptance.png", dpi=110)


def curves():
    """Loss curves of both frameworks on top of each other, and their difference below."""
    names = ("teacher", *LOSSES)
    torch, jax = load("distill_torch")["curves"], load("distill_jax")["curves"]
    figure, axes = plt.subplots(
        2, len(names), figsize=(12, 5), sharex=True, layout="constrained", height_ratios=(2, 1)
    )
    for column, name in enumerate(names):
        a, b = np.array(torch[name]), np.array(jax[name])
        axes[0, column].plot(a, label="PyTorch", linewidth=3, alpha=0.4)
        axes[0, column].plot(b, label="JAX", linewidth=0.8, color="black")
        axes[0, column].set_title(name)
        axes[1, column].semilogy(np.maximum(np.abs(a - b), 1e-9), linewidth=0.8)
        axes[1, column].set(ylim=(1e-9, 1e-2), xlabel="step")
    axes[0, 0].set_ylabel("loss")
    axes[1, 0].set_ylabel("|difference|")
    axes[0, 0].legend()
    figure.savefig(HERE / "plots" / "curves.png", dpi=110)


if __name__ == "__main__":
    acceptance()
    curves()
