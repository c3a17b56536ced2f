"""Random cases, bit for bit: every kernel route against the NumPy model of the contract's order.

``python -m parity_tests.random_bits --configurations 60 --seeds 9 --processes 12 -o FILE.json``
runs 540 cases in that many processes and writes a summary. Per-token values, the reduced loss, the
sign codes and both gradients are compared; which NaN a NaN is and the sign of a gradient that is 0
are not promised and do not count.

With ``--op logits`` the losses from logits, every kernel route against the first: NumPy has no
exponential with the bits of a GPU's.
"""

import argparse
import collections
import concurrent.futures
import json
import multiprocessing
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import results
from parity_tests import inputs, routes
from parity_tests.oracle import bits, divisor_float32, gradient_float32
from parity_tests.routes import Route
from tvd_core.reference import pack_codes, per_token_float32, reduce_float32, unpack_codes

# Real vocabularies, and the edges of lanes, tiles and windows.
VOCABS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 511, 512, 513, 1271, 2035, 2047, 2048, 2049, 4095)
VOCABS += (4096, 4160, 6145, 8192, 32000, 32768, 50257, 128256, 151936)
TOKENS = (1, 2, 3, 17, 64, 127, 128, 129, 511, 513, 4096, 4097)
REDUCTIONS = ("batchmean", "mean", "sum", "per_token")
CONTENTS = ("peaked", "uniform", "close", "special", "denormal", "sparse")


@dataclass(frozen=True)
class Configuration:
    """What a compilation depends on."""

    tokens: int
    vocab: int
    dtypes: tuple[str, str]
    reduction: str
    labels: bool
    weights: bool


def configuration(number: int, most: int = 2**23) -> Configuration:
    """The configuration of that number, of at most so many elements."""
    rng = np.random.default_rng([2026, number])
    vocab = int(rng.choice(VOCABS) if rng.random() < 0.8 else rng.integers(1, 60000))
    vocab = vocab if vocab <= most else int(rng.integers(1, most + 1))
    tokens = [t for t in TOKENS if t * vocab <= most]
    return Configuration(
        tokens=int(rng.choice(tokens)),
        vocab=vocab,
        dtypes=inputs.DTYPE_PAIRS[rng.integers(len(inputs.DTYPE_PAIRS))],
        reduction=str(rng.choice(REDUCTIONS)),
        labels=bool(rng.random() < 0.5),
        weights=bool(rng.random() < 0.5),
    )


LOGITS_CONTENTS = ("near", "far", "masked", "wide", "special", "below")
LOSSES = ("tvd_from_logits", "acceptance_loss", "hybrid_loss", "cross_entropy_tvd_loss")


@dataclass(frozen=True)
class LogitsConfiguration(Configuration):
    """As ``Configuration``, of a loss from logits."""

    loss: str
    temperature: float


def logits_configuration(number: int, most: int = 2**23) -> LogitsConfiguration:
    """The configuration of that number, of at most so many elements."""
    config = configuration(number, most)
    rng = np.random.default_rng([2027, number])
    loss = LOSSES[number % len(LOSSES)]
    labels = config.labels or loss == "cross_entropy_tvd_loss"
    temperature = float(rng.choice([1.0, 1.0, 0.5, 2.0, 0.7]))
    return LogitsConfiguration(
        **(asdict(config) | {"labels": labels}), loss=loss, temperature=temperature
    )


def _content(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    """p and q in float64, before they are rounded to their dtypes."""
    if kind == "peaked":  # as a language model's rows: softmax of wide logits
        logits = rng.standard_normal(shape) * rng.uniform(1, 12)
        exponentials = (
            np.exp(x - x.max(-1, keepdims=True)) for x in (logits, logits + rng.normal(size=shape))
        )
        p, q = (x / x.sum(-1, keepdims=True) for x in exponentials)
        return p, q
    p, q = rng.random(shape), rng.random(shape)
    if kind == "close":
        return p, np.where(rng.random(shape) < 0.5, p, p * (1 + 1e-6))
    if kind == "special":
        special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 65504.0, 3e38]
        p = np.where(rng.random(shape) < 0.05, rng.choice(special, shape), p)
        return p, np.where(rng.random(shape) < 0.05, rng.choice(special, shape), q)
    if kind == "denormal":
        return p * 1e-40, q * 1e-40
    if kind == "sparse":
        return np.where(rng.random(shape) < 0.9, 0, p), np.where(rng.random(shape) < 0.9, 0, q)
    return p, q


