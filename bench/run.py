"""Plans a run, starts one child process per framework, and collects their rows."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import results, text
from bench.child import base_row
from bench.shapes import DEFAULT_GROUPS, GROUPS, LOGITS, LOSS, PHASES, Shape

FRAMEWORKS = {
    "torch": (
        *("torch-triton", "liger", "speculators"),
        *("torch-compile", "torch-formula", "torch-eager"),
    ),
    "jax": ("jax-pallas", "jax-triton", "jax-xla", "jax-formula"),
}
IMPLEMENTATIONS = tuple(name for names in FRAMEWORKS.values() for name in names)
LOGITS_ONLY = ("speculators",)
# Without torch-compile: compiling C++ for every shape and phase takes minutes.
CPU_IMPLEMENTATIONS = ("torch-eager", "torch-formula", "jax-xla", "jax-formula")
CPU_REPEATS = 3
console = Console(stderr=True, markup=False)


@dataclass
class Plan:
    """What to measure."""

    shapes: list[Shape]
    implementations: list[str]
    phases: list[str]
    device: str
    repeats: int

    def jobs(self) -> Iterator[tuple[str, Shape]]:
        """Implementation and shape of every job."""
        for shape in self.shapes:
            for implementation in self.implementations:
                if shape.op == LOGITS or implementation not in LOGITS_ONLY:
                    yield implementation, shape

    def rows(self) -> Iterator[tuple[str, str, Shape]]:
        """Implementation, phase and shape of every row."""
        for implementation, shape in self.jobs():
            for phase in self.phases:
                yield implementation, phase, shape


def default_plan(device: str, ops: tuple[str, ...] = (LOSS,)) -> Plan:
    """Everything on a GPU; the CPU implementations on small shapes without one."""
    from bench.timing import KERNEL_REPEATS

    on_gpu = device == "cuda"
    groups = [group for op in ops for group in DEFAULT_GROUPS[device, op]]
    shapes = [shape for group in groups for shape in GROUPS[group][1]]
    implementations = IMPLEMENTATIONS if on_gpu else CPU_IMPLEMENTATIONS
    repeats = KERNEL_REPEATS if on_gpu else CPU_REPEATS
    return Plan(shapes, list(implementations), list(PHASES), device, repeats)


def _jobs(plan: Plan, framework: str, done: set[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Jobs of a framework that have rows left to measure, by shape."""
    jobs = []
    for implementation, shape in plan.jobs():
        if implementation not in FRAMEWORKS[framework]:
            continue
        phases = [
            phase
            for phase in plan.phases
            if results.row_key(base_row(implementation, phase, shape)) not in done
        ]
        if phases:
            job = {"shape": asdict(shape), "implementation": implementation, "phases": phases}
            jobs.append(job)
    return jobs


def _write_text_inputs(shapes: list[Shape], folder: Path) -> None:
    """Makes the real-text inputs once, for the children to read."""
    for tokens, vocab in {(s.tokens, s.vocab) for s in shapes if s.inputs == "text"}:
        console.print(f"making real-text inputs {tokens}x{vocab}")
        try:
            made = text.text_inputs(tokens, vocab)
        except ImportError as error:  # the jobs that need the text will say that it is missing
            console.print(f"no real-text inputs: {error}")
            return
        for which, x in zip("pq", made, strict=True):
            np.save(folder / f"{which}-{tokens}x{vocab}.npy", x)


