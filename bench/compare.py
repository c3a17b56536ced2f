"""What changed between two results files, and whether this project got worse."""

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.oracle import PROJECT
from bench.report import Row, clock_of, microseconds, size_text, spread, time_us
from bench.results import IDENTITY, Result, ResultsError, row_key

BAD = ("wrong", "failed")
FAILS = "REGRESSION"
WIDE = 125  # columns of a terminal that has room for the notes beside the times
# In the order in which the lines are shown, after the regressions of this project.
STYLES = {
    "broken": "red",
    "slower": "yellow",
    "other status": "yellow",
    "other clock": "yellow",
    "only in new": "cyan",
    "only in old": "cyan",
    "works again": "green",
    "faster": "green",
    "not judged": "",
    "within bound": "dim",
    "within noise": "dim",
    "no time": "dim",
}


@dataclass(frozen=True)
class Change:
    """A row of both files, or of one."""

    key: tuple[Any, ...]
    old: Row | None
    new: Row | None
    word: str
    change: float | None = None
    beyond_noise: bool | None = None
    notes: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        """This project's own row broke or got slower."""
        return self.word in ("broken", "slower") and self.key[1] in PROJECT


def compare(old: Result, new: Result, bound: float) -> list[Change]:
    """The changes of all rows, this project's regressions first."""
    before, after = _by_key(old), _by_key(new)
    alike = comparable(old["environment"], new["environment"])
    changes = [judge(key, before.get(key), after.get(key), bound, alike) for key in before | after]
    words = list(STYLES)
    return sorted(
        changes, key=lambda c: (not c.fails, words.index(c.word), -abs(c.change or 0), str(c.key))
    )


def _by_key(result: Result) -> dict[tuple[Any, ...], Row]:
    rows: dict[tuple[Any, ...], Row] = {}
    for row in result["rows"]:
        if row_key(row) in rows:
            raise ResultsError(f"the row {row_key(row)} is there twice")
        rows[row_key(row)] = row
    return rows


