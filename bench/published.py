"""The protocol of the published record, so that its figures stand beside this GPU's.

It repeats what Liger-Kernel's benchmark script for this op measures, in this project's own code:
``triton.testing.do_bench`` (events around each call, L2 cleared before it), 20/50/80 % quantiles;
modes forward, backward, full; ``p`` is ``randn(requires_grad=True).softmax(-1)``, so not a leaf.

What that mixes in. Its backward runs, besides the loss's own backward: the softmax backward
(reads the probabilities and the gradient, writes one more), and the accumulation into the
``.grad`` of the randn leaf, which nothing clears (reads two, writes one). The full mode holds both
too. Its forward runs with gradients on.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from bench.child import base_row
from bench.shapes import Shape

MODES = ("forward", "backward", "full")
IMPLEMENTATIONS = ("liger", "torch-formula", "torch-triton")
TOKENS = 16384
# One H100, 16384 x 4096, float32, µs: the record as published.
PUBLISHED_US = {
    ("liger", "forward"): 275.7,
    ("liger", "backward"): 850.2,
    ("liger", "full"): 1120.0,
    ("torch-formula", "forward"): 728.8,
    ("torch-formula", "backward"): 1399.0,
    ("torch-formula", "full"): 2126.0,
}
PUBLISHED_GPU = "H100"
PUBLISHED_RATIO = PUBLISHED_US["torch-formula", "forward"] / PUBLISHED_US["liger", "forward"]
NOTE = (
    "Backward and full include the backward of a softmax and the accumulation of the gradient "
    "into its input, because p is randn(requires_grad=True).softmax(-1) and nothing clears the "
    "leaf's gradient. Wall-clock events around each call, so launch gaps count."
)


def _loss(name: str, device: str) -> Any:
    import torch

    from bench.candidates_torch import candidate

    if name == "torch-formula":  # the form that the record measured
        return lambda p, q: torch.sum(torch.abs(p - q) / 2.0) / p.size(0)
    return candidate(name, device)


def _measure(name: str, mode: str, shape: Shape, seed: int) -> dict[str, Any]:
    import torch
    from triton.testing import do_bench

    loss = _loss(name, "cuda")
    torch.manual_seed(seed)
    size = (shape.tokens, shape.vocab)
    p = torch.randn(size, requires_grad=True, device="cuda").softmax(dim=-1)
    q = torch.randn(size, device="cuda").softmax(dim=-1)
    value = loss(p, q)
    _check(value, p, q, shape)
    options: dict[str, Any] = {"rep": 100, "quantiles": [0.5, 0.2, 0.8]}
    if mode == "forward":
        times = do_bench(lambda: loss(p, q), **options)
    elif mode == "backward":
        times = do_bench(lambda: value.backward(retain_graph=True), grad_to_none=[p], **options)
    else:
        times = do_bench(lambda: loss(p, q).backward(retain_graph=True), **options)
    middle, low, high = (ms * 1e3 for ms in times)
    return {
        "wall_us": middle,
        "quantiles": {"wall_us": {"q20": low, "q50": middle, "q80": high}},
        "clock": "triton.testing.do_bench",
    }


def _check(value: Any, p: Any, q: Any, shape: Shape) -> None:
    """The loss, and the gradient of p in the first and last row, against float64."""
    import torch

    from bench.oracle import PEER_LOSS_TOLERANCE, Wrong

    step = max(1, (1 << 26) // shape.vocab)
    with torch.no_grad():
        parts = [
            (p[i : i + step].double() - q[i : i + step].double()).abs().sum()
            for i in range(0, shape.tokens, step)
        ]
    expected = float(sum(parts)) / 2 / shape.tokens
    if not abs(float(value.detach()) - expected) <= PEER_LOSS_TOLERANCE["float32"] * expected:
        raise Wrong(f"loss {float(value.detach())!r}, expected {expected!r}")
    (gradient,) = torch.autograd.grad(value, p, retain_graph=True)
    ends = [0, shape.tokens - 1]
    scale = 0.5 / shape.tokens
    if not torch.allclose(
        gradient[ends], scale * torch.sign(p[ends] - q[ends]).detach(), rtol=1e-6, atol=0
    ):
        raise Wrong("gradient of the first or last row is not the oracle's")


def main(spec_path: str) -> int:
    """Child process: runs the jobs of a spec file as ``bench.child`` does."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(event: str, **values: Any) -> None:
        events.write(json.dumps({"event": event, **values}) + "\n")
        events.flush()

    spec = json.loads(Path(spec_path).read_text())
    try:
        import torch
        import triton.testing  # noqa: F401

        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no CUDA GPU")
    except Exception as error:
        emit("unavailable", reason=f"{type(error).__name__}: {error}")
        return 0
    from bench.child import _status

    emit("environment", values={"published_us": _published_list(), "published_note": NOTE})
    for number, job in enumerate(spec["jobs"]):
        emit("start", job=number)
        shape = Shape(**job["shape"])
        for mode in job["phases"]:
            # Its modes move other bytes than this project's phases: no floor.
            row = base_row(job["implementation"], mode, shape) | {"bytes": None}
            try:
                row |= _measure(job["implementation"], mode, shape, spec["seed"])
            except Exception as error:
                row["status"], row["reason"] = _status(error)
            emit("row", row=row)
            torch.cuda.empty_cache()
        emit("done", job=number)
    return 0


def _published_list() -> list[dict[str, Any]]:
    return [
        {"implementation": name, "phase": mode, "gpu": PUBLISHED_GPU, "wall_us": us}
        for (name, mode), us in PUBLISHED_US.items()
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
