"""The bench: its arithmetic, its files, its inputs, its clock, and a run from end to end."""

import ctypes
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bench import (
    Unavailable,
    gpus,
    inputs,
    parity,
    plots,
    published,
    report,
    results,
    run,
    text,
    timing,
)
from bench.child import base_row, make_backend
from bench.oracle import Oracle, Wrong, logits_gradient, softmax
from bench.shapes import GROUPS, LOGITS, OPS, PHASES, Shape, minimum_bytes, parse_shapes
from tvd_core import reference

ROOT = Path(__file__).resolve().parent.parent

# --- bytes and floors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("forward", 536_870_912),
        ("forward_keep", 553_648_128),
        ("backward", 285_212_672),
        ("total", 838_860_800),
        ("total_upstream_1", 838_860_800),
    ],
)
def test_minimum_bytes_float32(phase: str, expected: int) -> None:
    assert minimum_bytes(Shape(16384, 4096), phase) == expected


def test_minimum_bytes_bfloat16_and_odd_size() -> None:
    assert minimum_bytes(Shape(16384, 4096, "bfloat16"), "forward") == 268_435_456
    # 3 elements: 12 bytes each of p and q, and 1 byte of codes, not 0.
    assert minimum_bytes(Shape(1, 3), "forward_keep") == 25


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("forward", 2_147_483_648),
        ("forward_keep", 2_281_701_376),
        ("backward", 2_281_701_376),  # reads the student's logits and the codes, writes
        ("total", 4_563_402_752),
        ("total_upstream_1", 4_563_402_752),
    ],
)
def test_minimum_bytes_from_logits(phase: str, expected: int) -> None:
    assert minimum_bytes(Shape(16384, 32768, "bfloat16", "logits"), phase) == expected


@pytest.mark.parametrize(
    ("name", "tb_s", "floor"),
    [
        ("NVIDIA H200", 4.8, 111.8),
        ("NVIDIA H100 80GB HBM3", 3.35, 160.3),
        ("NVIDIA H100 PCIe", 2.0, 268.4),
        ("NVIDIA H100 NVL", 3.9, 137.7),
        ("NVIDIA A100-SXM4-40GB", 1.555, 345.3),
        ("NVIDIA A100-SXM4-80GB", 2.039, 263.3),
        ("NVIDIA A100 80GB PCIe", 1.935, 277.5),
        ("NVIDIA GH200 480GB", 4.0, 134.2),
        ("NVIDIA B200", 8.0, 67.1),
        ("NVIDIA GeForce RTX 4090", 1.008, 532.6),
        ("NVIDIA L40S", 0.864, 621.4),
    ],
)
def test_floor_of_the_published_shape(name: str, tb_s: float, floor: float) -> None:
    assert gpus.datasheet_tb_s(name) == tb_s
    assert gpus.floor_us(536_870_912, tb_s) == pytest.approx(floor, abs=0.05)


def test_floor_of_an_unlisted_gpu_is_unknown() -> None:
    assert gpus.datasheet_tb_s("Some GPU 9000") is None
    assert gpus.floor_us(1, None) is None


def test_published_ratio() -> None:
    assert pytest.approx(2.64, abs=0.005) == published.PUBLISHED_RATIO


# --- shapes --------------------------------------------------------------------------------------


def test_parse_shapes() -> None:
    assert parse_shapes("16x4096, 2x3:bfloat16:text,16x4096") == [
        Shape(16, 4096),
        Shape(2, 3, "bfloat16", "text"),
    ]
    assert tuple(parse_shapes("small")) == GROUPS["small"][1]
    for wrong in ("16", "16x4096:int8", "0x5", "16x4096:float32:zeros"):
        with pytest.raises(ValueError, match="must be"):
            parse_shapes(wrong)


def test_the_inputs_of_a_shape_tell_its_op() -> None:
    assert {shape.op for shape in parse_shapes("logits,logits-cpu")} == {LOGITS}
    assert {shape.op for shape in parse_shapes("small,text,cpu")} == {"tvd_loss"}
    for device in ("cpu", "cuda"):
        assert {shape.op for shape in run.default_plan(device).shapes} == {"tvd_loss"}
        assert {shape.op for shape in run.default_plan(device, OPS).shapes} == set(OPS)


