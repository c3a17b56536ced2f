"""Plots of results files: PNG files, and SVGs that take their colours from the page around them."""

import io
import re
from collections import defaultdict
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from bench.gpus import floor_us
from bench.report import (
    ORDER,
    Row,
    achieved_tb_s,
    implementations_of,
    measured_copies,
    number,
    phase_title,
    time_us,
)
from bench.results import Result
from bench.shapes import LOGITS

INK = "#000000"
# Matplotlib's tab10 and one more: a colour for each name in ORDER, the last for other names.
COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#1a237e", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)
MARKERS = "osDv<^P*Xdp"
# Text stays text and "$" a dollar; one salt for each plot keeps the ids of a page apart.
SETTINGS = {"svg.fonttype": "none", "text.parse_math": False, "font.size": 9}
RATIOS = (1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100)
# The kernels take nearly the same time, so the later one is drawn thinner, over the earlier one.
NESTED = {"torch-triton": (8.5, 3.5, "-"), "jax-pallas": (5, 1.5, "-"), "jax-triton": (3.5, 1, ":")}
ANY_TOKENS = 0
Group = tuple[int, str, str, str]
Place = tuple[int, int]


def plot(result: Result, folder: Path) -> list[Path]:
    """PNGs of time against vocab with the floor drawn in, one for each dtype, phase and tokens."""
    paths = []
    environment = result["environment"]
    for (tokens, dtype, kind, phase), rows in vocab_groups(result["rows"]).items():
        words = (phase, dtype, str(tokens or ""), "" if kind == "random" else kind)
        path = folder / ("_".join(filter(None, words)) + ".png")
        op = "TVD loss from logits" if kind == "logits" else "TVD loss"
        title = f"{op}, {phase_title(phase, environment)}: {group_title(tokens, dtype)}"

        def draw(figure: Any, rows: list[Row] = rows, title: str = title) -> None:
            panels = figure.subplots(1, _panels(rows, environment), squeeze=False)[0]
            draw_times(panels, rows, environment)
            panels[0].legend(fontsize=8)
            figure.suptitle(f"{title}; {environment['gpu'] or 'CPU'}", fontsize=11)

        figure = _figure((6.5 * _panels(rows, environment), 5), draw, {"font.size": 10})
        folder.mkdir(parents=True, exist_ok=True)  # here: no plot, no folder
        figure.savefig(path, dpi=110)
        paths.append(path)
    return paths


def vocab_groups(rows: list[Row]) -> dict[Group, list[Row]]:
    """Measured rows that differ in vocab and implementation only, where there are two vocabs.

    From logits they differ in the number of tokens too: the vocabularies are measured at about
    as many elements each.
    """
    groups: dict[Group, list[Row]] = defaultdict(list)
    for row in rows:
        if time_us(row) is not None:
            tokens = ANY_TOKENS if row["op"] == LOGITS else row["tokens"]
            groups[tokens, row["dtype"], row["inputs"], row["phase"]].append(row)
    return {
        key: group
        for key, group in sorted(groups.items())
        if len({row["vocab"] for row in group}) > 1
    }


def group_title(tokens: int, dtype: str) -> str:
    return dtype if tokens == ANY_TOKENS else f"{tokens} tokens, {dtype}"


def _place(row: Row) -> Place:
    return row["vocab"], row["tokens"]


def floors_of(rows: list[Row], environment: dict[str, Any]) -> dict[Place, float]:
    tb_s = environment.get("datasheet_tb_s")
    floors = {_place(row): floor_us(row["bytes"], tb_s) for row in rows if row["bytes"] and tb_s}
    return {place: us for place, us in floors.items() if us is not None}


def _positions(rows: list[Row]) -> dict[Place, int]:
    """Where shapes stand on the axis: at their vocab, or in a row if the tokens differ too."""
    places = sorted({_place(row) for row in rows})
    if len({tokens for _, tokens in places}) == 1:
        return {place: place[0] for place in places}
    return {place: number for number, place in enumerate(places)}


def _joined(positions: dict[Place, int]) -> bool:
    """Whether the shapes stand at their vocab, so that a line between them says something."""
    return list(positions.values()) == [vocab for vocab, _ in positions]


def _panels(rows: list[Row], environment: dict[str, Any]) -> int:
    return 2 if floors_of(rows, environment) else 1


