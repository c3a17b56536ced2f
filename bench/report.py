"""Tables (terminal and markdown) and plots of results files."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench import published
from bench.gpus import floor_us
from bench.results import Result, ResultsError, write_atomically
from bench.shapes import PHASES

PEERS = ("liger", "torch-compile", "torch-formula", "torch-eager", "jax-xla", "jax-formula")
KERNELS = ("torch-triton", "jax-pallas", "jax-triton")
ORDER = (*KERNELS, *PEERS)
MARKERS = ("<!-- bench:table:start -->", "<!-- bench:table:end -->")
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
NARROW = 8  # columns on a narrow terminal
PHASE_TITLES = {
    "forward": "forward, no gradient",
    "forward_keep": "forward that keeps the residual",
    "backward": "backward",
    "total_upstream_1": "forward + backward, upstream gradient 1",
    "total": "forward + backward, upstream gradient ≠ 1",
}
Row = dict[str, Any]
ShapeKey = tuple[int, int, str, str]


def time_us(row: Row) -> float | None:
    """The time that counts: kernel time, or wall time where there is no kernel clock."""
    if row["status"] != "ok":
        return None
    return row["kernel_us"] if row["kernel_us"] is not None else row["wall_us"]


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


def _implementations(rows: list[Row]) -> list[str]:
    present = {row["implementation"] for row in rows}
    known = [name for name in ORDER if name in present]
    return known + sorted(present - set(known))


def _number(value: float | None, form: str = ".1f") -> str:
    return "–" if value is None else format(value, form)


def _microseconds(us: float | None) -> str:
    return _number(us, ".1f" if us is None or us < 1000 else ".0f")


def _rate(tb_s: float) -> str:
    return f"{tb_s:.2f}" if tb_s >= 0.1 else f"{tb_s:.4f}"


def _size(size: int | None) -> str:
    if size is None:
        return "–"
    return f"{size} B" if size < 10_000 else f"{size / 1e6:.1f} MB"


def _unmeasured(rows: list[Row]) -> list[str]:
    """One line for each implementation and status without a time, with the first reason."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row["status"] != "ok":
            groups[row["implementation"], row["status"]].append(row["reason"] or "")
    return [
        f"{name}: {status} in {len(reasons)} rows: {reasons[0]}"
        for (name, status), reasons in groups.items()
    ]


# --- terminal ------------------------------------------------------------------------------------


def environment_lines(environment: dict[str, Any]) -> list[str]:
    """The environment in a few lines."""
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items() if v)
    where = environment["gpu"] or f"CPU, {environment.get('cpu_count')} cores"
    driver = f", driver {environment['driver']}" if environment["driver"] else ""
    lines = [f"{where}{driver}; {versions}"]
    dirty = " (changed tree)" if environment["dirty"] else ""
    lines.append(f"commit {environment['commit']}{dirty}, {environment['date']}")
    if environment.get("datasheet_tb_s"):
        copies = [
            f"{environment[name]:.2f} TB/s by {name.split('_')[0]}"
            for name in ("torch_copy_tb_s", "jax_copy_tb_s")
            if environment.get(name)
        ]
        readers = {environment.get(f"{f}_reader") for f in ("torch", "jax")} - {None}
        lines.append(
            f"datasheet {environment['datasheet_tb_s']} TB/s; measured copy of 1 GiB: "
            f"{', '.join(copies) or 'none'}; clock: {', '.join(sorted(readers)) or 'wall'}; "
            f"{environment['flush_bytes'] // 2**20} MiB read before each kernel sample "
            "(cold, clean L2)"
        )
    return lines


def print_result(result: Result, console: Console, phases: tuple[str, ...] = PHASES) -> None:
    """Every row of a result, one table a shape.

    ``min MB`` is what this project's design must move, ``TB/s`` that over the time, whoever is
    measured; ``× peer`` is the time over the best peer's.
    """
    environment = result["environment"]
    for line in environment_lines(environment):
        console.print(line, highlight=False)
    if environment["protocol"].startswith("published"):
        _print_published(result, console)
        return
    cells = _by_cell(result["rows"])
    for key in dict.fromkeys(shape for shape, _ in cells):
        _print_shape(key, cells, phases, environment, console)
    for line in _unmeasured(result["rows"]):
        console.print(line, highlight=False, style="yellow")