def test_a_peer_from_logits_only_gets_no_probabilities() -> None:
    shapes = [Shape(2, 8), Shape(2, 8, "float32", "logits")]
    plan = run.Plan(shapes, ["liger", "speculators"], ["forward"], "cuda", 1)
    assert [(name, shape.op) for name, _, shape in plan.rows()] == [
        ("liger", "tvd_loss"),
        ("liger", LOGITS),
        ("speculators", LOGITS),
    ]


# --- inputs --------------------------------------------------------------------------------------


def test_random_inputs_are_softmax_rows_and_pinned() -> None:
    p, q = inputs.numpy_inputs(16, 4096)
    for x in (p, q):
        assert x.dtype == np.float32
        np.testing.assert_allclose(x.sum(-1, dtype=np.float64), 1, atol=1e-6)
    assert (p > 0).all()
    assert 0.45 < 0.5 * np.abs(p - q).sum(-1).mean() < 0.6  # two independent softmax rows: 0.52
    assert inputs.numpy_checksum(p) != inputs.numpy_checksum(q)
    assert inputs.numpy_checksum(p) == 3_194_444_832


def test_logits_are_those_of_a_model_and_pinned() -> None:
    student, teacher = inputs.numpy_logits(64, 4096)
    p, q = (softmax(x.astype(np.float64)) for x in (student, teacher))
    acceptance = np.minimum(p, q).sum(-1).mean()
    assert 0.65 < acceptance < 0.75
    assert 0.2 < q.max(-1).mean() < 0.5
    assert inputs.numpy_checksum(student) == 3_960_152_392
    # Exact, or fused and separate products and sums would differ.
    exact = student.astype(np.float64) - teacher
    assert np.array_equal(exact, np.rint(exact / inputs.LOGIT_STEP) * inputs.LOGIT_STEP)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_make_the_same_logits(framework: str, dtype: str) -> None:
    pytest.importorskip(framework)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    backend = make_backend(framework, "cpu")
    made = backend.make_inputs(Shape(8, 520, dtype, "logits"), inputs.SEED)
    for x, expected in zip(made, inputs.numpy_logits(8, 520), strict=True):
        as_stored = expected.astype(getattr(ml_dtypes, dtype, dtype))
        assert backend.checksum(x) == inputs.numpy_checksum(as_stored)


def test_the_checksum_sees_a_swap_and_a_last_bit() -> None:
    p, _ = inputs.numpy_inputs(2, 64)
    swapped, nudged = p.copy(), p.copy()
    swapped[0, [0, 1]] = p[0, [1, 0]]
    nudged[1, 63] = np.nextafter(p[1, 63], np.float32(1))
    sums = {inputs.numpy_checksum(x) for x in (p, swapped, nudged)}
    assert len(sums) == 3


def test_sample_rows_hold_the_ends() -> None:
    rows = inputs.sample_rows(16384)
    assert rows[0] == 0
    assert rows[-1] == 16383
    assert list(inputs.sample_rows(1)) == [0]


def test_text_inputs_are_peaked_tied_sparse_and_deterministic() -> None:
    p, q = text.text_inputs(256, 1024)
    for x in (p, q):
        np.testing.assert_allclose(x.sum(-1, dtype=np.float64), 1, atol=1e-6)
        assert (x == 0).mean() > 0.7
        assert x.max(-1).mean() > 0.1
    ties = (p == q) & (p > 0)
    assert ties.any(), "no tie away from zero"
    assert (p != q).any(-1).mean() > 0.9
    again, _ = text.text_inputs(256, 1024)
    assert np.array_equal(p.view(np.uint32), again.view(np.uint32))


def test_text_inputs_pad_a_vocabulary_that_the_text_cannot_fill() -> None:
    vocab = 40_000
    _, size = text.token_ids(vocab)
    p, q = text.text_inputs(2, vocab)
    assert size < vocab
    assert p.shape == (2, vocab)
    assert not p[:, size:].any()
    assert not q[:, size:].any()


# --- results files -------------------------------------------------------------------------------


def _row(implementation: str, phase: str = "forward", **values: object) -> dict:
    timed = {
        "kernel_us": 120.0,
        "wall_us": 130.0,
        "host_us": 20.0,
        "floor_ratio": 1.07,
        "quantiles": {"kernel_us": {"q20": 119.0, "q80": 121.0}},
    }
    return base_row(implementation, phase, Shape(16384, 4096)) | timed | values


