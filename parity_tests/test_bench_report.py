"""The page of a results file, and the comparison of two."""

import io
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from rich.console import Console

from bench import compare, page, report, results, timing
from bench.child import base_row
from bench.shapes import Shape

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "bench" / "results" / "h200.json"
HOSTILE = "</td><script>alert('x')</script> $\\frac{$ & \"q\""

# --- synthetic results ---------------------------------------------------------------------------


def _row(name: str, us: float = 100.0, phase: str = "forward", **values: object) -> dict:
    """A row with samples within 1 % of its time; more than one vocab makes a plot."""
    shape = Shape(64, int(values.pop("vocab", 4096)), str(values.pop("dtype", "float32")))
    samples = [us * x for x in (0.995, 0.998, 1.0, 1.002, 1.005)]
    timed = {
        "kernel_us": us,
        "wall_us": 2 * us,
        "floor_ratio": 1.5,
        "kept_bytes": 65536,
        "peak_bytes": 10**6,
        "samples": {"kernel_us": samples},
        "loss_relative_error": 1e-8,
    }
    return base_row(name, phase, shape) | timed | values


def _broken(name: str, status: str = "failed", reason: str = "it broke", **values: object) -> dict:
    row = _row(name, **values)
    times = dict.fromkeys(("kernel_us", "wall_us", "floor_ratio", "loss_relative_error"))
    return row | times | {"status": status, "reason": reason, "samples": {}}


def _result(*rows: dict, **environment: object) -> dict:
    stamp = results.environment("kernel") | {
        "gpu": "NVIDIA H200",
        "driver": "1",
        "datasheet_tb_s": 4.8,
        "commit": "a" * 40,
        "dirty": False,
        "torch_copy_tb_s": 4.24,
    }
    return {"environment": stamp | environment, "rows": list(rows)}


def _file(path: Path, result: dict) -> Path:
    results.write_result(path, result)
    return path


def _page(tmp_path: Path, result: dict, bits: dict | None = None) -> str:
    return page.html(results.read_lenient(_file(tmp_path / "r.json", result)), bits)