def comparable(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether times of the two stand beside each other: the same GPU and meaning of the figures."""
    return all(one[name] == other[name] for name in ("gpu", "protocol"))


def judge(
    key: tuple[Any, ...], old: Row | None, new: Row | None, bound: float, alike: bool
) -> Change:
    """One row's change.

    A time changed if its median moved by more than the bound *and* the 20–80 % intervals of the raw
    samples do not overlap. The second alone would call every drift of the clocks a change: within
    one process samples agree far better than two runs do. The first alone would call a noisy row's
    median a change. With neither samples nor quantiles the interval is the median, so the bound
    alone decides.
    """
    if old is None or new is None:
        return Change(key, old, new, "only in new" if old is None else "only in old")
    notes = _notes(old, new)
    if old["status"] != new["status"]:
        was_ok, is_bad = old["status"] == "ok", new["status"] in BAD
        word = "broken" if was_ok and is_bad else "other status"
        return Change(key, old, new, "works again" if new["status"] == "ok" else word, notes=notes)
    before, after = time_us(old), time_us(new)
    if before is None or after is None:
        return Change(key, old, new, "no time", notes=notes)
    if clock_of(old) != clock_of(new):
        return Change(key, old, new, "other clock", notes=notes)
    if not alike:
        return Change(key, old, new, "not judged", _of_floor(old, new), notes=notes)
    change = after / before - 1 if before else None
    apart = _apart(old, new)
    word = "within noise"
    if apart and change is not None:
        word = "within bound" if abs(change) <= bound else "slower" if change > 0 else "faster"
    return Change(key, old, new, word, change, apart, notes)


def _apart(old: Row, new: Row) -> bool:
    """Whether the 20–80 % intervals of two rows have no point in common."""
    (low, high), (other_low, other_high) = (
        spread(row) or (row[clock_of(row)],) * 2 for row in (old, new)
    )
    return high < other_low or other_high < low


def _of_floor(old: Row, new: Row) -> float | None:
    ratios = old["floor_ratio"], new["floor_ratio"]
    return ratios[1] / ratios[0] - 1 if all(ratios) else None


def _notes(old: Row, new: Row) -> tuple[str, ...]:
    notes = []
    if old["status"] != new["status"]:
        reason = f": {new['reason']}" if new["reason"] else ""
        notes.append(f"{old['status']} → {new['status']}{reason}")
    elif new["status"] != "ok":
        notes.append(str(new["status"]))
    if old["kept_bytes"] != new["kept_bytes"]:
        notes.append(f"kept {size_text(old['kept_bytes'])} → {size_text(new['kept_bytes'])}")
    sums = old.get("input_checksums"), new.get("input_checksums")
    if all(sums) and sums[0] != sums[1]:
        notes.append("other inputs")
    return tuple(notes)


def environment_changes(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, old and new value of what differs between two environments."""
    names = [name for name in IDENTITY if name != "versions"]
    names += ["date", "cpu_count", "torch_copy_tb_s", "jax_copy_tb_s"]
    pairs = [(name, one.get(name), other.get(name)) for name in names]
    for package in one["versions"] | other["versions"]:
        pairs.append((package, *(x["versions"].get(package) for x in (one, other))))
    return [(name, _text(a), _text(b)) for name, a, b in pairs if a != b]


def _text(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "–" if value is None else str(value)


# --- terminal ------------------------------------------------------------------------------------


def report(old: Result, new: Result, bound: float, console: Console) -> int:
    """Prints the changes; 1 if this project got slower beyond bound and noise, or broke."""
    changes = compare(old, new, bound)
    environments = old["environment"], new["environment"]
    _print_environments(*environments, console)
    wide = console.width >= WIDE
    console.print(_table(changes, comparable(*environments), wide))
    for change in () if wide else (x for x in changes if x.notes):
        line = f"{' '.join(_cells(change)[1:4])}: {', '.join(change.notes)}"
        console.print(line, style=_style(change), highlight=False)
    counts = {word: sum(change.word == word for change in changes) for word in STYLES}
    console.print(", ".join(f"{n} {word}" for word, n in counts.items() if n) or "no rows")
    failing = sum(change.fails for change in changes)
    verdict = f"{failing} rows of this project broke or got slower" if failing else "no regression"
    console.print(
        f"{verdict} (bound {bound:.1%}, and 20–80 % intervals apart)",
        style="bold red" if failing else "bold green",
        highlight=False,
    )
    return int(failing > 0)


def _print_environments(one: dict[str, Any], other: dict[str, Any], console: Console) -> None:
    differences = environment_changes(one, other)
    if differences:
        table = Table(title="environments", title_justify="left", box=box.SIMPLE_HEAD)
        for name in ("", "old", "new"):
            table.add_column(name, overflow="fold")
        for line in differences:
            table.add_row(*line)
        console.print(table)
    if one["gpu"] != other["gpu"]:
        warning = (
            f"WARNING: other GPU ({one['gpu'] or 'none'} against {other['gpu'] or 'none'}): no "
            "time is judged; the change shown is of the ratio to each GPU's own floor, if known"
        )
        console.print(warning, style="bold yellow", highlight=False)
    elif not comparable(one, other):
        warning = "WARNING: other protocol, so the figures mean something else: no time is judged"
        console.print(warning, style="bold yellow", highlight=False)


def _table(changes: list[Change], alike: bool, wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("result", min_width=len(FAILS) + 1, no_wrap=wide)
    table.add_column("implementation", no_wrap=True)
    table.add_column("phase", no_wrap=wide, overflow="fold")
    table.add_column("inputs", no_wrap=wide, min_width=len("16384x131072"))
    for name in ("old µs", "new µs", "change" if alike else "change × floor"):
        table.add_column(name, justify="right", no_wrap=name != "change × floor")
    if wide:
        table.add_column("beyond noise")
        table.add_column("notes", overflow="fold")
    for change in changes:
        cells = _cells(change)
        table.add_row(*(cells if wide else cells[:-2]), style=_style(change))
    return table


def _style(change: Change) -> str:
    return "bold red" if change.fails else STYLES[change.word]


def _cells(change: Change) -> list[str]:
    _, implementation, phase, tokens, vocab, dtype, kind = change.key
    times = ["–" if row is None else microseconds(time_us(row)) for row in (change.old, change.new)]
    return [
        f"{FAILS}: {change.word}" if change.fails else change.word,
        str(implementation),
        str(phase),
        f"{tokens}x{vocab} {dtype}" + ("" if kind == "random" else f" {kind}"),
        *times,
        "–" if change.change is None else f"{change.change:+.1%}",
        {True: "yes", False: "no", None: "–"}[change.beyond_noise],
        ", ".join(change.notes),
    ]