def _result(rows: list[dict], **environment: object) -> dict:
    stamp = results.environment("kernel") | {
        "gpu": "NVIDIA H200",
        "driver": "1",
        "datasheet_tb_s": 4.8,
        "commit": "a" * 40,
        "dirty": False,
    }
    return {"environment": stamp | environment, "rows": rows}


def _write(folder: Path, *parts: dict) -> list[Path]:
    paths = [folder / f"part{number}.json" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        results.write_result(path, part)
    return paths


def test_result_round_trip(tmp_path: Path) -> None:
    result = _result([_row("liger"), _row("torch-triton")])
    (path,) = _write(tmp_path, result)
    assert results.read_result(path) == json.loads(json.dumps(result))


def test_merge_joins_parts(tmp_path: Path) -> None:
    parts = (_result([_row("liger")], torch_copy_tb_s=4.3), _result([_row("jax-xla")], jax_x=1))
    merged = results.merge(_write(tmp_path, *parts))
    assert [row["implementation"] for row in merged["rows"]] == ["liger", "jax-xla"]
    assert merged["environment"]["torch_copy_tb_s"] == 4.3
    assert merged["environment"]["jax_x"] == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("commit", "b" * 40),
        ("gpu", "NVIDIA H100 PCIe"),
        ("driver", "2"),
        ("dirty", True),
        ("versions", {"torch": "1.0"}),
        ("protocol", "kernel 0"),
    ],
)
def test_merge_refuses_parts_measured_otherwise(tmp_path: Path, field: str, value: object) -> None:
    parts = (_result([_row("liger")]), _result([_row("jax-xla")], **{field: value}))
    with pytest.raises(results.ResultsError, match=rf"part1\.json does not belong.*{field}: "):
        results.merge(_write(tmp_path, *parts))


def test_merge_refuses_a_row_twice(tmp_path: Path) -> None:
    parts = (_result([_row("liger")]), _result([_row("liger")]))
    with pytest.raises(results.ResultsError, match="repeats the row"):
        results.merge(_write(tmp_path, *parts))


def test_merge_refuses_what_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(results.ResultsError, match="not a results file"):
        results.merge([tmp_path / "x.json"])


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    results.write_atomically(path, "old")

    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        results.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [x.name for x in tmp_path.iterdir()] == ["result.json"]


def test_journal_resumes_and_refuses_another_run(tmp_path: Path) -> None:
    output, stamp = tmp_path / "r.json", _result([])["environment"]
    journal = results.Journal(output, stamp)
    journal.add(_row("liger"))
    with journal.path.open("a") as file:
        file.write('{"op": "tvd_lo')  # interrupted while writing
    resumed = results.Journal(output, stamp)
    assert [row["implementation"] for row in resumed.lines] == ["liger"]
    resumed.add(_row("jax-xla"))
    assert len(results.Journal(output, stamp).lines) == 2
    with pytest.raises(results.ResultsError, match="commit"):
        results.Journal(output, stamp | {"commit": "b" * 40})
    assert results.Journal(output, stamp | {"dirty": True}).lines == []


# --- tables --------------------------------------------------------------------------------------


def test_markdown_table() -> None:
    missing = {"status": "unavailable", "reason": "not installed", "kernel_us": None}
    rows = [
        _row("torch-triton"),
        _row("liger", kernel_us=240.0, floor_ratio=2.14),
        _row("jax-xla", **missing),
    ]
    table = report.markdown(_result(rows))
    assert "one NVIDIA H200" in table
    assert "| tokens × vocab | floor | torch-triton | liger | jax-xla |" in table
    line = "| 16384 × 4096 | 111.8 | 120.0 (1.07) | 240.0 (2.14) | unavailable | 0.50 (liger) |"
    assert line in table
    assert "jax-xla: unavailable in 1 rows: not installed" in table


def test_markdown_has_a_section_for_each_op() -> None:
    shape = Shape(16384, 32768, "bfloat16", "logits")
    from_logits = [
        base_row(name, phase, shape) | {"kernel_us": us, "floor_ratio": us / 447.4}
        for phase in ("forward", "total")
        for name, us in (("jax-pallas", 500.0), ("speculators", 1000.0), ("liger", 1500.0))
    ]
    table = report.markdown(_result([*from_logits, _row("torch-triton"), _row("liger")]))
    first, second = table.split("### From logits: `tvd_from_logits`")
    assert "### From probabilities: `tvd_loss`" in first
    assert "16384 × 4096" in first and "16384 × 32768" not in first
    assert "**forward + backward, upstream gradient ≠ 1**, bfloat16, from logits" in second
    assert "| tokens × vocab | floor | jax-pallas | liger | speculators |" in second
    assert (
        "| 16384 × 32768 | 447.4 | 500.0 (1.12) | 1500 (3.35) | 1000 (2.24) | 0.50 (spec" in second
    )
    assert "###" not in report.markdown(_result(from_logits)), "one op needs no heading"