def _bench(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "bench", *map(str, arguments)]
    # As in a pipe: readline, which pytest imports, gives child processes a terminal's width.
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    options = {"capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, cwd=ROOT, env=environment, **options)


class _Reader(HTMLParser):
    """Elements with their attributes, and the text of each table row by its title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.lines: dict[str, list[str]] = {}
        self.best: set[str] = set()
        self.text = ""
        self._title: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        known = dict(attributes)
        self.elements.append((tag, known))
        if tag == "tr":
            self._title = known.get("title")
            if self._title is not None:
                self.lines[self._title] = []
        if self._title is not None and tag in ("td", "th"):
            self.lines[self._title].append("")
            if known.get("class") == "best":
                self.best.add(self._title)

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr":
            self._title = None

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._title is not None and self.lines[self._title]:
            self.lines[self._title][-1] += data


# --- the page ------------------------------------------------------------------------------------


def _fetched(text: str) -> list[str]:
    """All that a browser would load from elsewhere."""
    reader = _Reader(text)
    names = ("src", "srcset", "href", "xlink:href", "data", "poster", "action", "background")
    links = [str(a[name]) for _, a in reader.elements for name in names if name in a]
    fetched = [link for link in links if not link.startswith(("#", "data:"))]
    fetched += [
        tag for tag, _ in reader.elements if tag in ("script", "link", "iframe", "object", "base")
    ]
    fetched += re.findall(r"@import[^;]*", text)
    return fetched + [url for url in re.findall(r"url\(([^)]*)\)", text) if url[0] != "#"]


def test_what_a_browser_would_fetch_is_seen() -> None:
    for text in ('<img src="//x/y">', "<script></script>", "<p style='background:url(x.png)'>"):
        assert _fetched(text), text
    assert not _fetched('<use href="#m1"/><path clip-path="url(#p1)"/>')


@pytest.fixture(scope="module")
def stored_page() -> str:
    return page.html(results.read_lenient(STORED))


def test_page_of_the_stored_results_is_self_contained(stored_page: str) -> None:
    assert not _fetched(stored_page)
    assert not re.search("https?://", stored_page)
    ids = re.findall(r'\bid="([^"]*)"', stored_page)
    assert len(ids) == len(set(ids)), "SVGs share ids, so one would draw the other's markers"
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', stored_page)) <= set(ids)


def test_page_of_the_stored_results_holds_the_figures_of_each_row(stored_page: str) -> None:
    lines = _Reader(stored_page).lines
    rows = results.read_result(STORED)["rows"]
    assert len(lines) == len(rows)
    peers: dict[tuple, list[float]] = {}
    for row in rows:
        if row["implementation"] in report.PEERS and row["status"] == "ok":
            peers.setdefault((*report.shape_key(row), row["phase"]), []).append(row["kernel_us"])
    for row in rows:
        shape = f"{row['tokens']}x{row['vocab']}:{row['dtype']}:{row['inputs']}"
        line = lines[f"{row['implementation']} {row['phase']} {shape}"]
        assert line[0] == row["implementation"]
        if row["status"] != "ok":
            assert line[1] == f"{row['status']}: {row['reason']}"
            continue
        us, spread, size, tb_s, floor, peer, kept, peak = line[1:]
        assert float(us) == pytest.approx(row["kernel_us"], abs=0.5, rel=0)
        known = row["quantiles"]["kernel_us"]
        low, high = map(float, spread.split("–"))
        assert (low, high) == pytest.approx((known["q20"], known["q80"]), abs=0.51)
        assert float(size) == pytest.approx(row["bytes"] / 1e6, abs=0.05)
        assert float(tb_s) == pytest.approx(row["bytes"] / row["kernel_us"] / 1e6, abs=0.0051)
        assert float(floor) == pytest.approx(row["floor_ratio"], abs=0.0051)
        best = min(peers[(*report.shape_key(row), row["phase"])])
        assert float(peer) == pytest.approx(row["kernel_us"] / best, abs=0.0051)
        assert (kept, peak) == tuple(report.size_text(row[x]) for x in ("kept_bytes", "peak_bytes"))


def test_page_says_where_the_rows_were_measured(stored_page: str) -> None:
    text = _Reader(stored_page).text
    environment = results.read_result(STORED)["environment"]
    for name in ("gpu", "driver", "commit", "protocol", "seed"):
        assert str(environment[name]) in text, name
    for package, version in environment["versions"].items():
        assert version is None or f"{package} {version}" in text
    copies = {by: f"{environment[f'{by}_copy_tb_s']:.2f}" for by in ("torch", "jax")}
    assert ", ".join(f"{tb_s} TB/s by {by}" for by, tb_s in copies.items()) in text
    for by, tb_s in copies.items():
        assert len(re.findall(rf"copy: [^:]*{tb_s} \({by}\)", text)) == 5, "one for each phase"
    assert text.count(f"datasheet: {environment['datasheet_tb_s']} TB/s") == 5


def test_best_time_of_a_cell_is_marked(tmp_path: Path) -> None:
    rows = [_row("torch-triton", 90.0), _row("liger", 120.0), _broken("jax-xla")]
    reader = _Reader(_page(tmp_path, _result(*rows)))
    assert reader.best == {"torch-triton forward 64x4096:float32:random"}


def test_rows_without_a_time_say_why(tmp_path: Path) -> None:
    rows = [
        _row("torch-triton"),
        _broken("liger", "unavailable", "liger-kernel is not installed"),
        _broken("jax-xla", "wrong", "gradient[0, 3] is 1"),
        _broken("jax-pallas", "failed", None),
    ]
    lines = _Reader(_page(tmp_path, _result(*rows))).lines
    said = {title.split()[0]: line[1] for title, line in lines.items()}
    assert said["liger"] == "unavailable: liger-kernel is not installed"
    assert said["jax-xla"] == "wrong: gradient[0, 3] is 1"
    assert said["jax-pallas"] == "failed: no reason given"


def test_strings_of_the_file_are_escaped(tmp_path: Path) -> None:
    rows = [
        _row(HOSTILE, vocab=vocab, phase=HOSTILE, bytes=10**6, inputs=HOSTILE)
        for vocab in (4096, 8192)
    ]
    rows.append(_broken("liger", reason=HOSTILE))
    bits = {
        "cases": 1,
        "routes": {HOSTILE: {f"{HOSTILE}: compared": 1}},
        "failed": [{"x": HOSTILE}],
    }
    text = _page(tmp_path, _result(*rows, gpu=HOSTILE, commit=HOSTILE, driver=HOSTILE), bits)
    reader = _Reader(text)
    assert "<script" not in text
    assert all(tag != "script" for tag, _ in reader.elements)
    assert reader.lines["liger forward 64x4096:float32:random"][1] == f"failed: {HOSTILE}"
    assert reader.text.count(HOSTILE) > 8


def test_page_has_a_plot_for_each_phase_and_dtype(tmp_path: Path) -> None:
    rows = [
        _row(name, vocab=vocab, phase=phase, dtype=dtype)
        for name in ("torch-triton", "liger")
        for vocab in (4096, 8192)
        for phase in ("forward", "total")
        for dtype in ("float32", "bfloat16")
    ]
    labels = [
        known["aria-label"]
        for tag, known in _Reader(_page(tmp_path, _result(*rows))).elements
        if tag == "svg"
    ]
    assert sum(label.startswith("Time against vocab") for label in labels) == 4
    assert sum(label.startswith("Achieved bandwidth") for label in labels) == 2
    assert sum(label.startswith("Bytes kept") for label in labels) == 1


def _from_logits(name: str, us: float, tokens: int, vocab: int, **values: object) -> dict:
    shape = Shape(tokens, vocab, "bfloat16", "logits")
    own = ("op", "tokens", "vocab", "dtype", "inputs", "bytes")
    made = base_row(name, "forward", shape)
    return _row(name, us, **values) | {field: made[field] for field in own}


def test_page_keeps_the_ops_apart(tmp_path: Path) -> None:
    rows = [_row("liger", vocab=vocab) for vocab in (4096, 8192)]
    rows += [_from_logits("speculators", 50.0, 64, 4096, kept_bytes=0)]
    rows += [_from_logits("speculators", 50.0, 32, 9000, kept_bytes=7)]
    text = _page(tmp_path, _result(*rows))
    reader = _Reader(text)
    labels = [known["aria-label"] for tag, known in reader.elements if tag == "svg"]
    for start in ("Time against vocab", "Achieved bandwidth", "Bytes kept"):
        found = [label for label in labels if label.startswith(start)]
        assert len(found) == 2, start
        assert sum("logits" in label for label in found) == 1, start
    assert "speculators forward 32x9000:bfloat16:logits" in reader.lines
    assert "bfloat16, from logits" in reader.text
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))


def test_plots_take_their_ink_and_colours_from_the_page(stored_page: str) -> None:
    drawn = " ".join(re.findall(r"<svg.*?</svg>", stored_page, re.DOTALL))
    assert "var(--series-0)" in drawn
    assert "currentColor" in drawn
    assert set(re.findall(r"#[0-9a-f]{6}\b(?!\w)", drawn)) <= {"#b0b0b0"}  # the faint grid
    styles = stored_page[: stored_page.index("</style>")]
    light, dark = styles.split("prefers-color-scheme: dark", 1)
    used = set(re.findall(r"var\((--[\w-]+)\)", stored_page))
    for scheme in (light, dark):
        assert used <= set(re.findall(r"(--[\w-]+):", scheme))


def test_memory_is_shown_per_element(tmp_path: Path) -> None:
    text = _Reader(_page(tmp_path, _result(_row("liger"), _row("torch-triton", kept_bytes=0)))).text
    assert "65536 B (0.25)" in text
    assert "0 B (0.00)" in text
    assert " 0.25 float32" in text


def test_parity_is_summarised(tmp_path: Path) -> None:
    rows = [
        _row("jax-xla", loss_relative_error=3e-9),
        _row("jax-xla", phase="total", loss_relative_error=7e-6),
        _broken("jax-xla", "wrong", "gradient is off", phase="backward"),
    ]
    text = re.sub(r"\s+", " ", _Reader(_page(tmp_path, _result(*rows))).text)
    assert "jax-xla21002" in text.replace(" ", "")  # ok, wrong, failed, unavailable, compared
    assert "7.0e-06total 64 × 4096 float32" in text
    assert "wrong: gradient is off" in text


BITS = {
    "environment": {"gpu": "NVIDIA H200", "commit": "a" * 40, "driver": "1", "date": "today"},
    "cases": 135,
    "routes": {
        "torch-triton": {"loss: compared": 1000, "loss: differ": 0},
        "jax-pallas": {"loss: compared": 2000, "loss: differ": 7},
    },
    "failed": [{"tokens": 3, "vocab": 17, "differ": 7}],
}


def test_bits_are_summarised(tmp_path: Path) -> None:
    reader = _Reader(_page(tmp_path, _result(_row("liger")), BITS))
    assert "135 cases" in reader.text
    assert "jax-pallas: compared2,0002,000" in reader.text
    assert "jax-pallas: differ77" in reader.text
    assert "torch-triton: differ00" in reader.text
    assert "tokens 3, vocab 17, differ 7" in reader.text
    assert "Not of the same state" not in reader.text
    other = _page(tmp_path, _result(_row("liger"), commit="b" * 40), BITS)
    assert f"commit {'a' * 12} against {'b' * 12}" in other


@pytest.mark.parametrize("text", ["{", "[]", '{"cases": 1}', '{"cases": 1, "routes": [2]}', "\x80"])
def test_bits_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bits.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(results.ResultsError, match=r"bits\.json"):
        page.read_bits(tmp_path / "bits.json")


def test_page_of_a_cpu(tmp_path: Path) -> None:
    rows = [
        _row(
            name, vocab=vocab, kernel_us=None, floor_ratio=None, samples={"wall_us": [190.0, 210.0]}
        )
        for name in ("torch-eager", "jax-xla")
        for vocab in (4096, 8192)
    ]
    reader = _Reader(_page(tmp_path, _result(*rows, gpu=None, driver=None, datasheet_tb_s=None)))
    line = reader.lines["torch-eager forward 64x4096:float32:random"]
    assert line[1:3] == ["200.0 wall", "194.0–206.0"]
    assert line[5] == "–"
    assert "TVD loss on a CPU" in reader.text
    assert "MiB read" not in reader.text


def test_page_of_a_gpu_without_a_floor(tmp_path: Path) -> None:
    rows = [_row("liger", vocab=vocab, floor_ratio=None) for vocab in (4096, 8192)]
    text = _page(tmp_path, _result(*rows, gpu="Some GPU 9000", datasheet_tb_s=None))
    assert "datasheet: " not in text
    assert "copy: 4.24 (torch)" in text


def test_page_of_a_journal_of_which_the_last_line_is_cut(tmp_path: Path) -> None:
    journal = results.Journal(tmp_path / "r.json", _result()["environment"])
    journal.add(_row("liger"))
    journal.add({"environment": {"sms": 132}})
    with journal.path.open("a") as file:
        file.write('{"op": "tvd_lo')
    done = _bench("report", journal.path, "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "page.html").read_text()
    assert list(_Reader(text).lines) == ["liger forward 64x4096:float32:random"]
    assert "132" in text


def test_page_of_the_published_protocol() -> None:
    stored = results.read_lenient(STORED.with_name("published.json"))
    reader = _Reader(page.html(stored))
    assert len(reader.lines) == len(stored["rows"])
    assert "275.7" in reader.text, "the record"
    assert "nothing clears the leaf's gradient" in reader.text
    assert "no gradient" not in reader.text, "its forward runs with gradients on"


@pytest.mark.parametrize("rows", [[], [{"status": None}], [{"samples": None, "quantiles": None}]])
def test_page_of_rows_that_hold_little(tmp_path: Path, rows: list[dict]) -> None:
    shape = {"tokens": 4, "vocab": 8, "dtype": "float32", "inputs": "random"}
    bare = {"op": "tvd_loss", "implementation": "liger", "phase": "forward"} | shape
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"environment": {}, "rows": [bare | row for row in rows]}))
    assert "unknown" in page.html(results.read_lenient(path))


def test_page_is_written_with_bits_and_whole_or_not_at_all(tmp_path: Path) -> None:
    source = _file(tmp_path / "r.json", _result(_row("liger")))
    bits, output = tmp_path / "bits.json", tmp_path / "new" / "page.html"
    bits.write_text(json.dumps(BITS))
    done = _bench("report", source, "--bits", bits, "-o", output)
    assert done.returncode == 0, done.stdout + done.stderr
    before = output.read_text()
    assert "135 cases" in before
    bits.write_text("{")
    assert _bench("report", source, "--bits", bits, "-o", output).returncode == 2
    assert output.read_text() == before
    assert [x.name for x in output.parent.iterdir()] == ["page.html"]


# --- comparing -----------------------------------------------------------------------------------


def _compare(old: dict, new: dict, bound: float = 0.03, width: int = 200) -> tuple[int, str]:
    console = Console(record=True, width=width, markup=False, file=io.StringIO())
    lenient = [results.complete(x, Path(name)) for x, name in ((old, "old"), (new, "new"))]
    code = compare.report(*lenient, bound, console)
    return code, console.export_text()


def _line(text: str, name: str) -> str:
    (line,) = [x for x in text.splitlines() if f" {name} " in x]
    return line


def test_no_change() -> None:
    code, text = _compare(_result(_row("torch-triton")), _result(_row("torch-triton")))
    assert code == 0
    assert "within noise" in _line(text, "torch-triton")
    assert "+0.0%" in _line(text, "torch-triton")
    assert "REGRESSION" not in text


def test_slower_beyond_bound_and_noise_fails() -> None:
    old = _result(*(_row(name) for name in ("torch-triton", "liger", "jax-pallas", "jax-xla")))
    rows = [_row("torch-triton", 90.0), _broken("liger"), _row("jax-pallas", 104.0)]
    new = _result(*rows, _row("jax-xla"))
    code, text = _compare(old, new)
    assert code == 1
    line = _line(text, "jax-pallas")
    for word in ("REGRESSION: slower", "100.0", "104.0", "+4.0%", "yes"):
        assert word in line
    assert "faster" in _line(text, "torch-triton")
    names = ("jax-pallas", "liger", "torch-triton", "jax-xla")
    order = [text.index(f" {name} ") for name in names]
    assert order == sorted(order), "this project's regression first, what is within noise last"
    assert _compare(old, new, bound=0.05)[0] == 0


def test_slower_within_the_bound_does_not_fail() -> None:
    code, text = _compare(_result(_row("jax-xla", 100.0)), _result(_row("jax-xla", 102.5)))
    assert code == 0
    assert "within bound" in _line(text, "jax-xla")


def test_slower_within_noise_does_not_fail() -> None:
    noisy = {"kernel_us": [95.0, 99.0, 110.0, 120.0, 130.0]}
    new = _row("torch-triton", 110.0, samples=noisy)
    code, text = _compare(_result(_row("torch-triton", 100.0)), _result(new))
    assert code == 0
    line = _line(text, "torch-triton")
    assert "within noise" in line
    assert "+10.0%" in line
    # The same median with samples that agree is a regression.
    assert _compare(_result(_row("torch-triton")), _result(_row("torch-triton", 110.0)))[0] == 1


def test_intervals_are_of_the_samples_else_as_stored_else_the_median() -> None:
    wide = {"kernel_us": timing.quantiles([90.0, 110.0, 130.0])}
    old = _result(_row("torch-triton", 100.0))
    for values, expected in (({"quantiles": wide}, 0), ({"quantiles": None}, 1)):
        new = _row("torch-triton", 110.0, samples={}, **values)
        assert _compare(old, _result(new))[0] == expected


def test_a_peers_regression_is_shown_and_does_not_fail() -> None:
    old = _result(_row("liger"), _row("torch-compile"))
    new = _result(_row("liger", 200.0), _broken("torch-compile"))
    code, text = _compare(old, new)
    assert code == 0
    assert "slower" in _line(text, "liger")
    assert "broken" in _line(text, "torch-compile")
    assert "REGRESSION" not in text


def test_a_narrow_terminal_is_told_everything() -> None:
    new = _result(_row("torch-triton", 110.0), _broken("jax-pallas", "wrong", "for a reason"))
    code, text = _compare(_result(_row("torch-triton"), _row("jax-pallas")), new, width=80)
    assert code == 1
    assert max(map(len, text.splitlines())) <= 80
    for words in (
        "torch-triton",
        "REGRESSION:",
        "+10.0%",
        "jax-pallas forward 64x4096 float32: ok",
    ):
        assert words in text
    assert "for a reason" in re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_a_row_that_broke_fails(status: str) -> None:
    new = _result(_broken("jax-triton", status, "for a reason"))
    code, text = _compare(_result(_row("jax-triton")), new)
    assert code == 1
    assert "REGRESSION: broken" in _line(text, "jax-triton")
    assert f"ok → {status}: for a reason" in _line(text, "jax-triton")
    assert _compare(new, new)[0] == 0, "it was broken before"
    code, text = _compare(new, _result(_row("jax-triton")))
    assert code == 0
    assert "works again" in _line(text, "jax-triton")


def test_a_row_that_became_unavailable_does_not_fail() -> None:
    new = _result(_broken("jax-triton", "unavailable", "not installed"))
    code, text = _compare(_result(_row("jax-triton")), new)
    assert code == 0
    assert "other status" in _line(text, "jax-triton")


def test_a_regression_from_logits_fails_by_itself() -> None:
    old = [_row("torch-triton"), _from_logits("torch-triton", 100.0, 64, 4096)]
    new = [_row("torch-triton"), _from_logits("torch-triton", 120.0, 64, 4096)]
    code, text = _compare(_result(*old), _result(*new))
    assert code == 1
    assert text.count("REGRESSION") == 1
    (line,) = [line for line in text.splitlines() if "REGRESSION: slower" in line]
    assert "64x4096 bfloat16 logits" in line


def test_rows_of_one_file_only() -> None:
    old = _result(_row("torch-triton"), _row("liger"))
    new = _result(_row("liger"), _row("jax-pallas"))
    code, text = _compare(old, new)
    assert code == 0
    assert "only in old" in _line(text, "torch-triton")
    assert "only in new" in _line(text, "jax-pallas")


def test_kept_bytes_inputs_and_environment_are_told() -> None:
    old = _result(_row("torch-triton", input_checksums=[1, 2]))
    row = _row("torch-triton", kept_bytes=2 * 65536, input_checksums=[1, 3])
    new = _result(row, driver="2", torch_copy_tb_s=4.0)
    new["environment"]["versions"] = new["environment"]["versions"] | {"torch": "99.0"}
    code, text = _compare(old, new)
    assert code == 0
    assert "kept 65536 B → 0.1 MB, other inputs" in _line(text, "torch-triton")
    for name, value in (("driver", "2"), ("torch", "99.0"), ("torch_copy_tb_s", "4.000")):
        assert value in _line(text, name)
    assert "numpy" not in text, "what is alike is not told"


def test_another_gpu_is_warned_of_and_compared_by_the_floor() -> None:
    old = _result(_row("torch-triton", 100.0, floor_ratio=1.25), _row("jax-pallas"))
    new = _row("torch-triton", 300.0, floor_ratio=1.5)
    code, text = _compare(old, _result(new, _broken("jax-pallas"), gpu="NVIDIA L4"))
    assert "WARNING: other GPU (NVIDIA H200 against NVIDIA L4)" in text
    assert "change × floor" in text
    assert "not judged" in _line(text, "torch-triton")
    assert "+20.0%" in _line(text, "torch-triton")
    assert code == 1, "jax-pallas broke"
    assert _compare(_result(_row("torch-triton")), _result(new, gpu="NVIDIA L4"))[0] == 0


def test_another_protocol_or_clock_is_not_judged() -> None:
    old = _result(_row("torch-triton"))
    code, text = _compare(old, _result(_row("torch-triton", 200.0), protocol="kernel 1"))
    assert code == 0
    assert "WARNING: other protocol" in text
    code, text = _compare(old, _result(_row("torch-triton", 200.0, kernel_us=None)))
    assert code == 0
    assert "other clock" in _line(text, "torch-triton")


def test_exit_codes_of_the_command(tmp_path: Path) -> None:
    old = _file(tmp_path / "old.json", _result(_row("torch-triton")))
    new = _file(tmp_path / "new.json", _result(_row("torch-triton", 150.0)))
    assert _bench("compare", old, old).returncode == 0
    slower = _bench("compare", old, new)
    assert slower.returncode == 1
    assert "REGRESSION: slower" in slower.stdout
    assert _bench("compare", old, new, "--bound", "0.6").returncode == 0
    assert _bench("compare", STORED, STORED).returncode == 0
    missing = _bench("compare", old, tmp_path / "none.json")
    assert missing.returncode == 2
    assert "none.json" in missing.stdout
    assert _bench("compare", old, new, "--bound", "nan").returncode == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.json", b"{"),
        ("x.json", b"\x80\x81"),
        ("x.json", b"[]"),
        ("x.json", b'{"environment": {}, "rows": [1]}'),
        ("x.json", b'{"environment": {}, "rows": [{"phase": "forward"}]}'),
        ("x.json", b'{"environment": [], "rows": []}'),
        ("x.json.journal", b""),
        ("x.json.journal", b'"text"\n'),
    ],
)
def test_files_that_are_no_results_are_refused(tmp_path: Path, name: str, text: bytes) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(results.ResultsError, match=r"x\.json"):
        results.read_lenient(tmp_path / name)


def test_a_row_that_is_there_twice_is_refused() -> None:
    with pytest.raises(results.ResultsError, match="twice"):
        _compare(_result(_row("liger"), _row("liger")), _result())