def draw_times(panels: Any, rows: list[Row], environment: dict[str, Any]) -> None:
    """Time against vocab; on a second panel its ratio to the floor, where there is one.

    Shapes that differ in more than the vocab have nothing between them: points side by side.
    """
    floors, positions = floors_of(rows, environment), _positions(rows)
    names, joined = implementations_of(rows), _joined(positions)
    for index, name in enumerate(names):
        shift = 0.0 if joined else 0.7 * ((index + 0.5) / len(names) - 0.5)
        own = [row for row in rows if row["implementation"] == name]
        line = sorted((_place(row), us) for row in own if (us := time_us(row)) is not None)
        style = line_style(name) | ({} if joined else {"linestyle": "none", "markersize": 6})
        xs = [positions[v] + shift for v, _ in line]
        panels[0].plot(xs, [us for _, us in line], label=name, **style)
        if floors:
            known = [(positions[v] + shift, us / floors[v]) for v, us in line if v in floors]
            panels[1].plot([x for x, _ in known], [ratio for _, ratio in known], **style)
    kernel = {row["kernel_us"] is not None for row in rows}
    clock = {(True,): "kernel time", (False,): "wall time"}.get(
        tuple(kernel), "kernel or wall time"
    )
    panels[0].set_ylabel(f"µs per call ({clock}, median)")
    if floors:
        places = sorted(floors)
        label = f"floor ({environment['datasheet_tb_s']} TB/s)"
        xs, ys = [positions[place] for place in places], [floors[place] for place in places]
        if joined:
            panels[0].plot(xs, ys, label=label, color=INK)
        else:
            ends = [x - 0.4 for x in xs], [x + 0.4 for x in xs]
            panels[0].hlines(ys, *ends, label=label, color=INK)
        panels[1].axhline(1.0, color=INK)
        panels[1].set_ylabel("time / floor")
    for panel in panels:
        _shape_axis(panel, positions)
        panel.set_yscale("log")
        panel.grid(True, which="both", alpha=0.25)
    _plain_ticks(panels[0].yaxis)
    if floors:
        _plain_ticks(panels[1].yaxis, RATIOS)


def _shape_axis(axes: Any, positions: dict[Place, int]) -> None:
    vocabs = [vocab for vocab, _ in positions]
    if not _joined(positions):
        labels = [f"{tokens} ×\n{vocab}" for vocab, tokens in positions]
        axes.set_xticks(list(positions.values()), labels)
        axes.set_xlim(-0.6, len(labels) - 0.4)
        axes.set_xlabel("tokens × vocab")
        return
    axes.set_xscale("log", base=2)
    # Steep, because 151936 sits close to 131072.
    steep = {"rotation": 60, "ha": "right", "rotation_mode": "anchor", "fontsize": 8}
    axes.set_xticks(vocabs, [str(vocab) for vocab in vocabs], **steep)
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.set_xlabel("vocab")