def test_readme_block_is_rewritten_and_nothing_else(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench:table:start -->\nold\n<!-- bench:table:end -->\nafter\n")
    report.rewrite_readme(readme, "new")
    expected = "before\n<!-- bench:table:start -->\nnew\n<!-- bench:table:end -->\nafter\n"
    assert readme.read_text() == expected
    both = expected + "<!-- bench:logits:start -->\n<!-- bench:logits:end -->\n"
    readme.write_text(both)
    report.rewrite_readme(readme, "other", "logits")
    assert readme.read_text() == both.replace("logits:start -->", "logits:start -->\nother")
    readme.write_text("no markers")
    with pytest.raises(results.ResultsError, match="bench:table:start"):
        report.rewrite_readme(readme, "new")


def test_published_table_shows_the_record_and_the_ratio() -> None:
    rows = [
        base_row(name, "forward", Shape(16384, 4096, inputs="randn")) | {"wall_us": us}
        for name, us in (("liger", 200.0), ("torch-formula", 528.0), ("torch-triton", 100.0))
    ]
    lines = report.published_lines(_result(rows, protocol="published 1"))
    assert "| 4096 | forward | 200.0 | 528.0 | 100.0 | 2.64 | 275.7 | 728.8 | 2.64 |" in lines
    assert "softmax" in lines[-1]


def _printed(result: dict, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False)
    report.print_result(result, console, "some/file.json")
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 130])
@pytest.mark.parametrize("name", ["h200", "h200_logits", "h200_logits_xla", "published"])
def test_the_terminals_tables_cut_nothing_off(name: str, width: int) -> None:
    result = results.read_result(results.STORED / f"{name}.json")
    printed = _printed(result, width)
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= width
    commit = result["environment"]["commit"][:7]
    assert printed.startswith(f"some/file.json, NVIDIA H200, commit {commit}, ")
    if name == "published":
        header = [line.split() for line in printed.splitlines() if "vocab  mode" in line]
        words = ["liger", "formula", "triton", "liger", "liger", "torch", "liger"]
        assert header == [["vocab", "mode", *words]]


def test_the_terminal_says_why_a_row_is_wrong_below_its_table() -> None:
    reason = "gradient[0, 0] is 0.5, expected 0 (3 wrong in 16 rows)"
    rows = [_row("torch-triton"), _row("jax-formula", status="wrong", reason=reason)]
    rows.append(base_row("torch-triton", "forward", Shape(16, 64)) | {"kernel_us": 1.0})
    printed = _printed(_result(rows), 130)
    why = f"jax-formula: wrong in 1 rows: {reason}; jax.grad of abs is 1 where p = q, not 0"
    assert printed.index(why) < printed.index("16 × 64")


def test_without_a_plot_there_is_no_folder(tmp_path: Path) -> None:
    assert plots.plot(_result([_row("liger")]), tmp_path / "plots") == []
    assert not (tmp_path / "plots").exists()


def test_plots_are_written(tmp_path: Path) -> None:
    rows = [
        base_row("torch-triton", "forward", Shape(16, vocab)) | {"kernel_us": 1.0 * vocab}
        for vocab in (64, 128)
    ]
    (path,) = plots.plot(_result(rows), tmp_path)
    assert path.name == "forward_float32_16.png"
    assert path.read_bytes()[:4] == b"\x89PNG"


def _drawn(shapes: list[Shape]) -> tuple[list[str], set[str]]:
    """Tick labels of the first panel, and the styles of its lines."""
    from matplotlib.figure import Figure

    rows = [base_row("liger", "forward", x) | {"kernel_us": 1.0} for x in shapes]
    axes = Figure().subplots(1, 2)
    plots.draw_times(axes, rows, {"datasheet_tb_s": 4.8})
    labels = [text.get_text() for text in axes[0].get_xticklabels()]
    return labels, {line.get_linestyle() for line in axes[0].get_lines()}


