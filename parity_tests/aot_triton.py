"""Compiles every variant of the Triton kernels that the launchers use, with no GPU.

``python -m parity_tests.aot_triton --arch 90`` prints a table of registers and of the bytes that a
thread moves at once, and exits with 1 if a variant needs local memory (a spill) or if an aligned
float32 row is not read and written 16 bytes at a time.

The variants are not listed by hand: the PyTorch launchers are called on small CPU tensors with
stand-ins for the kernels that record how they are launched. Triton must not be in its interpreter
(TRITON_INTERPRET unset), so tests run this file in a process of its own.
"""

import argparse
import collections
import contextlib
import itertools
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tvd_core import config, triton_kernels
from tvd_torch import triton_launch

KERNELS = ("tvd_forward_kernel", "tvd_reduce_kernel", "tvd_backward_kernel")
POINTER_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# With a normalizer: each makes the kernels divide or take the upstream gradient in another way.
REDUCTIONS = (
    ("batchmean", None),
    ("mean", torch.ones(())),
    ("sum", None),
    ("per_token", None),
    ("none", None),
)
# Flag that says whether a variant uses an argument.
ARGUMENT_FLAGS = {
    "labels_ptr": "HAS_LABELS",
    "weights_ptr": "HAS_WEIGHTS",
    "normalizer_ptr": "HAS_NORMALIZER",
    "divisor_ptr": "HAS_DIVISOR",
    "codes_ptr": "KEEP_CODES",
    "elementwise_ptr": "ELEMENTWISE",
    "dp_ptr": "WANT_P",
    "dq_ptr": "WANT_Q",
    "upstream_ptr": "UPSTREAM",
}


@dataclass(frozen=True)
class Launch:
    """One kernel as a launcher asks for it."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, object], ...]
    aligned: tuple[str, ...]
    num_warps: int

    def rows(self, *names: str) -> list[str]:
        """Types of the ``[tokens, vocab]`` arguments among ``names`` that this variant uses."""
        types = dict(self.signature)
        return [types[name] for name in names if name in types and self._uses(name)]

    def _uses(self, name: str) -> bool:
        flag = ARGUMENT_FLAGS.get(name)
        value = dict(self.constexprs).get(flag, True)
        return value == 2 if flag == "UPSTREAM" else bool(value)

    @property
    def label(self) -> str:
        """Types of the rows and the flags that are set, for a table."""
        rows = "/".join(t[1:] for t in self.rows("p_ptr", "q_ptr", "dp_ptr", "dq_ptr"))
        flags = [n if v is True else f"{n}={v}" for n, v in self.constexprs if v is not False]
        return " ".join([rows, *flags]).strip()


@dataclass
class Record:
    """What the compiler made of a launch."""

    launch: Launch
    arch: int
    resources: dict[str, int]
    accesses: collections.Counter
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        moved = " ".join(f"{k}{b}x{n}" for (k, b), n in sorted(self.accesses.items()))
        registers = self.resources["REG"]
        kernel = self.launch.kernel.removeprefix("tvd_").removesuffix("_kernel")
        problems = "".join(f"\n    PROBLEM {problem}" for problem in self.problems)
        head = f"sm_{self.arch} {kernel:8} {registers:4} regs  {moved:32}"
        return f"{head} {self.launch.label}{problems}"


class _Recorder:
    """Stands in for a kernel: ``recorder[grid](...)`` notes the launch and runs nothing."""

    def __init__(self, kernel, launches: dict[Launch, None]):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return self._launch

    def _launch(self, *args, num_warps, **kwargs):
        kernel = self.kernel
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        assert set(named) == set(kernel.arg_names), "launcher and kernel disagree on the arguments"
        signature, constexprs, aligned = [], [], []
        for parameter in kernel.params:
            name, value = parameter.name, named[parameter.name]
            specialised = not (parameter.is_constexpr or parameter.do_not_specialize)
            if parameter.is_constexpr or (specialised and type(value) is int and value == 1):
                signature.append((name, "constexpr"))
                constexprs.append((name, value))
            elif isinstance(value, torch.Tensor):
                # What an unused pointer happens to be bound to makes no difference to the code.
                unused = named.get(ARGUMENT_FLAGS.get(name), True) is False
                signature.append((name, "*u8" if unused else POINTER_TYPES[value.dtype]))
                aligned.append(name)  # PyTorch and XLA allocate at multiples of 256 bytes
            elif isinstance(value, float):
                signature.append((name, "fp32"))
            else:
                signature.append((name, "i32" if -(2**31) <= value < 2**31 else "i64"))
                # PyTorch's launcher would tell the compiler that a vocab is a multiple of 16, but
                # jax-triton does not: wide accesses may not hang on it.
        launch = Launch(
            kernel.__name__, tuple(signature), tuple(constexprs), tuple(aligned), num_warps
        )
        self.launches[launch] = None


@contextlib.contextmanager
def _recording():
    """Replaces the kernels by recorders; yields the launches that they note."""
    noted: dict[Launch, None] = {}
    kernels = {name: getattr(triton_kernels, name) for name in KERNELS}
    for name, kernel in kernels.items():
        setattr(triton_kernels, name, _Recorder(kernel, noted))
    try:
        yield noted
    finally:
        for name, kernel in kernels.items():
            setattr(triton_kernels, name, kernel)


def _call_launchers(tokens, vocab, dtypes, has_labels, has_weights, reduction, normalizer):
    p, q = (torch.zeros(tokens, vocab, dtype=dtype) for dtype in dtypes)
    labels = torch.zeros(tokens, dtype=torch.int64) if has_labels else None
    weights = torch.zeros(tokens) if has_weights else None
    forward = (p, q, labels, weights, normalizer, reduction, -100)
    triton_launch.forward(*forward, keep_codes=False)
    out, codes, divisor, _ = triton_launch.forward(*forward, keep_codes=True)
    wanted = {dtypes, (dtypes[0], None), (None, dtypes[0])}
    for gradient_dtypes in sorted(wanted, key=str):
        triton_launch.backward(
            codes, out, divisor, labels, weights, p.shape, *gradient_dtypes, reduction, -100
        )


def all_launches(arch: int = 90) -> list[Launch]:
    """The launches that differ in what they compile; for sm_90 crossed, else each part once."""
    plain, full = (False, False), (True, True)
    every = tuple(itertools.product((False, True), repeat=2))
    # Labels and weights are scalars of a row, and the dtypes only widen at the load and narrow at
    # the store: every combination is compiled where it is cheap to tell apart, else crossed once.
    cases = [
        (4096, (F32, F32), every, REDUCTIONS[:2]),
        (4096, (F32, F32), (plain, full), REDUCTIONS),
        (4096, (BF16, BF16), (plain, full), REDUCTIONS),
        (4096, (F16, F16), (plain,), REDUCTIONS),
        (4096, (F32, BF16), (plain,), REDUCTIONS),
        (50257, (F32, F32), (full,), REDUCTIONS),
        (50257, (BF16, BF16), (plain,), REDUCTIONS),
        (1, (F32, F32), (plain,), REDUCTIONS[:1]),
    ]
    if arch != 90:  # 2 minutes of compiling each
        cases = [
            (4096, (F32, F32), (full,), REDUCTIONS[::4]),
            (50257, (F32, F32), (full,), REDUCTIONS[:1]),
            (50257, (BF16, BF16), (plain,), REDUCTIONS[::3]),
        ]
    with _recording() as noted:
        for vocab, dtypes, flags, reductions in cases:
            for has, (reduction, normalizer) in itertools.product(flags, reductions):
                _call_launchers(2, vocab, dtypes, *has, reduction, normalizer)
        for dtypes in ((F32, F32), (BF16, BF16)):  # enough tokens for STREAM
            _call_launchers(config.STREAM_TOKENS, 4096, dtypes, False, False, "batchmean", None)
    return list(noted)


def _compile(launch: Launch, arch: int, **options):
    kernel = getattr(triton_kernels, launch.kernel)
    index = {name: i for i, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        dict(launch.signature),
        {(index[name],): value for name, value in launch.constexprs},
        {(index[name],): [["tt.divisibility", 16]] for name in launch.aligned},
    )
    options = {"num_warps": launch.num_warps, **options}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _resources(compiled) -> dict[str, int]:
    """REG, STACK and LOCAL from the cubin, through the cuobjdump in Triton's wheel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


