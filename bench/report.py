"""Tables of results files: terminal and markdown."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench import published
from bench.gpus import floor_us
from bench.results import Result, ResultsError, write_atomically
from bench.shapes import LOGITS, LOSS, OPS, PHASES
from bench.timing import quantiles

PEERS = (
    *("liger", "speculators"),
    *("torch-compile", "torch-formula", "torch-eager", "jax-xla", "jax-formula"),
)
KERNELS = ("torch-triton", "jax-pallas", "jax-triton")
ORDER = (*KERNELS, *PEERS)
BLOCKS = ("table", "logits")  # of the README, one for each stored results file
COLUMNS = (
    "phase",
    "implementation",
    "µs",
    "20–80 %",
    "min MB",
    "TB/s",
    "× floor",
    "× peer",
    "wall µs",
    "host µs",
    "kept",
    "peak",
)
# Those that a narrow terminal leaves out, the last first.
OPTIONAL = ("kept", "20–80 %", "TB/s", "min MB", "wall µs", "host µs", "peak")
# jax.grad of abs is 1 at 0, where the loss has 0: a tie is a finding, not an accident of a run.
TIES = "; jax.grad of abs is 1 where p = q, not 0"
PHASE_TITLES = {
    "forward": "forward, no gradient",
    "forward_keep": "forward that keeps the residual",
    "backward": "backward",
    "total_upstream_1": "forward + backward, upstream gradient 1",
    "total": "forward + backward, upstream gradient ≠ 1",
}
OP_TITLES = {LOSS: "from probabilities", LOGITS: "from logits"}
INPUTS_TITLES = {"random": "random softmax rows", "text": "real-text rows", "logits": "from logits"}
Row = dict[str, Any]
ShapeKey = tuple[int, int, str, str]


def time_us(row: Row) -> float | None:
    """The time that counts: kernel time, or wall time where there is no kernel clock."""
    return row[clock_of(row)] if row["status"] == "ok" else None


def phase_title(phase: str, environment: dict[str, Any]) -> str:
    """What runs in a phase; the published protocol's phases run more than their names say."""
    other = environment["protocol"].startswith("published")
    return phase if other else PHASE_TITLES.get(phase, phase)


def clock_of(row: Row) -> str:
    """The field that holds the time that counts."""
    return "wall_us" if row["kernel_us"] is None else "kernel_us"


def spread(row: Row) -> tuple[float, float] | None:
    """20 % and 80 % quantile of the time that counts: of the raw samples, else as stored."""
    clock = clock_of(row)
    samples = (row.get("samples") or {}).get(clock)
    known = quantiles(samples) if samples else (row.get("quantiles") or {}).get(clock)
    return (known["q20"], known["q80"]) if known else None


def achieved_tb_s(row: Row) -> float | None:
    """The bytes that this project's design must move over the time, whoever is measured."""
    us = time_us(row)
    return row["bytes"] / us / 1e6 if us and row["bytes"] else None


def shape_key(row: Row) -> ShapeKey:
    return row["tokens"], row["vocab"], row["dtype"], row["inputs"]