def test_each_vocab_has_a_tick_and_unrelated_shapes_have_no_line_between_them() -> None:
    labels, styles = _drawn([Shape(16, vocab) for vocab in (32768, 50257, 131072, 151936)])
    assert labels == ["32768", "50257", "131072", "151936"]
    assert styles == {"--", "-"}
    labels, styles = _drawn([Shape(8, 64, inputs="logits"), Shape(4, 96, inputs="logits")])
    assert labels == ["8 ×\n64", "4 ×\n96"]
    assert styles == {"None"}


def test_plots_from_logits_put_shapes_in_a_row(tmp_path: Path) -> None:
    shapes = [Shape(8, 64, inputs="logits"), Shape(4, 96, inputs="logits")]
    rows = [base_row("torch-triton", "forward", shape) | {"kernel_us": 9.0} for shape in shapes]
    (path,) = plots.plot(_result(rows), tmp_path)
    assert path.name == "forward_float32_logits.png"


# --- the clock -----------------------------------------------------------------------------------


class FakeCupti:
    """libcupti with three records: a kernel, a fill, and one of a kind that is not counted."""

    SIZE = 160

    def __init__(self) -> None:
        self.pending = 0
        self.name = ctypes.create_string_buffer(b"tvd_kernel")
        self.enabled: set[int] = set()
        self.cuptiActivityGetNextRecord = lambda buffer, valid, record: self._next(
            buffer, valid, record
        )

    def cuptiActivityEnable(self, kind: object) -> int:
        self.enabled.add(kind.value)
        return 0

    def cuptiActivityDisable(self, kind: object) -> int:
        self.enabled.remove(kind.value)
        return 0

    def cuptiActivityRegisterCallbacks(self, request: object, complete: object) -> int:
        self.request, self.complete = request, complete
        return 0

    def cuptiActivityFlushAll(self, flag: object) -> int:
        if not self.pending or 10 not in self.enabled:
            return 0
        self.pending = 0
        buffer, size, most = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        self.request(ctypes.byref(buffer), ctypes.byref(size), ctypes.byref(most))
        assert buffer.value % 8 == 0
        for number, (kind, ns) in enumerate(((10, 5000), (2, 700), (5, 9_000_000))):
            at = buffer.value + number * self.SIZE
            ctypes.c_uint32.from_address(at).value = kind
            ctypes.c_uint64.from_address(at + 16).value = 100 + number
            ctypes.c_uint64.from_address(at + 24).value = 100 + number + ns
            ctypes.c_void_p.from_address(at + 104).value = ctypes.addressof(self.name)
        self.complete(None, 0, buffer, size, 3 * self.SIZE)
        return 0

    def _next(self, buffer: int, valid: int, record: object) -> int:
        value = record._obj
        following = buffer if value.value is None else value.value + self.SIZE
        if following >= buffer + valid:
            return 12
        value.value = following
        return 0


def test_cupti_reader_counts_kernels_and_fills_of_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = FakeCupti()
    monkeypatch.setattr(timing.ctypes, "CDLL", lambda path: library)
    reader = timing.Cupti("fake")

    def call() -> None:
        library.pending = 1

    timed = timing.time_call(call, lambda _: None, flush=call, reader=reader, repeats=7)
    assert timed["kernel_us"] == pytest.approx(5.7)
    assert timed["kernels"] == 2
    assert timed["clock"] == "cupti"
    assert timed["kernel_names"][0].startswith("tvd_kernel")
    assert len(timed["samples"]["kernel_us"]) == 7
    assert not reader._buffers
    assert not library.enabled, "the wall clock ran with CUPTI recording"


def test_a_reader_without_records_is_passed_over() -> None:
    class Blind:
        name = "blind"

        def begin(self) -> None: ...

        def end(self) -> list[timing.Activity]:
            return []

    class Seeing(Blind):
        name = "seeing"

        def end(self) -> list[timing.Activity]:
            return [timing.Activity("copy", 0, 10.0)]

    def broken() -> timing.Reader:
        raise OSError("no libcupti")

    makers = [broken, Blind, Seeing]
    reader, reasons = timing.choose_reader(makers, lambda: None, lambda _: None)
    assert reader is not None
    assert reader.name == "seeing"
    assert "no libcupti" in reasons[0]
    assert "blind: found no records" in reasons[1]


def test_quantiles() -> None:
    expected = {"min": 1.0, "q20": 1.8, "q50": 3.0, "q80": 4.2, "max": 5.0}
    assert timing.quantiles([5.0, 1.0, 2.0, 4.0, 3.0]) == pytest.approx(expected)


