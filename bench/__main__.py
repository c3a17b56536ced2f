"""Command line: ``python -m bench`` runs the main job; see ``--help`` for its parts."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import Unavailable, compare, parity, plots, published, report, results, timing
from bench.child import make_backend
from bench.gpus import detect_gpu
from bench.oracle import PROJECT
from bench.run import FRAMEWORKS, IMPLEMENTATIONS, Plan, default_plan, run
from bench.shapes import GROUPS, LOGITS, LOSS, OPS, PHASES, Shape, parse_shapes

OP_WORDS = {"probabilities": LOSS, "logits": LOGITS}
OUTPUT = results.ROOT / "build" / "bench"
console = Console(markup=False)
if not console.is_terminal and "COLUMNS" not in os.environ:
    console = Console(markup=False, width=130)


def _words(allowed: tuple[str, ...]) -> Any:
    def parse(argument: str) -> list[str]:
        words = [word.strip() for word in argument.split(",") if word.strip()]
        unknown = [word for word in words if word not in allowed]
        if unknown or not words:
            raise argparse.ArgumentTypeError(
                f"{argument!r}: choose from {', '.join(allowed)}, separated by commas"
            )
        return words

    return parse


def _shapes(argument: str) -> list[Shape]:
    try:
        return parse_shapes(argument)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _bound(argument: str) -> float:
    bound = float(argument)
    if not 0 <= bound < float("inf"):
        raise ValueError
    return bound


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    measure = commands.add_parser("run", help="measure rows into one results file")
    for target in (parser, measure):
        target.add_argument("--protocol", choices=("kernel", "published"), default="kernel")
        target.add_argument(
            "--device", choices=("cpu", "cuda"), help="default: a GPU if there is one"
        )
    measure.add_argument(
        "--op",
        choices=tuple(OP_WORDS),
        default="probabilities",
        help=f"what the loss is computed from ({', '.join(OPS)}); default: probabilities",
    )
    measure.add_argument("--impl", type=_words(IMPLEMENTATIONS), help="comma-separated")
    measure.add_argument(
        "--shapes",
        type=_shapes,
        help=f"TOKENSxVOCAB[:dtype[:inputs]], or groups: {', '.join(GROUPS)}",
    )
    measure.add_argument("--phases", type=_words((*PHASES, "full")))
    measure.add_argument("--inputs", choices=("random", "text"), help="inputs of all shapes")
    measure.add_argument("--repeats", type=int, help="most kernel samples per row")
    measure.add_argument("-o", "--output", type=Path, required=True)
    merging = commands.add_parser("merge", help="join parts that were measured alike")
    merging.add_argument("parts", nargs="+", type=Path)
    merging.add_argument("-o", "--output", type=Path, required=True)
    table = commands.add_parser("table", help="markdown table of a results file")
    table.add_argument("file", type=Path)
    table.add_argument("--readme", type=Path, help="rewrite the block between the markers there")
    table.add_argument("--block", choices=report.BLOCKS, default=report.BLOCKS[0])
    table.add_argument("--phases", type=_words(PHASES), default=["forward", "total"])
    table.add_argument("--impl", type=_words(IMPLEMENTATIONS), help="columns; default: all")
    show = commands.add_parser("show", help="every row of a results file on the terminal")
    show.add_argument("file", type=Path)
    plots = commands.add_parser("plot", help="PNG plots of a results file")
    plots.add_argument("file", type=Path)
    plots.add_argument("-o", "--output", type=Path, required=True)
    page = commands.add_parser("report", help="one HTML page of a results file")
    page.add_argument("file", type=Path)
    page.add_argument("--bits", type=Path, help="what python -m parity_tests.random_bits -o wrote")
    page.add_argument("-o", "--output", type=Path, required=True)
    both = commands.add_parser("compare", help="what changed between two results files")
    both.add_argument("old", type=Path)
    both.add_argument("new", type=Path)
    both.add_argument("--bound", type=_bound, default=0.03, help="change that counts, default 0.03")
    check = commands.add_parser("selfcheck", help="compare the clocks on a big copy (needs a GPU)")
    check.add_argument("--framework", choices=tuple(FRAMEWORKS))
    check.add_argument("--reader", type=int, choices=(0, 1), help="in order of preference")
    return parser


def _device(asked: str | None) -> str:
    return asked or ("cuda" if detect_gpu() else "cpu")


def _plan(arguments: argparse.Namespace) -> Plan:
    ops = (OP_WORDS[arguments.op],) if arguments.command == "run" else OPS
    plan = default_plan(_device(arguments.device), ops)
    if arguments.protocol == "published":
        plan.implementations = list(published.IMPLEMENTATIONS)
        plan.phases = list(published.MODES)
        vocabs = (shape.vocab for shape in GROUPS["table-float32"][1])
        plan.shapes = [Shape(published.TOKENS, vocab, inputs="randn") for vocab in vocabs]
    plan.shapes = getattr(arguments, "shapes", None) or plan.shapes
    plan.implementations = getattr(arguments, "impl", None) or plan.implementations
    plan.phases = getattr(arguments, "phases", None) or plan.phases
    plan.repeats = getattr(arguments, "repeats", None) or plan.repeats
    kind = _inputs(arguments, ops)
    if kind:
        plan.shapes = [Shape(s.tokens, s.vocab, s.dtype, kind) for s in plan.shapes]
    if not any(plan.rows()):
        raise Unavailable(f"{', '.join(plan.implementations)}: only --op logits measures these")
    return plan


def _inputs(arguments: argparse.Namespace, ops: tuple[str, ...]) -> str | None:
    """Inputs that all shapes get, whatever they say."""
    asked: str | None = getattr(arguments, "inputs", None)
    if arguments.protocol == "published":
        return "randn"
    if ops != (LOGITS,):
        return asked
    if asked:
        raise Unavailable(f"--inputs {asked} are probabilities: leave them out with --op logits")
    return "logits"


def _measure(plan: Plan, protocol: str, output: Path) -> results.Result:
    module = "bench.published" if protocol == "published" else "bench.child"
    return run(plan, output, protocol, module)


def _exit_code(rows: list[dict[str, Any]]) -> int:
    """1 if an implementation of this project is wrong or broke; what a peer does is a finding."""
    bad = ("wrong", "failed")
    return int(any(row["status"] in bad and row["implementation"] in PROJECT for row in rows))


def _main_job(arguments: argparse.Namespace) -> int:
    """The whole run on a GPU; on a CPU, the interpreters and the stored figures besides."""
    plan = _plan(arguments)
    names = ", ".join(plan.implementations)
    where = "GPU found" if plan.device == "cuda" else "No GPU found"
    console.print(f"{where}: measuring {names} on {len(plan.shapes)} shapes")
    output = OUTPUT / f"{arguments.protocol}-{plan.device}.json"
    result = _measure(plan, arguments.protocol, output)
    code = _exit_code(result["rows"])
    if plan.device == "cpu":
        _stored()
        code |= _interpreters()
        console.print()
    report.print_result(result, console, _shown(output))  # last, where it is read first
    for path in (output, *plots.plot(result, OUTPUT / "plots")):
        console.print(f"wrote {_shown(path)}", highlight=False, soft_wrap=True)
    return code


def _shown(path: Path) -> Path:
    """A path below the root of the repository from there on."""
    return path.relative_to(results.ROOT) if path.is_relative_to(results.ROOT) else path


def _interpreters() -> int:
    console.print("\nParity of the kernels in the interpreters (no GPU needed):")
    code = 0
    for outcome in parity.interpreters():
        for case in outcome["cases"]:
            start = f"  {outcome['route']} {case['shape']}: {case['status']}"
            if "loss_relative_error" in case:
                facts = (
                    f"loss off by {case['loss_relative_error']:.1e} of float64's, per-token bits "
                    f"{'equal' if case['per_token_bits'] else 'DIFFER'}, codes "
                    f"{'equal' if case['codes_equal'] else 'DIFFER'}, gradients "
                    f"{'equal' if case['gradients_equal'] else 'DIFFER'}"
                )
            else:
                facts = case["reason"]
            console.print(f"{start} ({facts})", highlight=False, soft_wrap=True)
            code |= int(case["status"] in ("wrong", "failed"))
    return code


def _stored() -> None:
    """The committed GPU results, for comparison."""
    for path in sorted(results.STORED.glob("*.json")):
        console.print("\nStored GPU results:")
        report.print_result(results.read_result(path), console, _shown(path), ("forward", "total"))
    if not any(results.STORED.glob("*.json")):
        console.print(f"\nNo stored GPU results in {results.STORED.relative_to(results.ROOT)}")


def _page(file: Path, bits: Path | None, output: Path) -> None:
    try:
        from bench import page  # here, so that all else runs without Jinja2
    except ImportError as error:
        raise Unavailable(f"the page needs what the extra 'bench' installs: {error}") from error
    summary = None if bits is None else page.read_bits(bits)
    results.write_atomically(output, page.html(results.read_lenient(file), summary))
    console.print(f"wrote {output}")


def _selfcheck(framework: str | None, reader_number: int | None) -> int:
    """Each reader against CUDA events on a 1 GiB copy, in a process of its own."""
    if framework is None or reader_number is None:
        base = [sys.executable, "-m", "bench", "selfcheck"]
        codes = [
            subprocess.run(
                [*base, "--framework", name, "--reader", str(number)], cwd=results.ROOT
            ).returncode
            for name in ([framework] if framework else FRAMEWORKS)
            for number in range(2)
        ]
        return int(any(codes))
    backend = make_backend(framework, "cuda")
    size = 2**30
    copy = backend.copy_call(size)
    backend.sync(copy())
    event_us = backend.copy_event_us(copy)
    make = backend.reader_makers()[reader_number]
    reader, reasons = timing.choose_reader([make], copy, backend.sync)
    if reader is None:
        console.print(f"{framework}: {'; '.join(reasons)}", soft_wrap=True)
        return 1
    timed = timing.time_call(copy, backend.sync, backend.flush, reader, 9)
    us = timed["kernel_us"]
    against = f", {us / event_us:.3f} of CUDA events' {event_us:.1f} µs" if event_us else ""
    console.print(
        f"{framework} {reader.name}: {us:.1f} µs, {2 * size / us / 1e6:.2f} TB/s{against}; wall "
        f"{timed['wall_us']:.1f} µs; activities: {timed['kernel_names']}",
        soft_wrap=True,
        highlight=False,
    )
    return 0


def main() -> int:
    """Entry point; returns the exit code."""
    arguments = _parser().parse_args()
    try:
        match arguments.command:
            case None:
                return _main_job(arguments)
            case "run":
                result = _measure(_plan(arguments), arguments.protocol, arguments.output)
                report.print_result(result, console, arguments.output)
                return _exit_code(result["rows"])
            case "merge":
                results.write_result(arguments.output, results.merge(arguments.parts))
                console.print(f"wrote {arguments.output}")
            case "table":
                columns = tuple(arguments.impl) if arguments.impl else None
                result = results.read_result(arguments.file)
                block = report.markdown(result, tuple(arguments.phases), columns)
                if arguments.readme:
                    report.rewrite_readme(arguments.readme, block, arguments.block)
                else:
                    print(block)
            case "show":
                report.print_result(results.read_result(arguments.file), console, arguments.file)
            case "plot":
                for path in plots.plot(results.read_result(arguments.file), arguments.output):
                    console.print(f"wrote {path}")
            case "report":
                _page(arguments.file, arguments.bits, arguments.output)
            case "compare":
                old, new = (results.read_lenient(x) for x in (arguments.old, arguments.new))
                return compare.report(old, new, arguments.bound, console)
            case "selfcheck":
                return _selfcheck(arguments.framework, arguments.reader)
    except (results.ResultsError, Unavailable) as error:
        console.print(f"error: {error}", style="red", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