def _by_cell(rows: list[Row]) -> dict[tuple[ShapeKey, str], dict[str, Row]]:
    """Rows by (shape, phase), then by implementation."""
    cells: dict[tuple[ShapeKey, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        cells[shape_key(row), row["phase"]][row["implementation"]] = row
    return cells


def best_peer(cell: dict[str, Row]) -> tuple[str, float] | None:
    """Fastest peer of one shape and phase, and its time."""
    times = [(time_us(cell[name]), name) for name in PEERS if name in cell]
    known = [(us, name) for us, name in times if us is not None]
    if not known:
        return None
    us, name = min(known)
    return name, us


def implementations_of(rows: list[Row]) -> list[str]:
    present = {row["implementation"] for row in rows}
    known = [name for name in ORDER if name in present]
    return known + sorted(present - set(known))


def number(value: float | None, form: str = ".1f") -> str:
    return "–" if value is None else format(value, form)


def microseconds(us: float | None) -> str:
    return number(us, ".1f" if us is None or us < 1000 else ".0f")


def spread_text(row: Row) -> str:
    """The 20–80 % interval of the time that counts."""
    known = spread(row)
    return "–" if known is None else "–".join(map(microseconds, known))


def rate(tb_s: float | None) -> str:
    if tb_s is None:
        return "–"
    return f"{tb_s:.2f}" if tb_s >= 0.1 else f"{tb_s:.4f}"


def megabytes(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e6:.1f}"


def size_text(size: int | None) -> str:
    if size is None:
        return "–"
    return f"{size} B" if size < 100_000 else f"{size / 1e6:.1f} MB"


def unmeasured(rows: list[Row]) -> list[str]:
    """One line for each implementation and status without a time, with the first reason."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row["status"] != "ok":
            groups[row["implementation"], row["status"]].append(_reason(row))
    return [
        f"{name}: {status} in {len(reasons)} rows: {reasons[0]}"
        for (name, status), reasons in groups.items()
    ]


def _reason(row: Row) -> str:
    reason = row["reason"] or ""
    tie = row["implementation"] == "jax-formula" and "expected 0 " in reason
    return reason + TIES if tie else reason


# --- terminal ------------------------------------------------------------------------------------


def measured_copies(environment: dict[str, Any]) -> dict[str, float]:
    """Bandwidth in TB/s of a 1 GiB copy, by the framework that copied."""
    copies = {name: environment.get(f"{name}_copy_tb_s") for name in ("torch", "jax")}
    return {name: tb_s for name, tb_s in copies.items() if tb_s}


def environment_lines(environment: dict[str, Any]) -> list[str]:
    """The environment in a few lines."""
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items() if v)
    where = environment["gpu"] or f"CPU, {environment.get('cpu_count')} cores"
    driver = f", driver {environment['driver']}" if environment["driver"] else ""
    lines = [f"{where}{driver}; {versions}"]
    dirty = " (changed tree)" if environment["dirty"] else ""
    lines.append(f"commit {environment['commit']}{dirty}, {environment['date']}")
    if environment.get("datasheet_tb_s"):
        copies = [f"{tb_s:.2f} TB/s by {by}" for by, tb_s in measured_copies(environment).items()]
        readers = {environment.get(f"{f}_reader") for f in ("torch", "jax")} - {None}
        lines.append(
            f"datasheet {environment['datasheet_tb_s']} TB/s; measured copy of 1 GiB: "
            f"{', '.join(copies) or 'none'}; clock: {', '.join(sorted(readers)) or 'wall'}; "
            f"{environment['flush_bytes'] // 2**20} MiB read before each kernel sample "
            "(cold, clean L2)"
        )
    return lines


def heading(result: Result, source: Path | str) -> str:
    """What tells a result from others: its file, place, commit, and what was measured."""
    environment = result["environment"]
    published_protocol = environment["protocol"].startswith("published")
    ops = " and ".join(OP_TITLES.get(op, op) for op in ops_of(result["rows"]))
    dirty = " (changed tree)" if environment["dirty"] else ""
    return ", ".join(
        (
            str(source),
            environment["gpu"] or "this project on a CPU",
            f"commit {(environment['commit'] or 'unknown')[:7]}{dirty}",
            "published protocol" if published_protocol else ops,
        )
    )


def print_result(
    result: Result,
    console: Console,
    source: Path | str,
    phases: tuple[str, ...] = PHASES,
) -> None:
    """Every row of a result, one table a shape; ``source`` is the file that holds it.

    ``min MB`` is what this project's design must move, ``TB/s`` that over the time, whoever is
    measured; ``× peer`` is the time over the best peer's.
    """
    environment = result["environment"]
    console.rule(Text(heading(result, source)), align="left", style="bold")
    for line in environment_lines(environment):
        console.print(line, highlight=False)
    if environment["protocol"].startswith("published"):
        _print_published(result, console)
        return
    cells = _by_cell(result["rows"])
    for key in dict.fromkeys(shape for shape, _ in cells):
        _print_shape(key, cells, phases, environment, console)
    for line in unmeasured([row for row in result["rows"] if row["status"] != "wrong"]):
        console.print(line, highlight=False, style="yellow")


def _print_shape(
    key: ShapeKey,
    cells: dict[tuple[ShapeKey, str], dict[str, Row]],
    phases: tuple[str, ...],
    environment: dict[str, Any],
    console: Console,
) -> None:
    tokens, vocab, dtype, kind = key
    title = f"{tokens} × {vocab} {dtype}, " + (
        OP_TITLES[LOGITS] if kind == "logits" else f"{kind} inputs"
    )
    sections: list[list[tuple[str, list[str]]]] = []
    for phase in phases:
        cell = cells.get((key, phase), {})
        peer = best_peer(cell)
        lines = []
        if cell and environment.get("datasheet_tb_s"):
            size = next(iter(cell.values()))["bytes"]
            floor = microseconds(floor_us(size, environment["datasheet_tb_s"]))
            lines.append(("bold", [phase, "floor", floor, "", f"{size / 1e6:.1f}"]))
        for name in implementations_of(list(cell.values())):
            lines.append(("" if name in KERNELS else "dim", _cells(cell[name], peer)))
        sections.append(lines)
    console.print(_fitting_table(title, sections, console))
    shown = [row for phase in phases for row in cells.get((key, phase), {}).values()]
    for line in unmeasured([row for row in shown if row["status"] == "wrong"]):
        console.print(line, highlight=False, style="yellow")


def _fitting_table(
    title: str, sections: list[list[tuple[str, list[str]]]], console: Console
) -> Table:
    """The lines of each section under as many columns as fit, none of them cut off."""
    for left_out in range(len(OPTIONAL) + 1):
        columns = [name for name in COLUMNS if name not in OPTIONAL[len(OPTIONAL) - left_out :]]
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in columns:
            table.add_column(name, justify="left" if name in COLUMNS[:2] else "right", no_wrap=True)
        for lines in sections:
            for style, cells in lines:
                known = dict(zip(COLUMNS, cells, strict=False))
                table.add_row(*(known.get(name, "") for name in columns), style=style)
            table.add_section()
        wanted = console.measure(table, options=console.options.update(width=1000)).maximum
        if wanted <= console.width:
            break
    return table


def _cells(row: Row, peer: tuple[str, float] | None) -> list[str]:
    us = time_us(row)
    if us is None:
        return [row["phase"], row["implementation"], row["status"]]
    return [
        row["phase"],
        row["implementation"],
        microseconds(us),
        spread_text(row),
        megabytes(row["bytes"]),
        rate(achieved_tb_s(row)),
        number(row["floor_ratio"], ".2f"),
        "–" if peer is None else f"{us / peer[1]:.2f}",
        microseconds(row["wall_us"]),
        microseconds(row["host_us"]),
        size_text(row["kept_bytes"]),
        size_text(row["peak_bytes"]),
    ]


# --- published protocol --------------------------------------------------------------------------


def published_lines(result: Result) -> list[str]:
    """Markdown table of a run of the published protocol beside the record."""
    rows = result["rows"]
    gpu = result["environment"]["gpu"]
    times = {(r["implementation"], r["phase"], r["vocab"]): time_us(r) for r in rows}
    vocabs = sorted({row["vocab"] for row in rows})
    lines = [
        f"| {published.TOKENS} × vocab, float32, µs (wall clock) | mode | "
        + " | ".join(f"{name}, {gpu}" for name in published.IMPLEMENTATIONS)
        + f" | torch / liger | liger, {published.PUBLISHED_GPU} (published) "
        f"| torch, {published.PUBLISHED_GPU} (published) | torch / liger (published) |",
        "|" + "---|" * 9,
    ]
    for vocab in vocabs:
        for mode in published.MODES:
            ours = [times.get((name, mode, vocab)) for name in published.IMPLEMENTATIONS]
            record = [
                published.PUBLISHED_US[name, mode] if vocab == 4096 else None
                for name in ("liger", "torch-formula")
            ]
            cells = [
                *map(microseconds, ours),
                _ratio(ours[1], ours[0]),
                *map(microseconds, record),
                _ratio(record[1], record[0]),
            ]
            lines.append(f"| {vocab} | {mode} | " + " | ".join(cells) + " |")
    return [*lines, "", published.NOTE]


def _ratio(one: float | None, other: float | None) -> str:
    return "–" if one is None or other is None else f"{one / other:.2f}"


def _print_published(result: Result, console: Console) -> None:
    _, _, *body = [line for line in published_lines(result) if line.startswith("|")]
    gpu = result["environment"]["gpu"]
    title = (
        f"{published.TOKENS} × vocab, float32, µs (wall clock), {gpu}; "
        f"record: as published, {published.PUBLISHED_GPU}"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    measured = [name.replace("-", "-\n") for name in published.IMPLEMENTATIONS]
    record = ["record:\nliger", "record:\ntorch", "record:\ntorch /\nliger"]
    for name in ("vocab", "mode", *measured, "torch /\nliger", *record):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for line in body:
        table.add_row(*line.strip("| ").split(" | "))
    console.print(table)
    console.print(published.NOTE)
    ratio = published.PUBLISHED_RATIO
    console.print(f"Check: torch / liger, forward at vocab 4096, is {ratio:.2f} in the record.")
    for line in unmeasured(result["rows"]):
        console.print(line, highlight=False, style="yellow")


# --- markdown ------------------------------------------------------------------------------------


def markdown(
    result: Result,
    phases: tuple[str, ...] = ("forward", "total"),
    implementations: tuple[str, ...] | None = None,
) -> str:
    """The README's tables: µs and × floor per vocab, one for each op, dtype and phase."""
    environment = result["environment"]
    if environment["protocol"].startswith("published"):
        return "\n".join(published_lines(result))
    lines = [_markdown_caption(environment)]
    rows = [
        row
        for row in result["rows"]
        if row["phase"] in phases
        and (implementations is None or row["implementation"] in implementations)
    ]
    ops = ops_of(rows)
    for op in ops:
        if len(ops) > 1:
            lines += ["", f"### {OP_TITLES.get(op, op).capitalize()}: `{op}`"]
        lines += _markdown_tables([row for row in rows if row["op"] == op], environment)
    lines += ["", *(f"- {line}" for line in unmeasured(rows))]
    return "\n".join(lines).rstrip()


def ops_of(rows: list[Row]) -> list[str]:
    present = {row["op"] for row in rows}
    return [op for op in OPS if op in present] + sorted(present - set(OPS))


def _markdown_tables(rows: list[Row], environment: dict[str, Any]) -> list[str]:
    """The tables of one op."""
    lines = []
    groups = dict.fromkeys((row["dtype"], row["inputs"], row["phase"]) for row in rows)
    for dtype, kind, phase in sorted(groups, key=lambda g: (g[1], g[0] != "float32", g[2])):
        chosen = [r for r in rows if (r["dtype"], r["inputs"], r["phase"]) == (dtype, kind, phase)]
        lines += [
            "",
            f"**{phase_title(phase, environment)}**, {dtype}, {inputs_title(kind)}, µs (× floor)",
            "",
        ]
        lines += _markdown_table(chosen, environment.get("datasheet_tb_s"))
    return lines


def inputs_title(kind: str) -> str:
    return INPUTS_TITLES.get(kind, kind)


def _markdown_caption(environment: dict[str, Any]) -> str:
    versions = environment["versions"]
    named = ("torch", "triton", "jax", "liger-kernel", "speculators", "jax-triton")
    where = environment["gpu"] or "CPU"
    clock = "Kernel time (CUPTI)" if environment["gpu"] else "Wall time"
    floor = environment.get("datasheet_tb_s")
    return (
        f"{clock} on one {where}, commit {environment['commit'][:12]}, "
        + ", ".join(f"{name} {versions[name]}" for name in named if versions.get(name))
        + (
            f". Floor: the bytes this design must move, at the datasheet's {floor} TB/s."
            if floor
            else "."
        )
    )


def _markdown_table(rows: list[Row], tb_s: float | None) -> list[str]:
    cells: dict[ShapeKey, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        cells[shape_key(row)][row["implementation"]] = row
    names = implementations_of(rows)
    lines = [
        f"| tokens × vocab | floor | {' | '.join(names)} | best kernel / best peer |",
        "|---" + "|---:" * (len(names) + 2) + "|",
    ]
    for key in sorted(cells, key=lambda k: (-k[0], k[1])):
        cell = cells[key]
        floor = floor_us(next(iter(cell.values()))["bytes"], tb_s)
        shown = [_markdown_time(cell.get(name)) for name in names]
        ours = [us for name in KERNELS if name in cell and (us := time_us(cell[name])) is not None]
        peer = best_peer(cell)
        ratio = f"{min(ours) / peer[1]:.2f} ({peer[0]})" if ours and peer else "–"
        lines.append(
            f"| {key[0]} × {key[1]} | {microseconds(floor)} | {' | '.join(shown)} | {ratio} |"
        )
    return lines


def _markdown_time(row: Row | None) -> str:
    if row is None:
        return "–"
    us = time_us(row)
    if us is None:
        return str(row["status"])
    ratio = "" if row["floor_ratio"] is None else f" ({row['floor_ratio']:.2f})"
    return microseconds(us) + ratio


def rewrite_readme(path: Path, block: str, name: str = BLOCKS[0]) -> None:
    """Replaces what stands between the markers of a block of a README."""
    markers = [f"<!-- bench:{name}:{place} -->" for place in ("start", "end")]
    old = path.read_text()
    start, end = (old.find(marker) for marker in markers)
    if start < 0 or end < start:
        raise ResultsError(f"{path} has no lines {markers[0]} and {markers[1]}")
    write_atomically(path, f"{old[: start + len(markers[0])]}\n{block}\n{old[end:]}")
