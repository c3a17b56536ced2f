"""Times the settings of ``tvd_core.config`` against each other, in one process on one GPU.

``python -m bench.tune jax-pallas --shapes 16384x4096,256x32768 --phases forward,forward_keep
--set PALLAS_STAGES=2,4 --set PALLAS_MAX_BLOCKS_PER_SM=3,5 -o build/tune.json`` times the four
combinations, each checked against the oracle first. A setting that is a function of the shape
(``triton_forward_stages``) becomes the constant that is given. For finding the numbers in
``config``: results files for the README come from ``python -m bench run``.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import inputs, results, timing
from bench.child import UPSTREAM, make_backend
from bench.gpus import datasheet_tb_s, detect_gpu, floor_us
from bench.oracle import Oracle
from bench.shapes import PHASES, Shape, minimum_bytes, parse_shapes
from tvd_core import config

Settings = dict[str, int]


def combinations(options: list[str]) -> list[Settings]:
    """Every combination of ``NAME=1,2,...``; ``ValueError`` for what config does not have."""
    names, values = [], []
    for option in options:
        name, _, numbers = option.partition("=")
        if not hasattr(config, name):
            raise ValueError(f"tvd_core.config has no {name!r}")
        try:
            values.append([int(number) for number in numbers.split(",")])
        except ValueError:
            raise ValueError(f"settings are NAME=1,2,..., got {option!r}") from None
        names.append(name)
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)]


def apply(settings: Settings) -> None:
    """Sets config for what is traced and launched from here on."""
    for name, value in settings.items():
        constant = (lambda *_, value=value: value) if callable(getattr(config, name)) else value
        setattr(config, name, constant)
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


class Tuner:
    """Times one implementation."""

    def __init__(self, implementation: str, repeats: int) -> None:
        self.implementation, self.repeats = implementation, repeats
        gpu = detect_gpu()
        self.tb_s = datasheet_tb_s(gpu["gpu"]) if gpu else None
        self.backend = make_backend(implementation.split("-")[0], "cuda" if gpu else "cpu")
        self.flush = self.backend.flush if gpu else None
        self.reader: timing.Reader | None = None
        if gpu:
            copy = self.backend.copy_call(2**28)
            makers = self.backend.reader_makers()
            self.reader, _ = timing.choose_reader(makers, copy, self.backend.sync)

    def row(self, phase: str, shape: Shape, p: Any, q: Any, oracle: Oracle) -> dict[str, Any]:
        loss = self.backend.candidate(self.implementation, shape.op)
        call = self.backend.phase(phase, loss, p, q, UPSTREAM)
        result = call()
        upstream = 1.0 if phase == "total_upstream_1" else UPSTREAM
        kept = phase == "forward_keep"
        oracle.check(self.implementation, (result[0], None) if kept else result, upstream)
        timed = timing.time_call(call, self.backend.sync, self.flush, self.reader, self.repeats)
        floor = floor_us(minimum_bytes(shape, phase), self.tb_s)
        us = timed["kernel_us"]
        ratio = None if floor is None or us is None else us / floor
        return {"shape": str(shape), "phase": phase, "floor_ratio": ratio} | timed

    def run(self, shapes: list[Shape], phases: list[str], tried: list[Settings]) -> Any:
        """Yields the rows; what fails is a row that says why."""
        for shape in shapes:
            p, q = self.backend.make_inputs(shape, inputs.SEED)
            oracle = Oracle(self.backend, shape, p, q)
            for settings, phase in itertools.product(tried, phases):
                apply(settings)
                try:
                    row = self.row(phase, shape, p, q, oracle)
                except Exception as error:
                    row = {"shape": str(shape), "phase": phase, "error": f"{error}"[:300]}
                yield {"implementation": self.implementation, "settings": settings, **row}
            del p, q, oracle
            self.backend.release()


def _text(row: dict[str, Any]) -> str:
    head = f"{row['implementation']} {row['phase']:12} {row['shape']:24}"
    settings = " ".join(f"{k}={v}" for k, v in row["settings"].items())
    if "error" in row:
        return f"{head} {settings}: {row['error']}"
    if row["kernel_us"] is None:
        return f"{head} {settings}: {row['wall_us']:.1f} µs wall"
    ratio = "" if row["floor_ratio"] is None else f" ({row['floor_ratio']:.3f} x floor)"
    return f"{head} {settings}: {row['kernel_us']:.1f} µs{ratio} {row['kernel_names']}"


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("implementation", help="torch-triton, jax-pallas, jax-triton, ...")
    parser.add_argument("--shapes", default="16384x4096", help="as for python -m bench run")
    parser.add_argument("--phases", default="forward", help=", ".join(PHASES))
    parser.add_argument("--set", action="append", default=[], metavar="NAME=1,2")
    parser.add_argument("--repeats", type=int, default=timing.KERNEL_REPEATS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    console = Console()
    try:
        shapes, tried = parse_shapes(options.shapes), combinations(options.set)
        phases = options.phases.split(",")
        unknown = sorted(set(phases) - set(PHASES))
        if unknown:
            raise ValueError(f"phases are {', '.join(PHASES)}, got {', '.join(unknown)}")
    except ValueError as error:
        console.print(f"[red]{error}[/red]")
        return 2
    rows = []
    for row in Tuner(options.implementation, options.repeats).run(shapes, phases, tried):
        rows.append(row)
        console.print(_text(row), soft_wrap=True, highlight=False, markup=False)
    if options.output:
        environment = results.environment("tune")
        results.write_result(options.output, {"environment": environment, "rows": rows})
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
