"""One self-contained HTML page of a results file; ``page.html.j2`` is its template."""

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
from markupsafe import Markup

from bench import plots, published
from bench.gpus import floor_us
from bench.oracle import PROJECT, PROJECT_LOSS_TOLERANCE
from bench.report import (
    KERNELS,
    OP_TITLES,
    Row,
    achieved_tb_s,
    best_peer,
    clock_of,
    implementations_of,
    inputs_title,
    measured_copies,
    megabytes,
    microseconds,
    number,
    ops_of,
    phase_title,
    rate,
    shape_key,
    size_text,
    spread_text,
    time_us,
)
from bench.results import Result, ResultsError
from bench.shapes import LOGITS, PHASES

TEMPLATE = "page.html.j2"
STATUSES = ("ok", "wrong", "failed", "unavailable")
Values = dict[str, Any]


def html(result: Result, bits: Values | None = None) -> str:
    """The page of a result as ``results.read_lenient`` gives it, and of a ``read_bits``."""
    environment, rows = result["environment"], result["rows"]
    loader = jinja2.FileSystemLoader(Path(__file__).resolve().parent)
    templates = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template(TEMPLATE).render(
        place=environment["gpu"] or "a CPU",
        environment=environment,
        facts=facts(environment),
        counts=_counts(rows),
        note=published.NOTE if environment["protocol"].startswith("published") else None,
        record=environment.get("published_us") or [],
        legends={name: _legend(rows, environment, name) for name in ("roofline", "vocab")},
        tables=_tables(rows, environment),
        rooflines=_rooflines(rows, environment),
        times=_times(rows, environment),
        memory=_memory(rows),
        parity=_parity(rows),
        project=", ".join(PROJECT),
        tolerance=f"{PROJECT_LOSS_TOLERANCE:.0e}",
        bits=None if bits is None else _bits(bits, environment),
    )


# --- environment ---------------------------------------------------------------------------------


def facts(environment: Values) -> list[tuple[str, str]]:
    """What is known of where and how the rows were measured, as names and values."""
    known = environment.get
    dirty = {True: " (changed tree)", None: " (unknown whether the tree was changed)"}
    commit = f"{known('commit') or 'unknown'}{dirty.get(known('dirty'), '')}"
    copies = (f"{tb_s:.2f} TB/s by {by}" for by, tb_s in measured_copies(environment).items())
    readers = {known(f"{name}_reader") for name in ("torch", "jax")} - {None}
    passed = [x for name in ("torch", "jax") for x in known(f"{name}_readers_passed_over") or []]
    versions = (f"{k} {v}" for k, v in environment["versions"].items() if v)
    flushed = known("gpu") and environment["protocol"].startswith("kernel")
    flush = known("flush_bytes") if flushed else None
    values = {
        "GPU": known("gpu") or "none",
        "GPU memory": known("gpu_memory"),
        "multiprocessors": known("sms"),
        "driver": known("driver"),
        "CUDA of PyTorch": known("torch_cuda"),
        "CPU cores": known("cpu_count"),
        "versions": ", ".join(versions),
        "commit": commit,
        "date": _dates(environment),
        "protocol": known("protocol"),
        "seed": known("seed"),
        "datasheet bandwidth": f"{known('datasheet_tb_s')} TB/s" if known("datasheet_tb_s") else "",
        "measured copy of 1 GiB": ", ".join(copies),
        "clock": ", ".join(sorted(map(str, readers))) or "wall",
        "clocks passed over": "; ".join(map(str, passed)),
        "before each kernel sample": f"{flush // 2**20} MiB read (cold, clean L2)" if flush else "",
    }
    return [(name, str(value)) for name, value in values.items() if value not in (None, "")]


def _dates(environment: Values) -> str:
    dates = sorted(map(str, environment.get("dates") or [environment["date"] or "unknown"]))
    return dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"


def _counts(rows: list[Row]) -> list[tuple[str, int]]:
    counted: dict[str, int] = defaultdict(int)
    for row in rows:
        counted[row["status"]] += 1
    return sorted(counted.items(), key=lambda item: _place(item[0], STATUSES))


# --- times ---------------------------------------------------------------------------------------


def _place(name: Any, order: tuple[str, ...]) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order), str(name))


