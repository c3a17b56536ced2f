"""The child process of one framework: makes the inputs, checks every candidate, then times it.

It reads its jobs from a JSON file and writes one JSON event a line to its standard output; what
libraries print goes to standard error.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bench import Unavailable, timing
from bench.gpus import floor_us
from bench.oracle import Oracle, Wrong
from bench.shapes import PHASES, Shape, minimum_bytes

UPSTREAM = 0.37


def make_backend(framework: str, device: str) -> Any:
    if framework == "torch":
        from bench.candidates_torch import Backend as TorchBackend

        return TorchBackend(device)
    from bench.candidates_jax import Backend as JaxBackend

    return JaxBackend(device)


class Child:
    """Works off the jobs of one framework."""

    def __init__(self, spec: dict[str, Any], events: TextIO) -> None:
        self.spec = spec
        self._events = events
        self.backend = make_backend(spec["framework"], spec["device"])
        self.reader: timing.Reader | None = None

    def emit(self, event: str, **values: Any) -> None:
        self._events.write(json.dumps({"event": event, **values}) + "\n")
        self._events.flush()

    def run(self) -> int:
        self.emit("environment", values=self._environment())
        shape, p, q, oracle, sums = None, None, None, None, None
        for number, job in enumerate(self.spec["jobs"]):
            self.emit("start", job=number)
            if Shape(**job["shape"]) != shape:
                p = q = oracle = None  # before the next are made: both may not fit
                self.backend.release()
                shape = Shape(**job["shape"])
                p, q = self._inputs(shape)
                sums = [self.backend.checksum(x) for x in (p, q)]
                oracle = Oracle(self.backend, shape, p, q)
            assert shape is not None and oracle is not None and sums is not None
            self._job(job["implementation"], job["phases"], shape, p, q, oracle, sums)
            self.emit("done", job=number)
            gc.collect()
            if self.backend.broken():
                return 3  # the parent starts a fresh process for the jobs that are left
        return 0

    def _inputs(self, shape: Shape) -> tuple[Any, Any]:
        if shape.inputs in ("random", "logits"):
            return self.backend.make_inputs(shape, self.spec["seed"])
        if shape.inputs != "text":
            raise ValueError(f"inputs {shape.inputs!r} belong to --protocol published")
        folder = Path(self.spec["text_folder"])
        p, q = (
            self.backend.from_numpy(
                np.load(folder / f"{which}-{shape.tokens}x{shape.vocab}.npy"), shape.dtype
            )
            for which in "pq"
        )
        return p, q

    def _environment(self) -> dict[str, Any]:
        values = self.backend.environment()
        if self.spec["device"] == "cpu":
            return values
        size = 2**30
        copy = self.backend.copy_call(size)
        self.reader, reasons = timing.choose_reader(
            self.backend.reader_makers(), copy, self.backend.sync
        )
        framework = self.backend.framework
        values[f"{framework}_reader"] = None if self.reader is None else self.reader.name
        values[f"{framework}_readers_passed_over"] = reasons
        if self.reader is not None:
            times = [
                sum(
                    a.duration_ns for a in timing.measure_once(self.reader, copy, self.backend.sync)
                )
                for _ in range(9)
            ]
            values[f"{framework}_copy_tb_s"] = 2 * size / sorted(times)[4] / 1e3
            values[f"{framework}_copy_reader_us"] = sorted(times)[4] / 1e3
        values[f"{framework}_copy_event_us"] = self.backend.copy_event_us(copy)
        return values

    def _job(
        self,
        implementation: str,
        phases: list[str],
        shape: Shape,
        p: Any,
        q: Any,
        oracle: Oracle,
        sums: list[int],
    ) -> None:
        kept, reason, status = None, None, "ok"
        try:
            loss = self.backend.candidate(implementation, shape.op)
            kept = self.backend.kept_bytes(loss, p, q)
        except Exception as error:
            status, reason = _status(error)
        for phase in phases:
            row = base_row(implementation, phase, shape) | {
                "kept_bytes": kept,
                "input_checksums": sums,
                "status": status,
                "reason": reason,
            }
            if status == "ok":
                try:
                    row |= self._phase(implementation, phase, loss, shape, p, q, oracle)
                except Exception as error:
                    row["status"], row["reason"] = _status(error)
            self.emit("row", row=row)

    def _phase(
        self,
        implementation: str,
        phase: str,
        loss: Any,
        shape: Shape,
        p: Any,
        q: Any,
        oracle: Oracle,
    ) -> dict[str, Any]:
        backend = self.backend
        call = backend.phase(phase, loss, p, q, UPSTREAM)
        result = call()
        backend.sync(result)
        upstream = 1.0 if phase == "total_upstream_1" else UPSTREAM
        if phase == "forward_keep":
            result = (result[0], None)
        error = oracle.check(implementation, result, upstream)
        del result
        flush = None if self.spec["device"] == "cpu" else backend.flush
        if flush is not None:
            backend.sync(flush())
        timed = timing.time_call(call, backend.sync, flush, self.reader, self.spec["repeats"])
        floor = floor_us(minimum_bytes(shape, phase), self.spec["datasheet_tb_s"])
        kernel_us = timed["kernel_us"]
        return {
            **timed,
            "floor_ratio": None if floor is None or kernel_us is None else kernel_us / floor,
            "loss_relative_error": error,
            "upstream": upstream if "total" in phase or phase == "backward" else None,
            "peak_bytes": backend.peak_bytes(call, p, q),
        }


def base_row(implementation: str, phase: str, shape: Shape) -> dict[str, Any]:
    """A row that nothing was measured for yet: every field that a reader may count on."""
    return {
        "op": shape.op,
        "implementation": implementation,
        "phase": phase,
        "tokens": shape.tokens,
        "vocab": shape.vocab,
        "dtype": shape.dtype,
        "inputs": shape.inputs,
        "kernel_us": None,
        "wall_us": None,
        "host_us": None,
        "bytes": minimum_bytes(shape, phase) if phase in PHASES else None,
        "floor_ratio": None,
        "kept_bytes": None,
        "peak_bytes": None,
        "status": "ok",
        "reason": None,
        "clock": None,
        "samples": {},
    }


def _status(error: Exception) -> tuple[str, str]:
    if isinstance(error, Unavailable):
        return "unavailable", str(error)
    if isinstance(error, Wrong):
        return "wrong", str(error)
    traceback.print_exception(error)
    first_line = (str(error).strip().splitlines() or [""])[0]
    return "failed", f"{type(error).__name__}: {first_line[:300]}"


def main(spec_path: str) -> int:
    """Runs the jobs of a spec file; events on the standard output that the process was given."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = json.loads(Path(spec_path).read_text())
    try:
        child = Child(spec, events)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        events.write(json.dumps({"event": "unavailable", "reason": reason}) + "\n")
        events.flush()
        return 0
    return child.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