def _print_shape(
    key: ShapeKey,
    cells: dict[tuple[ShapeKey, str], dict[str, Row]],
    phases: tuple[str, ...],
    environment: dict[str, Any],
    console: Console,
) -> None:
    tokens, vocab, dtype, kind = key
    title = f"{tokens} × {vocab} {dtype}, {kind} inputs"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = COLUMNS if console.width >= 120 else COLUMNS[:NARROW]
    for column in columns:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right", no_wrap=True)
    for phase in phases:
        cell = cells.get((key, phase), {})
        peer = best_peer(cell)
        if cell and environment.get("datasheet_tb_s"):
            size = next(iter(cell.values()))["bytes"]
            floor = _microseconds(floor_us(size, environment["datasheet_tb_s"]))
            table.add_row(phase, "floor", floor, "", f"{size / 1e6:.1f}", style="bold")
        for name in _implementations(list(cell.values())):
            line = _cells(cell[name], peer)[: len(columns)]
            table.add_row(*line, style="" if name in KERNELS else "dim")
        table.add_section()
    console.print(table)


def _cells(row: Row, peer: tuple[str, float] | None) -> list[str]:
    us = time_us(row)
    if us is None:
        return [row["phase"], row["implementation"], row["status"]]
    clock = "kernel_us" if row["kernel_us"] is not None else "wall_us"
    spread = row["quantiles"][clock]
    return [
        row["phase"],
        row["implementation"],
        _microseconds(us),
        f"{_microseconds(spread['q20'])}–{_microseconds(spread['q80'])}",
        f"{row['bytes'] / 1e6:.1f}",
        _rate(row["bytes"] / us / 1e6),
        _number(row["floor_ratio"], ".2f"),
        "–" if peer is None else f"{us / peer[1]:.2f}",
        _microseconds(row["wall_us"]),
        _microseconds(row["host_us"]),
        _size(row["kept_bytes"]),
        _size(row["peak_bytes"]),
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
                *map(_microseconds, ours),
                _ratio(ours[1], ours[0]),
                *map(_microseconds, record),
                _ratio(record[1], record[0]),
            ]
            lines.append(f"| {vocab} | {mode} | " + " | ".join(cells) + " |")
    return [*lines, "", published.NOTE]


def _ratio(one: float | None, other: float | None) -> str:
    return "–" if one is None or other is None else f"{one / other:.2f}"


def _print_published(result: Result, console: Console) -> None:
    lines = published_lines(result)
    header, _, *body = [line for line in lines if line.startswith("|")]
    table = Table(title="published protocol", title_justify="left")
    for name in header.strip("| ").split(" | "):
        table.add_column(name, justify="right", overflow="fold")
    for line in body:
        table.add_row(*line.strip("| ").split(" | "))
    console.print(table)
    console.print(published.NOTE)
    ratio = published.PUBLISHED_RATIO
    console.print(f"Check: torch / liger, forward at vocab 4096, is {ratio:.2f} in the record.")
    for line in _unmeasured(result["rows"]):
        console.print(line, highlight=False, style="yellow")


# --- markdown ------------------------------------------------------------------------------------


def markdown(
    result: Result,
    phases: tuple[str, ...] = ("forward", "total"),
    implementations: tuple[str, ...] | None = None,
) -> str:
    """The README's tables: µs and × floor per vocab, one table for each dtype and phase."""
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
    groups = dict.fromkeys((row["dtype"], row["inputs"], row["phase"]) for row in rows)
    for dtype, kind, phase in sorted(groups, key=lambda g: (g[1], g[0] != "float32", g[2])):
        chosen = [r for r in rows if (r["dtype"], r["inputs"], r["phase"]) == (dtype, kind, phase)]
        lines += [
            "",
            f"**{PHASE_TITLES[phase]}**, {dtype}, {_inputs_title(kind)}, µs (× floor)",
            "",
        ]
        lines += _markdown_table(chosen, environment.get("datasheet_tb_s"))
    lines += ["", *(f"- {line}" for line in _unmeasured(rows))]
    return "\n".join(lines).rstrip()


def _inputs_title(kind: str) -> str:
    return {"random": "random softmax rows", "text": "real-text rows"}.get(kind, kind)


def _markdown_caption(environment: dict[str, Any]) -> str:
    versions = environment["versions"]
    named = ("torch", "triton", "jax", "liger-kernel", "jax-triton")
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
    names = _implementations(rows)
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
            f"| {key[0]} × {key[1]} | {_microseconds(floor)} | {' | '.join(shown)} | {ratio} |"
        )
    return lines