# --- checking candidates -------------------------------------------------------------------------


class NumpyBackend:
    """The few methods of a backend that the oracle needs."""

    def oracle_per_token(self, p: np.ndarray, q: np.ndarray, op: str) -> np.ndarray:
        if op == LOGITS:
            p, q = softmax(p.astype(np.float64)), softmax(q.astype(np.float64))
        return reference.tvd_reference(p, q, reduction="per_token")

    def rows(self, x: np.ndarray, index: np.ndarray) -> np.ndarray:
        return x[index].astype(np.float64)

    def scalar(self, loss: float) -> float:
        return float(loss)


def test_a_wrong_candidate_is_not_timed() -> None:
    p, q = text.text_inputs(64, 512)
    oracle = Oracle(NumpyBackend(), Shape(64, 512, inputs="text"), p, q)
    loss = float(reference.tvd_reference(p, q))
    gradient = reference.tvd_reference_grad(p, q)[0].astype(np.float32)
    assert oracle.check("torch-triton", (loss, gradient), 1.0) < 1e-12
    with pytest.raises(Wrong, match="loss"):
        oracle.check("torch-triton", (loss * (1 + 1e-4), None), 1.0)
    with pytest.raises(Wrong, match="loss"):
        oracle.check("torch-triton", (float("nan"), None), 1.0)
    with pytest.raises(Wrong, match="gradient"):
        oracle.check("torch-triton", (None, gradient), 0.37)
    last = gradient.copy()
    last[63, 511] = 1.0
    with pytest.raises(Wrong, match=r"gradient\[63, 511\]"):
        oracle.check("torch-triton", (None, last), 1.0)
    # jnp.abs at a tie: +1 where the contract says 0.
    tied = np.where(gradient == 0, np.float32(0.5 / 64), gradient)
    with pytest.raises(Wrong, match="gradient"):
        oracle.check("jax-formula", (None, tied), 1.0)


def test_a_wrong_candidate_from_logits_is_not_timed() -> None:
    student, teacher = inputs.numpy_logits(16, 640)
    oracle = Oracle(NumpyBackend(), Shape(16, 640, inputs="logits"), student, teacher)
    p, q = (softmax(x.astype(np.float64)) for x in (student, teacher))
    loss = 0.5 * np.abs(p - q).sum(-1).mean()
    sign = np.sign(p - q)
    sigma = (p * sign).sum(-1, keepdims=True)
    gradient = (0.5 * p * (sign - sigma) / 16).astype(np.float32)
    assert oracle.check("torch-triton", (loss, gradient), 1.0) < 1e-12
    oracle.check("torch-triton", (None, 0.37 * gradient), 0.37)
    with pytest.raises(Wrong, match="loss"):
        oracle.check("torch-triton", (loss * (1 + 2e-5), None), 1.0)
    oracle.check("speculators", (loss * (1 + 2e-5), None), 1.0)
    with pytest.raises(Wrong, match="loss"):
        oracle.check("speculators", (loss * (1 + 2e-4), None), 1.0)
    for wrong in (
        0.5 * p * sign / 16,  # sigma left out
        0.5 * q * (sign - sigma) / 16,
        gradient * (1 + 1e-2),
        np.where(np.arange(640) == 639, -gradient, gradient),
    ):
        with pytest.raises(Wrong, match="gradient"):
            oracle.check("speculators", (None, wrong), 1.0)


def test_a_sign_that_float32_cannot_tell_may_be_any() -> None:
    student, teacher = (np.zeros((1, 4)) for _ in "pq")
    teacher[0, 0], student[0, 0] = 1.0, 1.0 + 1e-6
    expected, allowed = logits_gradient(student, teacher, 1.0)
    assert (allowed >= np.abs(expected)).all()
    student[0, 0] = 2.0
    expected, allowed = logits_gradient(student, teacher, 1.0)
    assert (allowed <= 1e-3 * np.abs(expected)).all()


def test_inputs_that_differ_between_processes_are_an_error() -> None:
    one, other = (_row(name, input_checksums=[1, 2]) for name in ("torch-triton", "jax-xla"))
    run.check_identical_inputs([one, other])
    with pytest.raises(RuntimeError, match="differ between torch-triton"):
        run.check_identical_inputs([one, other | {"input_checksums": [1, 3]}])