def _child_events(spec: dict[str, Any], folder: Path, module: str) -> Iterator[dict[str, Any]]:
    """Events of a child process; the last one is ``exit`` with its code."""
    path = folder / f"{spec['framework']}.json"
    path.write_text(json.dumps(spec))
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment.pop("TRITON_INTERPRET", None)  # an interpreter's time says nothing
    if spec["device"] == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", module, str(path)]
    with subprocess.Popen(
        command, cwd=results.ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
            yield {"event": "exit", "code": process.wait()}
        except BaseException:
            process.kill()
            raise


def _failed_rows(
    job: dict[str, Any], measured: set[str], status: str, reason: str
) -> list[dict[str, Any]]:
    shape = Shape(**job["shape"])
    return [
        base_row(job["implementation"], phase, shape) | {"status": status, "reason": reason}
        for phase in job["phases"]
        if phase not in measured
    ]


def _run_framework(
    spec: dict[str, Any], folder: Path, module: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """``("environment" | "row", values)`` of a framework's jobs, even if its process dies."""
    jobs = spec["jobs"]
    while jobs:
        current, done, unavailable = None, 0, None
        measured: set[str] = set()
        for event in _child_events(spec | {"jobs": jobs}, folder, module):
            match event["event"]:
                case "environment":
                    yield "environment", event["values"]
                case "unavailable":
                    unavailable = event["reason"]
                case "start":
                    current, measured = event["job"], set()
                case "row":
                    measured.add(event["row"]["phase"])
                    yield "row", event["row"]
                case "done":
                    current, done = None, done + 1
                case "exit":
                    code = event["code"]
        reason = f"the process ended with code {code}; its standard error says why"
        if unavailable is not None or (current is None and done == 0):
            status = "failed" if unavailable is None else "unavailable"
            for job in jobs:
                for row in _failed_rows(job, set(), status, unavailable or reason):
                    yield "row", row
            return
        if current is not None:
            for row in _failed_rows(jobs[current], measured, "failed", reason):
                yield "row", row
            done += 1
        jobs = jobs[done:]


def describe(row: dict[str, Any]) -> str:
    """One line about a finished row."""
    shape = f"{row['tokens']}x{row['vocab']}:{row['dtype']}:{row['inputs']}"
    start = f"{row['implementation']} {row['phase']} {shape}"
    if row["status"] != "ok":
        return f"{start}: {row['status']}: {row['reason']}"
    if row["kernel_us"] is None:
        return f"{start}: {row['wall_us']:.1f} µs wall"
    ratio = "" if row["floor_ratio"] is None else f", {row['floor_ratio']:.2f} × floor"
    return f"{start}: {row['kernel_us']:.1f} µs{ratio}"


def run(plan: Plan, output: Path, protocol: str = "kernel", module: str = "bench.child") -> dict:
    """Measures a plan and writes the results file; unfinished runs resume from their journal."""
    stamp = results.environment(protocol)
    journal = results.Journal(output, stamp)
    measured_environment = dict(stamp)
    for line in journal.lines:
        measured_environment |= line.get("environment", {})
    planned = {results.row_key(base_row(*row)) for row in plan.rows()}
    rows = [x for x in journal.lines if "environment" not in x and results.row_key(x) in planned]
    if rows:
        console.print(f"resuming: {len(rows)} rows of {journal.path} are kept")
    done = {results.row_key(row) for row in rows}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with tempfile.TemporaryDirectory(prefix="tvd-bench-") as name:
        folder = Path(name)
        try:
            _write_text_inputs(plan.shapes, folder)
            with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
                bar = progress.add_task("bench", total=len(planned), completed=len(done))
                for framework in FRAMEWORKS:
                    spec = {
                        "framework": framework,
                        "device": plan.device,
                        "repeats": plan.repeats,
                        "seed": stamp["seed"],
                        "datasheet_tb_s": stamp["datasheet_tb_s"],
                        "text_folder": name,
                        "jobs": _jobs(plan, framework, done),
                    }
                    for kind, values in _run_framework(spec, folder, module):
                        if kind == "environment":
                            measured_environment |= values
                            journal.add({"environment": values})
                            continue
                        rows.append(values)
                        journal.add(values)
                        progress.update(bar, advance=1, description=values["implementation"])
                        console.print(describe(values), highlight=False, soft_wrap=True)
        except BaseException:
            resumable = stamp["dirty"] is False
            then = (
                "goes on from there"
                if resumable
                else "starts anew, because this tree is at no known commit"
            )
            console.print(
                f"stopped: no results file was written; {len(rows)} finished rows are kept in "
                f"{journal.path}, the same command {then}"
            )
            raise
    check_identical_inputs(rows)
    result = {"environment": measured_environment, "rows": rows}
    results.write_result(output, result)
    journal.remove()
    console.print(f"wrote {output}")
    return result


def check_identical_inputs(rows: list[dict[str, Any]]) -> None:
    """Raises if two processes measured different inputs under the same name."""
    seen: dict[tuple[Any, ...], tuple[list[int], str]] = {}
    for row in rows:
        sums = row.get("input_checksums")
        if sums is None:
            continue
        key = tuple(row[name] for name in ("tokens", "vocab", "dtype", "inputs"))
        first, implementation = seen.setdefault(key, (sums, row["implementation"]))
        if first != sums:
            raise RuntimeError(
                f"inputs {key} differ between {implementation} ({first}) and "
                f"{row['implementation']} ({sums})"
            )
