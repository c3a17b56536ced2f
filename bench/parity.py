"""Parity of the kernels in the interpreters, for machines without a GPU.

Each route runs in its own process: Triton's interpreter must be chosen before Triton is imported.
Loss and gradients are compared with the float64 oracle, per-token values and sign codes with the
NumPy model of the kernels, bit for bit.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import Unavailable, inputs, results, text
from bench.shapes import Shape
from tvd_core import reference

ROUTES = ("torch-triton", "jax-pallas")
# tokens: powers of two keep 0.5 / tokens exact; vocabularies: two whole tiles, one with a tail.
CASES = (Shape(8, 4096), Shape(4, 1271), Shape(8, 4096, "float32", "text"))
LOSS_TOLERANCE = 1e-6


@dataclass
class Outputs:
    """What a route computed, as NumPy arrays."""

    loss: float
    per_token: np.ndarray
    codes: np.ndarray
    dp: np.ndarray
    dq: np.ndarray


def _torch_triton(p: np.ndarray, q: np.ndarray) -> Outputs:
    import torch

    import tvd_torch
    from tvd_torch.loss import forward_with_codes

    reason = tvd_torch.available_implementations()["triton"]
    if reason is not None:
        raise Unavailable(reason)
    leaves = [torch.from_numpy(x).requires_grad_() for x in (p, q)]
    loss = tvd_torch.tvd_loss(*leaves, implementation="triton")
    dp, dq = torch.autograd.grad(loss, leaves)
    _, per_token, codes = forward_with_codes(*(x.detach() for x in leaves), implementation="triton")
    return Outputs(float(loss.detach()), *(x.numpy() for x in (per_token, codes, dp, dq)))


def _jax_pallas(p: np.ndarray, q: np.ndarray) -> Outputs:
    import jax

    import tvd_jax
    from tvd_jax.compat import interpret_mode
    from tvd_jax.loss import forward_with_codes

    def loss_of(p: Any, q: Any) -> Any:
        return tvd_jax.tvd_loss(p, q, implementation="pallas")

    with interpret_mode(detect_races=False):
        loss, (dp, dq) = jax.value_and_grad(loss_of, argnums=(0, 1))(p, q)
        _, per_token, codes = forward_with_codes(
            jax.numpy.asarray(p), jax.numpy.asarray(q), implementation="pallas"
        )
        return Outputs(float(loss), *(np.asarray(x) for x in (per_token, codes, dp, dq)))


def compare(outputs: Outputs, p: np.ndarray, q: np.ndarray) -> dict[str, Any]:
    """Figures of a route's outputs against the oracle and the model, and whether all are right."""
    vocab = p.shape[-1]
    expected = float(reference.tvd_reference(p, q))
    dp, dq = reference.tvd_reference_grad(p, q)
    error = abs(outputs.loss - expected) / expected
    model = reference.per_token_float32(p, q)
    found = {
        "per_token_bits": np.array_equal(outputs.per_token.view(np.uint32), model.view(np.uint32)),
        "codes_equal": np.array_equal(
            reference.unpack_codes(outputs.codes, vocab), reference.sign_codes(p, q)
        ),
        "gradients_equal": np.array_equal(outputs.dp, dp.astype(np.float32))
        and np.array_equal(outputs.dq, dq.astype(np.float32)),
    }
    right = all(found.values()) and error <= LOSS_TOLERANCE
    return {**found, "loss_relative_error": error, "status": "ok" if right else "wrong"}


def _case_inputs(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    if shape.inputs == "text":
        return text.text_inputs(shape.tokens, shape.vocab)
    return inputs.numpy_inputs(shape.tokens, shape.vocab)


def main(route: str) -> int:
    """Child process: prints one JSON object, the outcome of every case of a route."""
    compute = {"torch-triton": _torch_triton, "jax-pallas": _jax_pallas}[route]
    cases = []
    for shape in CASES:
        p, q = _case_inputs(shape)
        try:
            outcome = compare(compute(p, q), p, q)
        except (ImportError, Unavailable) as error:
            outcome = {"status": "unavailable", "reason": f"{type(error).__name__}: {error}"}
        except Exception as error:
            outcome = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        cases.append({"shape": str(shape), **outcome})
    print(json.dumps({"route": route, "cases": cases}))
    return 0


def interpreters() -> list[dict[str, Any]]:
    """Outcome of every route, each run in its own process with no GPU in sight."""
    outcomes = []
    for route in ROUTES:
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
            "TRITON_INTERPRET": "1" if route == "torch-triton" else "0",
        }
        process = subprocess.run(
            [sys.executable, "-m", "bench.parity", route],
            cwd=results.ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        try:
            outcomes.append(json.loads(process.stdout.splitlines()[-1]))
        except (IndexError, json.JSONDecodeError):
            reason = f"ended with code {process.returncode}: {process.stderr[-500:]}"
            failed = {"shape": "all", "status": "failed", "reason": reason}
            outcomes.append({"route": route, "cases": [failed]})
    return outcomes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