def test_parity_statement_sees_a_wrong_kernel() -> None:
    p, q = inputs.numpy_inputs(4, 1271)
    dp, dq = (x.astype(np.float32) for x in reference.tvd_reference_grad(p, q))
    right = parity.Outputs(
        float(reference.tvd_reference(p, q)),
        reference.per_token_float32(p, q),
        reference.pack_codes(p, q),
        dp,
        dq,
    )
    assert parity.compare(right, p, q)["status"] == "ok"
    for name in ("per_token", "codes", "dp"):
        wrong = parity.Outputs(**(vars(right) | {name: getattr(right, name).copy()}))
        wrong_array = getattr(wrong, name)
        wrong_array.view(np.uint8).reshape(-1)[0] ^= 1
        assert parity.compare(wrong, p, q)["status"] == "wrong", name


def test_speculators_kernels_load_without_what_their_package_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from bench import candidates_torch

    losses = tmp_path / "speculators" / "losses"
    losses.mkdir(parents=True)
    (tmp_path / "speculators" / "__init__.py").write_text("import no_such_package\n")
    (losses / "fused.py").write_text(
        "from speculators.utils.util import is_npu_available\nNPU = is_npu_available()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = {name for name in sys.modules if name.startswith("speculators")}
    assert candidates_torch._speculators_fused().NPU is False
    assert {name for name in sys.modules if name.startswith("speculators")} == before
    (losses / "fused.py").write_text("import no_such_package\n")
    with pytest.raises(Unavailable, match="does not load alone"):
        candidates_torch._speculators_fused()


def test_jax_phases_do_not_copy_p_and_q_into_the_residual() -> None:
    jax = pytest.importorskip("jax")
    from bench.candidates_jax import Backend, formula

    backend = Backend("cpu")
    p, q = backend.make_inputs(Shape(8, 520), inputs.SEED)
    assert backend.checksum(p) == inputs.numpy_checksum(inputs.numpy_inputs(8, 520)[0])
    # jax.checkpoint keeps p and q only; the plain formula keeps one byte an element and more.
    recomputed = jax.checkpoint(formula)
    assert backend.kept_bytes(recomputed, p, q) == 0
    assert backend.kept_bytes(formula, p, q) >= 8 * 520
    expected, _ = reference.tvd_reference_grad(p, q, upstream=0.37)
    for loss in (formula, recomputed):
        _, gradient = backend.phase("backward", loss, p, q, 0.37)()
        np.testing.assert_allclose(np.asarray(gradient), expected, rtol=1e-6)


# --- whole runs ----------------------------------------------------------------------------------

FAKE_CHILD = """
import json, os, sys
spec = json.load(open(sys.argv[1]))
from bench.child import base_row
from bench.shapes import Shape
def emit(**event):
    print(json.dumps(event), flush=True)
emit(event="environment", values={"fake": True})
for number, job in enumerate(spec["jobs"]):
    emit(event="start", job=number)
    for phase in job["phases"]:
        if job["implementation"] == "liger" and phase == "backward":
            os._exit(9)
        row = base_row(job["implementation"], phase, Shape(**job["shape"]))
        emit(event="row", row=row | {"kernel_us": 1.0, "wall_us": 1.0})
    emit(event="done", job=number)
"""


def test_a_process_that_dies_costs_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_child.py").write_text(FAKE_CHILD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    phases = ["forward", "backward", "total"]
    plan = run.Plan([Shape(2, 8)], ["liger", "torch-triton", "jax-xla"], phases, "cpu", 1)
    output = tmp_path / "out.json"
    rows = run.run(plan, output, module="fake_child")["rows"]
    status = {(row["implementation"], row["phase"]): row["status"] for row in rows}
    assert status == {
        ("liger", "forward"): "ok",
        ("liger", "backward"): "failed",
        ("liger", "total"): "failed",
        **{(name, phase): "ok" for name in ("torch-triton", "jax-xla") for phase in phases},
    }
    assert "ended with code" in next(row["reason"] for row in rows if row["status"] == "failed")
    assert json.loads(output.read_text())["rows"] == rows
    assert not list(tmp_path.glob("*.journal"))


def _bench(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_cpu_run_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "cpu.json"
    shapes = ["8x600", "8x600:float32:text", "4x520:bfloat16"]
    names = ["torch-eager", "torch-triton", "liger", "jax-xla", "jax-pallas"]
    done = _bench(
        *("run", "--device", "cpu", "--impl", ",".join(names), "--shapes", ",".join(shapes)),
        *("--repeats", "1", "-o", str(output)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == len(shapes) * len(names) * len(PHASES)
    for row in rows:
        where = (row["implementation"], row["phase"], row["reason"])
        if row["implementation"] in ("torch-eager", "jax-xla"):
            assert row["status"] == "ok", where
            assert row["wall_us"] > 0
            assert row["kernel_us"] is None
            assert row["kept_bytes"] is not None
            assert row["samples"]["wall_us"]
        else:
            assert row["status"] == "unavailable", where
            assert row["reason"]
            assert row["wall_us"] is None
    by_inputs = {(row["vocab"], row["dtype"], row["inputs"]) for row in rows}
    for key in by_inputs:
        same = [r for r in rows if (r["vocab"], r["dtype"], r["inputs"]) == key]
        assert len({tuple(row["input_checksums"]) for row in same}) == 1, key
    table = _bench("table", str(output))
    assert "torch-eager" in table.stdout
    assert "real-text rows" in table.stdout


def test_cpu_run_from_logits_in_parts(tmp_path: Path) -> None:
    parts = []
    for names in ("torch-eager,torch-formula", "jax-xla,jax-formula,liger,speculators"):
        parts.append(tmp_path / f"{len(parts)}.json")
        done = _bench(
            *("run", "--device", "cpu", "--op", "logits", "--impl", names),
            *("--shapes", "4x520:bfloat16", "--repeats", "1", "-o", str(parts[-1])),
        )
        assert done.returncode == 0, done.stdout + done.stderr
    merged = results.merge(parts)["rows"]
    assert len(merged) == 6 * len(PHASES)
    run.check_identical_inputs(merged)
    for row in merged:
        where = (row["implementation"], row["phase"], row["reason"])
        assert (row["op"], row["inputs"]) == (LOGITS, "logits")
        on_cpu = row["implementation"] not in ("liger", "speculators")
        assert row["status"] == ("ok" if on_cpu else "unavailable"), where
        assert on_cpu == (row["wall_us"] is not None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--impl", "speculators"], "only --op logits"),
        (["--op", "logits", "--inputs", "text"], "are probabilities"),
    ],
)
def test_command_line_refuses_what_no_op_measures(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    done = _bench("run", *arguments, "-o", str(tmp_path / "x.json"))
    assert done.returncode == 2
    assert words in done.stdout


def test_command_line_refuses_unknown_words(tmp_path: Path) -> None:
    done = _bench("run", "--impl", "torch-magic", "-o", str(tmp_path / "x.json"))
    assert done.returncode == 2
    assert "torch-triton" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_journal_reads_as_a_result(tmp_path: Path) -> None:
    journal = tmp_path / "part.json.journal"
    lines = [{"commit": "a", "gpu": None}, {"environment": {"sms": 132}}, {"phase": "forward"}]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = results.read_result(journal)
    assert result["environment"] == {"commit": "a", "gpu": None, "sms": 132}
    assert result["rows"] == [{"phase": "forward"}]


# --- tune -----------------------------------------------------------------------------------------


def test_tune_times_every_combination(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from bench import tune
    from tvd_core import config

    for name in ("PALLAS_STAGES", "triton_forward_stages"):
        monkeypatch.setattr(config, name, getattr(config, name))  # put back afterwards
    output = tmp_path / "tune.json"
    settings = ["--set", "PALLAS_STAGES=2,3", "--set", "triton_forward_stages=1"]
    shape = ["--shapes", "16x300", "--phases", "forward,total", "--repeats", "1"]
    assert tune.main(["torch-eager", *settings, *shape, "-o", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["settings"]["PALLAS_STAGES"], row["phase"]) for row in rows] == [
        (2, "forward"),
        (2, "total"),
        (3, "forward"),
        (3, "total"),
    ]
    assert all(row["wall_us"] > 0 for row in rows)
    assert config.PALLAS_STAGES == 3 and config.triton_forward_stages(4096, 4) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--set", "NOTHING=1"], "no 'NOTHING'"), (["--set", "PALLAS_STAGES=x"], "NAME=1,2")],
)
def test_tune_refuses_what_config_does_not_have(arguments, words, capsys):
    from bench import tune

    assert tune.main(["torch-eager", *arguments]) == 2
    assert words in " ".join(capsys.readouterr().out.split())
