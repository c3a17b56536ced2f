"""Calls of the public JAX function whose Pallas kernels are compiled without a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import tvd_jax
from tvd_core import config

TOKENS = 300  # more rows than blocks of the grid
BATCHED_TOKENS = 3


@dataclass(frozen=True)
class Case:
    """One call: shapes, dtypes and options."""

    vocab: int
    p_dtype: str = "float32"
    q_dtype: str = "float32"
    reduction: str = "batchmean"
    labels: bool = False
    weights: bool = False
    normalizer: bool = False
    grad: bool = True
    batch: int = 0  # of arrays of BATCHED_TOKENS tokens, through jax.vmap
    tokens: int = TOKENS

    def __str__(self) -> str:
        options = [n for n in ("labels", "weights", "normalizer", "grad") if getattr(self, n)]
        options += [f"vmap{self.batch}"] if self.batch else []
        options += [f"tokens{self.tokens}"] if self.tokens != TOKENS else []
        return "-".join([str(self.vocab), self.p_dtype, self.q_dtype, self.reduction, *options])

    @property
    def kernels(self) -> set[str]:
        """Names of the kernels that the call must contain."""
        short = self.vocab <= config.PALLAS_SHORT_VOCAB and self.reduction != "none"
        names = {"tvd_forward_short" if short and not self.grad else "tvd_forward"}
        names |= {"tvd_reduce"} if self.reduction not in ("none", "per_token") else set()
        return names | ({"tvd_backward"} if self.grad else set())

    def function(self) -> Callable[..., Any]:
        """The loss, and with ``grad`` also its gradients for a given upstream gradient."""

        def loss(p, q, labels, weights, normalizer):
            return tvd_jax.tvd_loss(
                p,
                q,
                labels,
                reduction=self.reduction,
                weights=weights,
                normalizer=normalizer,
                implementation="pallas",
            )

        def loss_and_gradients(p, q, *rest):
            value, pullback = jax.vjp(lambda p, q: loss(p, q, *rest), p, q)
            return value, pullback(3.0 * jnp.ones_like(value))

        function = loss_and_gradients if self.grad else loss
        return jax.vmap(function) if self.batch else function

    def arguments(self, **struct: Any) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        """Shapes and dtypes to trace with."""

        def array(shape, dtype, wanted=True):
            return jax.ShapeDtypeStruct(shape, dtype, **struct) if wanted else None

        tokens = (self.batch, BATCHED_TOKENS) if self.batch else (self.tokens,)
        rows = (*tokens, self.vocab)
        return (
            array(rows, self.p_dtype),
            array(rows, self.q_dtype),
            array(tokens, "int32", self.labels),
            array(tokens, "float32", self.weights),
            array(tokens[:-1], "float32", self.normalizer),
        )


BF16, F16 = "bfloat16", "float16"
CASES = (
    # Aligned rows, and what can be asked of them.
    Case(4096),
    Case(4096, grad=False),
    Case(4096, labels=True),
    Case(4096, weights=True, reduction="mean"),
    Case(4096, labels=True, weights=True, reduction="sum"),
    Case(4096, labels=True, normalizer=True),
    Case(4096, reduction="per_token", labels=True),
    Case(4096, reduction="none", weights=True),
    Case(4096, reduction="none", grad=False),
    Case(4096, BF16, BF16),
    Case(4096, F16, F16),
    Case(4096, "float32", BF16),
    # Enough tokens for the inputs to leave L2 before the codes.
    Case(4096, tokens=config.STREAM_TOKENS),
    Case(1271, BF16, BF16, tokens=config.STREAM_TOKENS),
    # A partial last tile: aligned, and odd as GPT-2's; less than a tile; less than a warpgroup.
    Case(32000, BF16, BF16),
    Case(151936, BF16, BF16, labels=True),
    Case(50257),
    Case(50257, grad=False),
    Case(50257, BF16, BF16, labels=True),
    Case(50257, F16, "float32"),
    Case(50257, reduction="none", labels=True),
    Case(1271),
    Case(1271, F16, F16, reduction="none"),
    Case(3),
    Case(3, BF16, BF16, weights=True),
    Case(1),
    Case(1, F16, BF16, reduction="none"),
    # Batches: of arrays that start at a multiple of 16 bytes each, and of others.
    Case(4096, labels=True, batch=4),
    Case(50256, batch=4),
    Case(50257, labels=True, batch=4),
    Case(601, BF16, BF16, reduction="none", batch=4),
    Case(601, BF16, BF16, weights=True, grad=False, batch=4),
    # Rows so short that a thread takes one.
    Case(1, grad=False),
    Case(3, BF16, "float32", weights=True, grad=False),
    Case(16, F16, F16, labels=True, grad=False),
    Case(16, reduction="none", grad=False),
)