def _markdown_time(row: Row | None) -> str:
    if row is None:
        return "–"
    us = time_us(row)
    if us is None:
        return str(row["status"])
    ratio = "" if row["floor_ratio"] is None else f" ({row['floor_ratio']:.2f})"
    return _microseconds(us) + ratio


def rewrite_readme(path: Path, block: str) -> None:
    """Replaces what stands between the markers of a README."""
    old = path.read_text()
    start, end = (old.find(marker) for marker in MARKERS)
    if start < 0 or end < start:
        raise ResultsError(f"{path} has no lines {MARKERS[0]} and {MARKERS[1]}")
    write_atomically(path, f"{old[: start + len(MARKERS[0])]}\n{block}\n{old[end:]}")


# --- plots ---------------------------------------------------------------------------------------


def plot(result: Result, folder: Path) -> list[Path]:
    """PNGs of time against vocab with the floor drawn in, one for each dtype, phase and tokens."""
    import matplotlib

    matplotlib.use("Agg")
    groups: dict[tuple[int, str, str, str], list[Row]] = defaultdict(list)
    for row in result["rows"]:
        if time_us(row) is not None:
            groups[row["tokens"], row["dtype"], row["inputs"], row["phase"]].append(row)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for (tokens, dtype, kind, phase), rows in sorted(groups.items()):
        if len({row["vocab"] for row in rows}) < 2:
            continue
        suffix = "" if kind == "random" else f"_{kind}"
        path = folder / f"{phase}_{dtype}_{tokens}{suffix}.png"
        title = f"TVD loss, {PHASE_TITLES.get(phase, phase)}: {tokens} tokens, {dtype}"
        _plot_one(rows, result["environment"], title, path)
        paths.append(path)
    return paths


def _plot_one(rows: list[Row], environment: dict[str, Any], title: str, path: Path) -> None:
    """Time against vocab on the left; on the right its ratio to the floor, where there is one."""
    from matplotlib import pyplot

    tb_s = environment.get("datasheet_tb_s")
    floors = {row["vocab"]: floor_us(row["bytes"], tb_s) for row in rows if row["bytes"] and tb_s}
    panels = 2 if floors else 1
    figure, axes = pyplot.subplots(
        1, panels, figsize=(6.5 * panels, 5), layout="constrained", squeeze=False
    )
    for name in _implementations(rows):
        line = sorted((r["vocab"], time_us(r)) for r in rows if r["implementation"] == name)
        style = _line_style(name)
        axes[0, 0].plot([v for v, _ in line], [us for _, us in line], label=name, **style)
        if floors:
            axes[0, 1].plot([v for v, _ in line], [us / floors[v] for v, us in line], **style)
    clock = "kernel time" if rows[0]["kernel_us"] is not None else "wall time"
    axes[0, 0].set_ylabel(f"µs per call ({clock}, median)")
    if floors:
        line = sorted(floors.items())
        label = f"floor ({tb_s} TB/s)"
        axes[0, 0].plot([v for v, _ in line], [us for _, us in line], label=label, color="black")
        axes[0, 1].axhline(1.0, color="black")
        axes[0, 1].set_ylabel("time / floor")
    vocabs = sorted({row["vocab"] for row in rows})
    # 50257 and 151936 sit too close to powers of two for two labels.
    ticks = [v for v in vocabs if v & (v - 1) == 0] or vocabs
    for panel in axes[0]:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(ticks, [str(v) for v in ticks])
        panel.tick_params(axis="x", which="minor", bottom=False)
        panel.set_xlabel("vocab")
        panel.grid(True, which="both", alpha=0.25)
    if floors:
        _plain_ticks(axes[0, 1])
    axes[0, 0].legend(fontsize=8)
    figure.suptitle(f"{title}; {environment['gpu'] or 'CPU'}", fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _line_style(name: str) -> dict[str, Any]:
    own = name in KERNELS
    number = ORDER.index(name) if name in ORDER else len(ORDER)
    return {
        "color": f"C{number}",
        "marker": "o" if own else "s",
        "markersize": 5 if own else 4,
        "linewidth": 2 if own else 1.2,
        "linestyle": "-" if own else "--",
    }


def _plain_ticks(axes: Any) -> None:
    """Ratios on a log axis as plain numbers."""
    from matplotlib.ticker import FixedLocator, NullFormatter, StrMethodFormatter

    low, high = axes.get_ylim()
    marks = (1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100)
    axes.yaxis.set_major_locator(FixedLocator([x for x in marks if low <= x <= high]))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
