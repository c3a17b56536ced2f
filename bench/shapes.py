"""The shapes that the bench measures and the tests borrow, each with its reason."""

import re
from dataclasses import dataclass

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
INPUTS = ("random", "text", "logits", "randn")  # randn: --protocol published only
LOSS, LOGITS = OPS = ("tvd_loss", "tvd_from_logits")
PHASES = ("forward", "forward_keep", "backward", "total_upstream_1", "total")


@dataclass(frozen=True)
class Shape:
    """One set of inputs: two ``[tokens, vocab]`` arrays of ``dtype``.

    ``p`` and ``q``, or with inputs "logits" those of the student and of the teacher.
    """

    tokens: int
    vocab: int
    dtype: str = "float32"
    inputs: str = "random"

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.vocab < 1:
            raise ValueError(f"tokens and vocab must be at least 1, got {self}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.inputs not in INPUTS:
            raise ValueError(f"inputs must be one of {', '.join(INPUTS)}, got {self.inputs!r}")

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype]

    @property
    def op(self) -> str:
        """What is measured on these inputs."""
        return LOGITS if self.inputs == "logits" else LOSS

    def __str__(self) -> str:
        suffix = "" if self.inputs == "random" else f":{self.inputs}"
        return f"{self.tokens}x{self.vocab}:{self.dtype}{suffix}"


TABLE_VOCABS = (4096, 8192, 16384, 32768, 65536, 131072)
ODD_VOCABS = (50257, 151936)

# name -> (reason, shapes)
GROUPS: dict[str, tuple[str, tuple[Shape, ...]]] = {
    "table-float32": (
        "the published table (8 sequences of 2048 tokens, float32, powers of two)",
        tuple(Shape(16384, vocab) for vocab in TABLE_VOCABS),
    ),
    "table-bfloat16": (
        "the same in the dtype that models are trained in",
        tuple(Shape(16384, vocab, "bfloat16") for vocab in TABLE_VOCABS),
    ),
    "odd": (
        "vocabularies of real models: 50257 (GPT-2) leaves no row but every eighth 16-byte "
        "aligned; 151936 (Qwen) is aligned but no multiple of a tile",
        tuple(Shape(16384, v, dtype) for dtype in ("float32", "bfloat16") for v in ODD_VOCABS),
    ),
    "small": (
        "few tokens: launch overhead (16) and too few rows to fill a GPU (256)",
        (Shape(16, 4096), Shape(256, 32768)),
    ),
    "text": (
        "real text: peaked rows, ties and exact zeros",
        (Shape(16384, 4096, "float32", "text"),),
    ),
    "logits": (
        "the loss from logits in the dtypes of models, 1 to 4 GB read: rows that fit on one "
        "multiprocessor (32768), on several (131072), or are no multiple of a tile (151936, Qwen)",
        (
            Shape(16384, 32768, "bfloat16", "logits"),
            Shape(8192, 131072, "bfloat16", "logits"),
            Shape(4096, 151936, "bfloat16", "logits"),
            Shape(8192, 32768, "float32", "logits"),
            Shape(4096, 131072, "float32", "logits"),
        ),
    ),
    "cpu": (
        "small enough for two CPU cores: real text, random rows, a vocabulary with a tail",
        (
            Shape(1024, 4096, "float32", "text"),
            Shape(1024, 4096, "bfloat16", "text"),
            Shape(1024, 4096),
            Shape(16, 4096),
            Shape(64, 50257),
        ),
    ),
    "logits-cpu": (
        "the loss from logits on two CPU cores: a model's dtype, and a vocabulary with a tail",
        (Shape(256, 4096, "bfloat16", "logits"), Shape(16, 50257, "float32", "logits")),
    ),
}
# By device and op.
DEFAULT_GROUPS = {
    ("cuda", LOSS): ("table-float32", "table-bfloat16", "odd", "small", "text"),
    ("cuda", LOGITS): ("logits",),
    ("cpu", LOSS): ("cpu",),
    ("cpu", LOGITS): ("logits-cpu",),
}


def parse_shapes(text: str) -> list[Shape]:
    """Shapes of a comma-separated list of group names and ``TOKENSxVOCAB[:dtype[:inputs]]``."""
    shapes: list[Shape] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word in GROUPS:
            shapes.extend(GROUPS[word][1])
            continue
        match = re.fullmatch(r"(\d+)x(\d+)(?::(\w+))?(?::(\w+))?", word)
        if match is None:
            raise ValueError(
                f"shape must be TOKENSxVOCAB[:dtype[:inputs]] or one of {', '.join(GROUPS)}, "
                f"got {word!r}"
            )
        tokens, vocab, dtype, inputs = match.groups()
        shapes.append(Shape(int(tokens), int(vocab), dtype or "float32", inputs or "random"))
    return list(dict.fromkeys(shapes))


def minimum_bytes(shape: Shape, phase: str) -> int:
    """Bytes that this project's design must move in a phase, whoever is measured.

    With N elements of s bytes: the forward reads p and q (2 N s); the forward that keeps the
    residual writes 2 bits per element besides; the backward reads those and writes one gradient
    (N s); the totals are the sum of the last two. From logits the backward reads those of the
    student besides (N s).
    """
    elements = shape.tokens * shape.vocab
    codes = -(-elements // 4)
    read, write = 2 * elements * shape.itemsize, elements * shape.itemsize
    again = elements * shape.itemsize if shape.op == LOGITS else 0
    forward_keep, backward = read + codes, again + codes + write
    return {
        "forward": read,
        "forward_keep": forward_keep,
        "backward": backward,
        "total_upstream_1": forward_keep + backward,
        "total": forward_keep + backward,
    }[phase]
