"""Results: the JSON file, its environment stamp, the journal of an unfinished run, merging."""

import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import inputs, timing
from bench.gpus import datasheet_tb_s, detect_gpu

# Raise it when a figure changes its meaning: files of different protocols do not merge.
PROTOCOL_VERSION = 2  # 1 wrote the flush buffer and left its dirty lines in L2
PACKAGES = (
    *("torch", "triton", "liger-kernel", "speculators"),
    *("jax", "jaxlib", "jax-triton", "numpy", "tokenizers"),
)
ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "bench" / "results"
# What must agree for rows to stand in one file.
IDENTITY = ("gpu", "driver", "commit", "dirty", "versions", "protocol", "seed")
ROW_KEY = ("op", "implementation", "phase", "tokens", "vocab", "dtype", "inputs")
# What a row may leave out, as the protocols and versions differ.
OPTIONAL = (
    *("kernel_us", "wall_us", "host_us", "bytes", "floor_ratio", "kept_bytes", "peak_bytes"),
    *("reason", "clock", "samples", "quantiles", "loss_relative_error"),
)
Result = dict[str, Any]


class ResultsError(ValueError):
    """A results file cannot be read, merged or resumed."""


def _git(*arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def commit() -> tuple[str, bool | None]:
    """Commit and whether the tree differs from it.

    ``BENCH_COMMIT`` (with ``-dirty`` appended for a changed tree) tells it where there is no git.
    """
    told = os.environ.get("BENCH_COMMIT")
    if told:
        return told.removesuffix("-dirty"), told.endswith("-dirty")
    head = _git("rev-parse", "HEAD")
    if head is None:
        return "unknown", None
    return head, bool(_git("status", "--porcelain", "--untracked-files=no"))


def versions() -> dict[str, str | None]:
    """Versions of Python and the packages measured; ``None`` for one that is not installed."""
    found: dict[str, str | None] = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def environment(protocol: str, seed: int = inputs.SEED) -> dict[str, Any]:
    """Where and how the rows were measured; imports no framework."""
    head, dirty = commit()
    gpu = detect_gpu() or {"gpu": None, "driver": None, "gpu_memory": None}
    return {
        **gpu,
        "datasheet_tb_s": datasheet_tb_s(gpu["gpu"]),
        "commit": head,
        "dirty": dirty,
        "versions": versions(),
        "protocol": f"{protocol} {PROTOCOL_VERSION}",
        "seed": seed,
        "flush_bytes": timing.FLUSH_BYTES,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu_count": os.cpu_count(),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Identity fields in which two environments differ, with both values."""
    return [
        f"{name}: {one.get(name)!r} against {other.get(name)!r}"
        for name in IDENTITY
        if one.get(name) != other.get(name)
    ]


def write_atomically(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_result(path: Path, result: Result) -> None:
    # One row a line: a file that people can diff.
    rows = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)
    write_atomically(path, f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n')


def _read_journal(path: Path) -> Result:
    """The rows that an interrupted run had finished, as a results file of their own."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break  # the line that an interrupted write left
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise ResultsError(f"{path} is not the journal of a run")
    stamp, rows = lines[0], []
    for line in lines[1:]:
        if "environment" in line:
            stamp |= line["environment"]
        else:
            rows.append(line)
    return {"environment": stamp, "rows": rows}


def read_result(path: Path) -> Result:
    """Reads a results file, or the journal of a run that was cut off."""
    try:
        if path.suffix == ".journal":
            return _read_journal(path)
        result = json.loads(path.read_text())
    except ResultsError:
        raise
    except (OSError, ValueError) as error:  # ValueError: no JSON, or no text at all
        raise ResultsError(f"{path}: {error}") from error
    if not isinstance(result, dict) or not {"environment", "rows"} <= result.keys():
        raise ResultsError(f"{path} is not a results file: it has no environment and rows")
    return result


def read_lenient(path: Path) -> Result:
    """Reads a result of anyone's, such as an older version's."""
    return complete(read_result(path), path)


def complete(result: Result, path: Path) -> Result:
    """A result in which what the environment or a row leaves out is ``None``."""
    environment, rows = result["environment"], result["rows"]
    if not isinstance(environment, dict) or not isinstance(rows, list):
        raise ResultsError(f"{path} is not a results file: it has no environment and rows")
    for number, row in enumerate(rows, 1):
        missing = [x for x in ROW_KEY if x not in row] if isinstance(row, dict) else list(ROW_KEY)
        if missing:
            raise ResultsError(f"{path}: row {number} has no {', '.join(missing)}")
    environment = dict.fromkeys(("gpu", "driver", "commit", "dirty", "date")) | environment
    environment["versions"] = environment.get("versions") or {}
    environment["protocol"] = environment.get("protocol") or "unknown"
    blank = dict.fromkeys(OPTIONAL) | {"status": "unknown"}
    return {"environment": environment, "rows": [blank | row for row in rows]}


def row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ROW_KEY)


def merge(paths: list[Path]) -> Result:
    """One result of several parts; refuses parts that were not measured alike."""
    if not paths:
        raise ResultsError("nothing to merge")
    parts = [(path, read_result(path)) for path in paths]
    first_path, first = parts[0]
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    merged = dict(first["environment"])
    for path, part in parts:
        different = differences(first["environment"], part["environment"])
        if different:
            raise ResultsError(f"{path} does not belong with {first_path}: " + "; ".join(different))
        for row in part["rows"]:
            if row_key(row) in rows:
                raise ResultsError(f"{path} repeats the row {row_key(row)}")
            rows[row_key(row)] = row
        merged = {**part["environment"], **merged}
    merged["dates"] = [part["environment"]["date"] for _, part in parts]
    return {"environment": merged, "rows": list(rows.values())}


class Journal:
    """Finished rows of a run that is not over, one JSON object a line beside the output.

    It makes an interrupted run resumable: the same command reads it and measures the rest.
    """

    def __init__(self, output: Path, stamp: dict[str, Any]) -> None:
        self.path = output.with_name(output.name + ".journal")
        self.lines: list[dict[str, Any]] = []
        if self.path.exists():
            self._resume(stamp)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append(stamp)

    def _resume(self, stamp: dict[str, Any]) -> None:
        lines = []
        for line in self.path.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                break  # the line that an interrupted write left
        if not lines or stamp["dirty"] is not False:  # no telling which code measured the rows
            self.path.unlink()
            self._append(stamp)
            return
        different = differences(lines[0], stamp)
        if different:
            raise ResultsError(
                f"{self.path} is of another run ({'; '.join(different)}): delete it, or choose "
                "another output"
            )
        self.lines = lines[1:]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in lines))

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def add(self, line: dict[str, Any]) -> None:
        """Keeps a row, or ``{"environment": ...}`` as a child process told it."""
        self.lines.append(line)
        self._append(line)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
