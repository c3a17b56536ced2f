"""What the examples share and no framework owns: text, parameters, speculative sampling, results.

Everything random is drawn here, with NumPy and fixed seeds, so that both frameworks start from the
same parameters and see the same batches. A model is a feed-forward language model: the embeddings
of the last ``context`` bytes, one hidden layer, logits of the next byte.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.text import corpus

OUTPUT = Path(__file__).resolve().parent.parent / "build" / "examples"  # git ignores build/
VOCAB = 128  # ASCII
CONTEXT = 16  # what the teacher sees; a student sees the last STUDENT["context"] of it
TEACHER = {"context": 16, "width": 24, "hidden": 128}
STUDENT = {"context": 4, "width": 16, "hidden": 64}
LOSSES = ("tvd", "kl", "hybrid")
LEARNING_RATE = 2e-3
EPSILON = 1e-8  # added to the root of the second moment, in torch.optim.Adam and in optax.adam
BATCH = 128

Logits = Callable[[NDArray[np.int64]], NDArray[np.float32]]
Acceptance = Callable[[NDArray[np.float32], NDArray[np.float32]], NDArray[np.float32]]


def text() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bytes for training, and the last tenth, which is held out."""
    ids = np.frombuffer(corpus().encode("ascii", "replace"), np.uint8).astype(np.int64)
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:]


def batches(ids: NDArray[np.int64], steps: int, seed: int) -> NDArray[np.int64]:
    """Windows ``[steps, BATCH, CONTEXT + 1]``: the context, then the byte that follows it."""
    starts = np.random.default_rng(seed).integers(0, len(ids) - CONTEXT, (steps, BATCH))
    return ids[starts[..., None] + np.arange(CONTEXT + 1)]