def _tables(rows: list[Row], environment: Values) -> list[Values]:
    """One table for each inputs and dtype, in it one group of lines for each shape and phase."""
    tables: dict[tuple[str, str], dict[Any, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        tables[row["inputs"], row["dtype"]][shape_key(row), row["phase"]].append(row)
    return [
        {
            "title": f"{dtype}, {inputs_title(kind)}",
            "cells": [
                _cell(cells[key], environment)
                for key in sorted(cells, key=lambda k: (-k[0][0], k[0][1], _place(k[1], PHASES)))
            ],
        }
        for (kind, dtype), cells in tables.items()
    ]


def _cell(rows: list[Row], environment: Values) -> Values:
    """The lines of one shape and phase."""
    first = rows[0]
    size = next((row["bytes"] for row in rows if row["bytes"]), None)
    floor = floor_us(size, environment.get("datasheet_tb_s")) if size else None
    peer = best_peer({row["implementation"]: row for row in rows})
    best = min((us for row in rows if (us := time_us(row)) is not None), default=None)
    names = implementations_of(rows)
    return {
        "shape": f"{first['tokens']} × {first['vocab']}",
        "phase": phase_title(first["phase"], environment),
        "facts": ", ".join(
            f"{name} {text}"
            for name, text in (
                ("floor", floor and f"{microseconds(floor)} µs"),
                ("best peer", peer and f"{peer[0]} {microseconds(peer[1])} µs"),
            )
            if text
        ),
        "lines": [
            _line(row, peer, best)
            for row in sorted(rows, key=lambda row: names.index(row["implementation"]))
        ],
    }


def _line(row: Row, peer: tuple[str, float] | None, best: float | None) -> Values:
    us = time_us(row)
    shape = f"{row['tokens']}x{row['vocab']}:{row['dtype']}:{row['inputs']}"
    line = {
        "title": f"{row['implementation']} {row['phase']} {shape}",
        "implementation": row["implementation"],
        "kernel": row["implementation"] in KERNELS,
        "series": plots.colour_number(row["implementation"]),
        "status": row["status"],
        "reason": row["reason"] or "no reason given",
        "bytes": megabytes(row["bytes"]),
        "kept": size_text(row["kept_bytes"]),
        "peak": size_text(row["peak_bytes"]),
    }
    if us is None:
        if row["status"] == "ok":
            line |= {"status": "no time", "reason": row["reason"] or "nothing was timed"}
        return line | {"us": None}
    return line | {
        "us": microseconds(us),
        "best": us == best,
        "wall": clock_of(row) == "wall_us",
        "spread": spread_text(row),
        "rate": rate(achieved_tb_s(row)),
        "floor_ratio": number(row["floor_ratio"], ".2f"),
        "peer_ratio": number(us / peer[1] if peer and peer[1] else None, ".2f"),
    }


# --- plots ---------------------------------------------------------------------------------------


def _legend(rows: list[Row], environment: Values, section: str) -> list[tuple[str, Markup]]:
    """Names with their line and marker; the ids in the SVGs are a section's own."""
    timed = [row for row in rows if time_us(row) is not None]
    entries = [
        (name, Markup(plots.swatch_svg(name, section))) for name in implementations_of(timed)
    ]
    if section == "vocab" and any(plots.floors_of(timed, environment)):
        entries.append(("floor", Markup(plots.swatch_svg(None, section))))
    return entries


def _rooflines(rows: list[Row], environment: Values) -> list[tuple[str, Markup]]:
    known = [row for row in rows if achieved_tb_s(row) is not None]
    drawn = []
    for op in ops_of(known):
        own = [row for row in known if row["op"] == op]
        for phase in sorted({row["phase"] for row in own}, key=lambda name: _place(name, PHASES)):
            rows = [row for row in own if row["phase"] == phase]
            suffix = f", {OP_TITLES[op]}" if op == LOGITS else ""
            svg = Markup(plots.roofline_svg(phase + suffix, rows, environment))
            drawn.append((phase_title(phase, environment) + suffix, svg))
    return drawn


def _times(rows: list[Row], environment: Values) -> list[Values]:
    """The plots of each dtype, inputs and number of tokens, one for each phase."""
    groups = plots.vocab_groups(rows)
    sections: dict[tuple[Any, ...], list[tuple[str, Markup]]] = defaultdict(list)
    for group in sorted(groups, key=lambda g: _place(g[3], PHASES)):
        tokens, dtype, kind, phase = group
        svg = Markup(plots.times_svg(group, groups[group], environment))
        section = (kind == "logits", kind, dtype != "float32", dtype, -tokens)
        sections[section].append((phase_title(phase, environment), svg))
    return [
        {
            "title": f"{dtype}, {inputs_title(kind)}" + (f", {-tokens} tokens" if tokens else ""),
            "plots": sections[key],
        }
        for key in sorted(sections)
        for _, kind, _, dtype, tokens in [key]
    ]


# --- memory --------------------------------------------------------------------------------------


def _memory(rows: list[Row]) -> list[Values]:
    known = [row for row in rows if row["kept_bytes"] is not None]
    return [_memory_of(op, [row for row in known if row["op"] == op]) for op in ops_of(known)]


def _memory_of(op: str, known: list[Row]) -> Values:
    """Bytes kept by each implementation: per element at its largest shape, and of all shapes."""
    names = implementations_of(known)
    kept = {(shape_key(row), row["implementation"]): row["kept_bytes"] for row in known}
    shapes = sorted({key for key, _ in kept}, key=lambda k: (k[3], k[2] != "float32", -k[0], k[1]))
    per_element: dict[str, dict[str, float]] = {name: {} for name in names}
    for key, name in sorted(kept, key=lambda x: x[0][0] * x[0][1]):
        per_element[name][key[2]] = kept[key, name] / (key[0] * key[1])
    lines = [
        (
            f"{key[0]} × {key[1]}",
            key[2],
            key[3],
            [_kept(kept.get((key, name)), key) for name in names],
        )
        for key in shapes
    ]
    title = OP_TITLES.get(op, op)
    chart = Markup(plots.memory_svg(title, per_element))
    return {"title": title, "names": names, "lines": lines, "chart": chart}


def _kept(size: int | None, key: tuple[int, int, str, str]) -> str:
    return "–" if size is None else f"{size_text(size)} ({size / (key[0] * key[1]):.2f})"


# --- parity --------------------------------------------------------------------------------------


def _parity(rows: list[Row]) -> list[Values]:
    """Rows by status, and the errors of the loss, for each implementation."""
    summary = []
    for name in implementations_of(rows):
        own = [row for row in rows if row["implementation"] == name]
        errors = [e for row in own if (e := row["loss_relative_error"]) is not None]
        worst = max(own, key=lambda row: row["loss_relative_error"] or 0.0)
        summary.append(
            {
                "name": name,
                "counts": [sum(row["status"] == status for row in own) for status in STATUSES],
                "compared": len(errors),
                "median": f"{median(errors):.1e}" if errors else "–",
                "largest": f"{max(errors):.1e}" if errors else "–",
                "where": _where(worst) if errors else "–",
                "reasons": _reasons(own),
            }
        )
    return summary


def _where(row: Row) -> str:
    suffix = f" {OP_TITLES[LOGITS]}" if row["op"] == LOGITS else ""
    return f"{row['phase']} {row['tokens']} × {row['vocab']} {row['dtype']}{suffix}"


def _reasons(rows: list[Row]) -> list[str]:
    reasons = (f"{r['status']}: {r['reason']}" for r in rows if r["status"] != "ok")
    return list(dict.fromkeys(reasons))


def read_bits(path: Path) -> Values:
    """Reads what ``python -m parity_tests.random_bits -o`` wrote."""
    try:
        bits = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path}: {error}") from error
    routes = bits.get("routes") if isinstance(bits, dict) else None
    counts = routes.values() if isinstance(routes, dict) else [None]
    if not all(isinstance(count, dict) for count in counts) or "cases" not in bits:
        raise ResultsError(f"{path} is not a summary of random bits: it has no cases and routes")
    return bits


def _bits(bits: Values, environment: Values) -> Values:
    """Values compared and values that differ, by route and quantity."""
    told = bits.get("environment") or {}
    quantities = {
        key.rsplit(": ", 1)[0]: None for route in bits["routes"].values() for key in route
    }
    lines = []
    for route, counts in bits["routes"].items():
        pairs = [
            (counts.get(f"{name}: compared", 0), counts.get(f"{name}: differ", 0))
            for name in quantities
        ]
        lines.append((route, pairs, (sum(a for a, _ in pairs), sum(b for _, b in pairs))))
    return {
        "cases": bits["cases"],
        "quantities": list(quantities),
        "lines": lines,
        "failed": [
            ", ".join(f"{k} {v}" for k, v in case.items()) for case in bits.get("failed") or []
        ],
        "where": f"{told.get('gpu') or 'a CPU'}, commit {_short(told.get('commit'))}, "
        f"{told.get('date') or 'date unknown'}",
        "other": [
            f"{name} {_short(told.get(name))} against {_short(environment.get(name))}"
            for name in ("gpu", "commit", "driver")
            if not _alike(told.get(name), environment.get(name))
        ],
    }


def _short(value: Any) -> str:
    """A commit's first digits; a shorter value as it is."""
    return "unknown" if value is None else re.sub(r"^([0-9a-f]{12})[0-9a-f]+$", r"\1", str(value))


def _alike(one: Any, other: Any) -> bool:
    """Equal, or one the shortened commit of the other."""
    short, long = sorted((str(one), str(other)), key=len)
    return short == long or (len(short) >= 7 and long.startswith(short))