def _plain_ticks(axis: Any, marks: tuple[float, ...] | None = None) -> None:
    """Numbers without powers on a log axis, at marks of its own or at 1, 2 and 5."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, StrMethodFormatter

    low, high = axis.get_view_interval()
    # From 1 to 1000 and more the powers of ten suffice.
    locator = LogLocator(subs=(1,) if high > 5000 * low else (1, 2, 5), numticks=20)
    if marks is not None:
        locator = FixedLocator([x for x in marks if low <= x <= high])
    axis.set_major_locator(locator)
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def colour_number(name: str) -> int:
    """Index into COLOURS and MARKERS."""
    return ORDER.index(name) if name in ORDER else len(ORDER)


def line_style(name: str) -> dict[str, Any]:
    size, width, line = NESTED.get(name, (4, 1.2, "--"))
    return {
        "color": COLOURS[colour_number(name)],
        "marker": MARKERS[colour_number(name)],
        "markersize": size,
        "linewidth": width,
        "linestyle": line,
    }


# --- for the page --------------------------------------------------------------------------------


def _figure(
    size: tuple[float, float], draw: Callable[[Any], None], more: dict[str, Any] | None = None
) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS | (more or {})):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
    return figure


def _svg(name: str, label: str, size: tuple[float, float], draw: Callable[[Any], None]) -> str:
    """A figure as an SVG element: no names of its own, ink and colours from the page's CSS."""
    import matplotlib

    figure = _figure(size, draw)
    buffer = io.StringIO()
    with matplotlib.rc_context(SETTINGS | {"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = text.replace("xlink:href", "href")
    text = re.sub(r' id="[\w.]+_\d+"', "", text)  # only those of markers and clips are referred to
    text = text.replace(INK, "currentColor")
    for index, colour in enumerate(COLOURS):
        text = text.replace(colour, f"var(--series-{index})")
    shape = re.search(r'viewBox="[^"]*"', text)
    head = f'<svg role="img" aria-label="{escape(label)}" {shape[0] if shape else ""}>'
    return re.sub(r"<svg[^>]*>", lambda _: head, text, count=1)


def times_svg(group: Group, rows: list[Row], environment: dict[str, Any]) -> str:
    """Time against vocab, and below it time over floor."""
    tokens, dtype, kind, phase = group
    panels = _panels(rows, environment)

    def draw(figure: Any) -> None:
        draw_times(figure.subplots(panels, 1, squeeze=False)[:, 0], rows, environment)

    label = f"Time against vocab, {phase}: {group_title(tokens, dtype)}, {kind} inputs"
    return _svg(f"times {group}", label, (4.6, 2.9 * panels), draw)


def roofline_svg(title: str, rows: list[Row], environment: dict[str, Any]) -> str:
    """Achieved TB/s against the bytes to move, below the datasheet's and the copies' bandwidth."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for name in implementations_of(rows):
            _roofline_points(axes, name, [r for r in rows if r["implementation"] == name])
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        _roofs(axes, environment)
        _plain_ticks(axes.xaxis)
        axes.set_xlabel("MB to move")
        axes.set_ylabel("TB/s achieved")
        axes.grid(True, alpha=0.25)

    label = f"Achieved bandwidth of each implementation, {title}"
    return _svg(f"roofline {title}", label, (4.6, 3.3), draw)


def _roofline_points(axes: Any, name: str, rows: list[Row]) -> None:
    """Filled markers for float32, hollow ones for the 16-bit dtypes."""
    style = line_style(name) | {"linewidth": 1.2}
    for dtype in sorted({row["dtype"] for row in rows}):
        points = sorted((r["bytes"] / 1e6, achieved_tb_s(r)) for r in rows if r["dtype"] == dtype)
        face = style["color"] if dtype == "float32" else "none"
        axes.plot([x for x, _ in points], [y for _, y in points], markerfacecolor=face, **style)


def _roofs(axes: Any, environment: dict[str, Any]) -> None:
    copies = sorted(measured_copies(environment).items(), key=lambda item: -item[1])
    for index, (_, tb_s) in enumerate(copies):
        axes.axhline(tb_s, color=INK, linewidth=0.8, linestyle=(":", "-.")[index % 2])
    if copies:  # one label: the lines are too close for two
        label = "copy: " + ", ".join(f"{tb_s:.2f} ({by})" for by, tb_s in copies)
        _roof_label(axes, label, copies[0][1])
    datasheet = environment.get("datasheet_tb_s")
    if datasheet:
        axes.axhline(datasheet, color=INK)
        _roof_label(axes, f"datasheet: {datasheet:g} TB/s", datasheet)
    roof = max([datasheet or 0, *(tb_s for _, tb_s in copies)])
    axes.set_ylim(0, max(axes.get_ylim()[1], 1.12 * roof))


def _roof_label(axes: Any, text: str, height: float) -> None:
    place = axes.get_yaxis_transform()
    axes.text(0.01, height, text, transform=place, va="bottom", fontsize=8)


def memory_svg(title: str, per_element: dict[str, dict[str, float]]) -> str:
    """Bars of the bytes kept per element, by implementation and dtype."""
    names = list(per_element)
    dtypes = sorted({dtype for kept in per_element.values() for dtype in kept}, reverse=True)
    offsets = {d: (i - (len(dtypes) - 1) / 2) * 0.38 for i, d in enumerate(reversed(dtypes))}

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for row, name in enumerate(names):
            colour = COLOURS[colour_number(name)]
            for dtype, value in per_element[name].items():
                place = row - offsets[dtype]
                filled = {"alpha": 0.8} if dtype == "float32" else {"fill": False}
                axes.barh(place, value, 0.34, color=colour, edgecolor=colour, **filled)
                axes.text(value, place, f" {number(value, '.2f')} {dtype}", va="center", fontsize=8)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.margins(x=0.35)
        axes.set_xlabel("bytes kept per element")
        axes.spines[["top", "right"]].set_visible(False)

    label = f"Bytes kept between forward and backward per element, by implementation, {title}"
    return _svg(f"memory {title}", label, (4.6, 0.8 + 0.45 * len(names)), draw)


def swatch_svg(name: str | None, salt: str) -> str:
    """The line and marker that stand for an implementation, or for the floor."""

    def draw(figure: Any) -> None:
        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.axis("off")
        style = {"color": INK} if name is None else line_style(name)
        axes.plot([0, 1, 2], [0, 0, 0], markevery=[1], **style)

    return _svg(f"{salt} {name}", name or "floor", (0.45, 0.16), draw)