def parameters(size: dict[str, int], seed: int) -> dict[str, NDArray[np.float32]]:
    """Initial float32 parameters; a matrix maps ``[..., rows]`` to ``[..., columns]``."""
    rng = np.random.default_rng(seed)
    inputs = size["context"] * size["width"]
    values = {
        "embedding": rng.normal(size=(VOCAB, size["width"])),
        "w1": rng.normal(size=(inputs, size["hidden"])) / np.sqrt(inputs),
        "b1": np.zeros(size["hidden"]),
        "w2": rng.normal(size=(size["hidden"], VOCAB)) / np.sqrt(size["hidden"]),
        "b2": np.zeros(VOCAB),
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    values = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return values / values.sum(-1, keepdims=True)


def _draw(probabilities: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """One token per row, by inverting the cumulative distribution."""
    cumulative = probabilities.cumsum(-1)
    return (cumulative < rng.random((len(cumulative), 1)) * cumulative[:, -1:]).sum(-1)


def residual(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """What a rejected token is drawn from instead, not normalised."""
    return np.maximum(q - p, 0)


def speculative_round(
    contexts: NDArray[np.int64], draft: Logits, teacher: Logits, gamma: int, rng
) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """One round of speculative sampling (Leviathan et al. 2023, algorithm 1) on many streams.

    The draft proposes ``gamma`` tokens. Each is accepted with probability ``min(1, q / p)`` until
    one is not; that one is drawn anew from ``max(q - p, 0)``, normalised. If all are accepted,
    one more is drawn from the teacher.

    Returns:
        New tokens ``[streams, gamma + 1]``, the number accepted ``[streams]``, and the draft's and
        teacher's logits ``[streams, gamma, vocab]``.
    """
    rows = np.arange(len(contexts))
    sequence, draft_logits = contexts, []
    for _ in range(gamma):
        draft_logits.append(draft(sequence[:, -CONTEXT:]))
        token = _draw(_softmax(draft_logits[-1]), rng)
        sequence = np.concatenate([sequence, token[:, None]], 1)
    windows = np.stack([sequence[:, i : i + CONTEXT] for i in range(gamma + 1)], 1)
    teacher_logits = teacher(windows.reshape(-1, CONTEXT)).reshape(len(rows), gamma + 1, VOCAB)
    p, q = _softmax(np.stack(draft_logits, 1)), _softmax(teacher_logits)
    tokens = np.concatenate([sequence[:, CONTEXT:], np.zeros((len(rows), 1), np.int64)], 1)

    drafted = tokens[:, :gamma, None]
    ratio = np.take_along_axis(q[:, :gamma], drafted, 2) / np.take_along_axis(p, drafted, 2)
    accepted = np.cumprod(rng.random((len(rows), gamma)) < ratio[..., 0], 1).sum(1)
    # Past the last drafted token p is 0, so that the residual is the teacher's distribution.
    p = np.concatenate([p, np.zeros_like(p[:, :1])], 1)
    tokens[rows, accepted] = _draw(residual(p[rows, accepted], q[rows, accepted]), rng)
    return tokens, accepted, np.stack(draft_logits, 1), teacher_logits[:, :gamma]


def measure(
    contexts: NDArray[np.int64],
    draft: Logits,
    teacher: Logits,
    acceptance: Acceptance,
    rounds: int,
    gamma: int,
    seed: int = 7,
) -> dict[str, float]:
    """Decode speculatively; compare the share of accepted tokens with the mean of ``1 - TVD``.

    Each drafted token that is tested is a Bernoulli trial with probability ``1 - TVD`` of its
    context, so the share deviates by ``sqrt(sum a * (1 - a)) / trials``.
    """
    rng = np.random.default_rng(seed)
    predicted, hits, emitted = [], 0, 0
    for _ in range(rounds):
        tokens, accepted, p, q = speculative_round(contexts, draft, teacher, gamma, rng)
        tested = np.arange(gamma) <= accepted[:, None]
        a = acceptance(p.reshape(-1, VOCAB), q.reshape(-1, VOCAB)).reshape(tested.shape)
        predicted.append(a[tested].astype(np.float64))
        hits, emitted = hits + int(accepted.sum()), emitted + int((accepted + 1).sum())
        sequence = np.concatenate([contexts, tokens], 1)
        contexts = np.take_along_axis(
            sequence, (accepted + 1)[:, None] + np.arange(CONTEXT), axis=1
        )
    a = np.concatenate(predicted)
    return {
        "predicted": float(a.mean()),
        "measured": hits / len(a),
        "standard_error": float(np.sqrt((a * (1 - a)).sum()) / len(a)),
        "trials": len(a),
        "tokens_per_teacher_call": emitted / (rounds * len(contexts)),
    }


def output_p_value(
    context: NDArray[np.int64], draft: Logits, teacher: Logits, draws: int, seed: int = 11
) -> float:
    """p-value of "speculative sampling's first token follows the teacher", by Pearson's X².

    The reference distribution of X² is simulated, so rare tokens need no pooling.
    """
    rng = np.random.default_rng(seed)
    tokens = speculative_round(np.tile(context, (draws, 1)), draft, teacher, 1, rng)[0][:, 0]
    q = _softmax(teacher(context[None]))[0]
    counts = np.concatenate(
        [np.bincount(tokens, minlength=VOCAB)[None], rng.multinomial(draws, q, size=999)]
    )
    statistic = ((counts - draws * q) ** 2 / np.maximum(draws * q, 1e-300)).sum(1)
    return float((statistic >= statistic[0]).mean())


def continuations(ids: NDArray[np.int64], teacher: Logits, length: int = 64) -> NDArray[np.int64]:
    """``[streams, CONTEXT + length]``: prompts from the text, and what the teacher writes next."""
    rng = np.random.default_rng(13)
    sequence = batches(ids, 4, seed=4)[..., :CONTEXT].reshape(-1, CONTEXT)
    for _ in range(length):
        token = _draw(_softmax(teacher(sequence[:, -CONTEXT:])), rng)
        sequence = np.concatenate([sequence, token[:, None]], 1)
    return sequence


def windows(written: NDArray[np.int64], steps: int, seed: int) -> NDArray[np.int64]:
    """Batches like those of :func:`batches`, from many short texts instead of one."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(written), (steps, BATCH))
    starts = rng.integers(0, written.shape[1] - CONTEXT, (steps, BATCH))
    return written[rows[..., None], starts[..., None] + np.arange(CONTEXT + 1)]


def evaluate(
    held_out: NDArray[np.int64], draft: Logits, teacher: Logits, acceptance: Acceptance, rounds: int
) -> dict[str, float]:
    """Speculative sampling from held-out prompts: acceptance, and whether the output is right."""
    prompts = batches(held_out, 1, seed=5)[0, :, :CONTEXT]
    result = measure(prompts, draft, teacher, acceptance, rounds, gamma=4)
    result["output_p_value"] = output_p_value(prompts[0], draft, teacher, draws=4000)
    return result


def write(path: Path, result: dict) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial, path)


def arguments(name: str) -> argparse.Namespace:
    """``--steps``, ``--rounds`` and ``-o`` of an example's command line."""
    parser = argparse.ArgumentParser(prog=f"python -m examples.{name}")
    parser.add_argument("--steps", type=int, default=400, help="of the teacher and each student")
    parser.add_argument("--rounds", type=int, default=20, help="of speculative sampling")
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        default=OUTPUT / f"{name}.json",
        help="default: build/examples; the committed file is in examples/results",
    )
    return parser.parse_args()


def summary(result: dict) -> str:
    """A line for each loss: the acceptance rate as predicted and as measured, tokens per call."""
    lines = ["loss    predicted 1 - TVD   measured acceptance   tokens per teacher call"]
    for name, r in result["acceptance"].items():
        measured = f"{r['measured']:.4f} ± {1.96 * r['standard_error']:.4f}"
        calls = r["tokens_per_teacher_call"]
        lines.append(f"{name:6}{r['predicted']:19.4f}   {measured:>19}   {calls:23.2f}")
    return "\n".join(lines)


def main(name: str, run: Callable[[int, int], dict]) -> None:
    """An example's command: runs, writes the curves and rates, prints the rates."""
    options = arguments(name)
    result = run(options.steps, options.rounds)
    write(options.output, result)
    print(summary(result))
    print(f"wrote {options.output}")
