"""Draw the committed results: ``python -m examples.plot``; ``--results FOLDER`` draws your own."""

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np

from examples.lab import LOSSES, OUTPUT

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def load(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def acceptance(folder):
    """Predicted 1 - TVD against measured acceptance, with 95 % intervals."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.6), layout="constrained")
    kinds = {
        "distilled on text": ("distill_torch", "distill_trainer", "distill_jax"),
        "draft trained on the teacher's output": ("draft_torch", "draft_jax"),
    }
    for axis, (title, names) in zip(axes, kinds.items(), strict=True):
        results = {name: load(folder, name)["acceptance"] for name in names}
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
    return figure


def curves(folder):
    """Loss curves of both frameworks on top of each other, and their difference below."""
    names = ("teacher", *LOSSES)
    torch, jax = (load(folder, f"distill_{name}")["curves"] for name in ("torch", "jax"))
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
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.plot", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT / "plots")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for draw in (acceptance, curves):
        path = options.output / f"{draw.__name__}.png"
        draw(options.results).savefig(path, dpi=110)
        print(f"wrote {path}")