def _accesses(ptx: str) -> collections.Counter:
    """Number of global loads (``ld``) and stores (``st``) by the bytes a thread moves at once."""
    pattern = r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\s"
    counts: collections.Counter = collections.Counter()
    for kind, width, bits in re.findall(pattern, ptx):
        counts[kind, int(width or 1) * int(bits) // 8] += 1
    return counts


def check(launch: Launch, arch: int, **options) -> Record:
    """Compiles one launch and notes what is wrong with the result."""
    compiled = _compile(launch, arch, **options)
    ptx = compiled.asm["ptx"]
    record = Record(launch, arch, _resources(compiled), _accesses(ptx))
    if record.resources["STACK"] or record.resources["LOCAL"] or ".local" in ptx:
        record.problems.append(f"spills or uses local memory: {record.resources}")
    if not dict(launch.constexprs).get("ALIGNED"):
        return record
    moved = {"ld": launch.rows("p_ptr", "q_ptr", "upstream_ptr")}
    moved["st"] = launch.rows("elementwise_ptr", "dp_ptr", "dq_ptr")
    for kind, rows in moved.items():
        wide = record.accesses[kind, 16]
        narrow = sum(n for (k, b), n in record.accesses.items() if k == kind and b < 16)
        # A tile is four unrolled sub-tiles. A row moved in 4-byte pieces takes 16 accesses a
        # tile; what is scalar by nature (label, weight, codes) takes fewer in all.
        if wide < 4 * rows.count("*fp32") or (set(rows) == {"*fp32"} and narrow >= 16):
            record.problems.append(f"rows {rows}: {wide} 16-byte {kind}.global, {narrow} narrower")
    return record


def main() -> int:
    """Compiles everything for one architecture; 1 if there is a problem."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90, help="80, 90, 100")
    parser.add_argument("--plant", choices=("spills", "narrow"), help="show that a problem is seen")
    plant = parser.parse_args().plant
    arch = parser.parse_args().arch
    launches = all_launches(arch)
    if plant == "spills":
        records = [check(launches[0], arch, maxnreg=24)]
    elif plant == "narrow":
        assert launches[0].kernel == KERNELS[0] and "ALIGNED" in launches[0].label
        records = [check(replace(launches[0], aligned=()), arch)]
    else:
        records = [check(launch, arch) for launch in launches]
    for record in records:
        print(record)
    bad = [record for record in records if record.problems]
    most = max(record.resources["REG"] for record in records)
    print(
        f"Triton {triton.__version__}, sm_{arch}: {len(records)} variants of {len(KERNELS)} "
        f"kernels, at most {most} registers, {len(bad)} with problems"
    )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