def _logits(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    """Logits of student and teacher in float64, before they are rounded to their dtypes."""
    teacher = rng.standard_normal(shape) * (30 if kind == "wide" else 3)
    student = rng.standard_normal(shape) * (3 if kind == "far" else 0.5)
    student = student if kind == "far" else student + teacher
    student = np.where(rng.random(shape) < 0.1, teacher, student)
    if kind == "masked":
        return tuple(np.where(rng.random(shape) < 0.3, -np.inf, x) for x in (student, teacher))
    if kind == "special":
        special = rng.choice([np.nan, np.inf, -np.inf, 1e4, -1e4], shape)
        return tuple(np.where(rng.random(shape) < 1e-3, special, x) for x in (student, teacher))
    if kind == "below":  # the sample of a row far below its maximum
        student[:, -1] += 250
        teacher[::2, shape[1] // 2] += 300
    return student, teacher


def _same(name: str, actual: np.ndarray, expected: np.ndarray) -> int:
    """Number of values whose bits differ."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
    same = (bits(actual) == bits(expected)) | (np.isnan(actual) & np.isnan(expected))
    if name in ("dp", "dq"):
        same |= (actual == 0) & (expected == 0)
    return int((~same).sum())


def compare(route: Route, config: Configuration, seed: int) -> dict[str, tuple[int, int]]:
    """Values compared and values that differ, by quantity."""
    rng = np.random.default_rng([7, seed, config.tokens, config.vocab])
    kind = CONTENTS[seed % len(CONTENTS)]
    with np.errstate(all="ignore"):
        made = _content(kind, rng, (config.tokens, config.vocab))
        p, q = (inputs.cast(x, dtype) for x, dtype in zip(made, config.dtypes, strict=True))
    options: dict[str, Any] = {"reduction": config.reduction}
    kept = np.ones(config.tokens, np.float32)
    if config.weights:
        options["weights"] = kept = inputs.weights_for(config.tokens, seed=seed)
    labels = inputs.labels_for(config.tokens, seed=seed) if config.labels else None
    if labels is not None:
        kept = np.where(labels == -100, np.float32(0), kept)
    upstream = np.asarray(rng.normal(), np.float32)

    with np.errstate(all="ignore"):
        per_token = np.where(kept == 0, np.float32(0), per_token_float32(p, q) * kept)
        divisor = divisor_float32(kept, config.vocab, config.reduction)
        total = reduce_float32(per_token)
        nothing = total == 0 and divisor == 0
        loss = np.float32(0) if nothing else total / divisor
        loss = per_token if config.reduction == "per_token" else np.asarray(loss, np.float32)
        scale = upstream * np.float32(0.5)
        scale = scale if config.reduction == "per_token" else scale / divisor
        dp = gradient_float32(p, q, scale * kept, kept)
        gradients = {"dp": dp.astype(p.dtype), "dq": (-dp).astype(q.dtype)}

    forward = route.forward(p, q, labels, **options)
    step = route.run(p, q, labels, upstream=upstream, **options)
    rows = kept != 0  # the codes of ignored rows are not promised
    codes, right = (unpack_codes(x, config.vocab)[rows] for x in (forward.codes, pack_codes(p, q)))
    pairs = {
        "per_token": (forward.per_token, per_token),
        "loss": (forward.loss, loss),
        "loss that keeps nothing": (route.loss(p, q, labels, **options), loss),
        "codes": (codes, right),
        "dp": (step.dp, gradients["dp"]),
        "dq": (step.dq, gradients["dq"]),
    }
    return {name: (a.size, _same(name, a, b)) for name, (a, b) in pairs.items()}


def compare_logits(
    first: Route, others: list[Route], config: LogitsConfiguration, seed: int
) -> dict[str, dict[str, tuple[int, int]]]:
    """As ``compare`` for each of the others, held against the first."""
    rng = np.random.default_rng([8, seed, config.tokens, config.vocab])
    kind = LOGITS_CONTENTS[seed % len(LOGITS_CONTENTS)]
    with np.errstate(all="ignore"):
        made = _logits(kind, rng, (config.tokens, config.vocab))
        s, t = (inputs.cast(x, dtype) for x, dtype in zip(made, config.dtypes, strict=True))
    options: dict[str, Any] = {"function": config.loss, "reduction": config.reduction}
    options |= {"temperature": config.temperature, "upstream": np.asarray(rng.normal(), np.float32)}
    if config.weights:
        options["weights"] = inputs.weights_for(config.tokens, seed=seed)
    labels = inputs.labels_for(config.tokens, seed=seed) if config.labels else None
    if labels is not None:
        labels = np.where(labels == -100, -100, labels % config.vocab).astype(np.int32)
    right, *found = (route.run(s, t, labels, **options) for route in (first, *others))
    return {
        route.name: {
            f"{config.loss}: {name}": (x.size, _same(name, x, getattr(right, name)))
            for name, x in (("loss", result.loss), ("dp", result.dp), ("dq", result.dq))
        }
        for route, result in zip(others, found, strict=True)
    }


def _cases(config: Configuration, seed: int) -> dict[str, dict[str, tuple[int, int]]]:
    kernels = routes.runnable(kernels=True)
    if isinstance(config, LogitsConfiguration):
        first, *others = (route for route in kernels if route.has_logits)
        return compare_logits(first, others, config, seed)
    return {route.name: compare(route, config, seed) for route in kernels}


def run(config: Configuration, seeds: int) -> dict[str, dict[str, tuple[int, int]]]:
    """All seeds of one configuration on every kernel route, added up."""
    result: dict[str, dict[str, tuple[int, int]]] = collections.defaultdict(dict)
    for seed in range(seeds):
        for route, quantities in _cases(config, seed).items():
            for name, counts in quantities.items():
                before = result[route].get(name, (0, 0))
                result[route][name] = (before[0] + counts[0], before[1] + counts[1])
    return dict(result)


def _environment() -> dict[str, Any]:
    return {k: v for k, v in results.environment("random bits").items() if k != "flush_bytes"}


def main() -> int:
    """Runs the cases; 1 if any bit differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configurations", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=9)
    parser.add_argument("--elements", type=int, default=2**23, help="most elements of a case")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--op", choices=("probabilities", "logits"), default="probabilities")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    make = configuration if arguments.op == "probabilities" else logits_configuration
    configs = [make(i, arguments.elements) for i in range(arguments.configurations)]
    totals: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    failed = []
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.processes, mp_context=spawn) as pool:
        jobs = {pool.submit(run, config, arguments.seeds): config for config in configs}
        for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            differ = 0
            for route, quantities in job.result().items():
                for name, (compared, different) in quantities.items():
                    totals[route][f"{name}: compared"] += compared
                    totals[route][f"{name}: differ"] += different
                    differ += different
            if differ:
                failed.append(asdict(jobs[job]) | {"differ": differ})
            print(f"{done}/{len(configs)} {jobs[job]}: {differ or 'no'} bits differ", flush=True)
    cases = arguments.configurations * arguments.seeds
    print(f"{cases} cases, {len(failed)} configurations with a difference")
    for route, counts in totals.items():
        print(f"{route}: " + ", ".join(f"{k} {v}" for k, v in counts.items()))
    if arguments.output:
        summary = {"cases": cases, "routes": totals, "failed": failed}
        text = json.dumps({"environment": _environment()} | summary, indent=1)
        results.write_atomically(arguments.output, text + "\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
