"""Sharded calls of the JAX package on 8 devices, held against the float64 oracle.

``python -m parity_tests.sharded_jax`` runs every case and prints one JSON line for each: its name
and what went wrong, or null. A process of its own, because the number of devices is fixed when JAX
starts. A case runs a loss as a route does, with its inputs spread over a mesh, so the checks and
their budgets are those of one device.
"""

import contextlib
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from parity_tests import inputs, logits_oracle, oracle
from parity_tests.logits_budget import logits
from parity_tests.routes import JaxRoute, Result

TOKENS, VOCAB = 16, 64
# Over tokens, over the vocab, over both, over two axes at once, and not at all.
TOKENS_ONLY, VOCAB_ONLY, BOTH = P("t", None), P(None, "v"), P("t", "v")
TOKENS_TWICE, VOCAB_TWICE = P(("t", "v"), None), P(None, ("t", "v"))
REPLICATED = P(None, None)
SPECS = (TOKENS_ONLY, VOCAB_ONLY, BOTH, TOKENS_TWICE, VOCAB_TWICE, REPLICATED)


def make_mesh(axis_type: Any = AxisType.Auto, shape: tuple[int, ...] = (4, 2)) -> Any:
    return jax.make_mesh(shape, ("t", "v"), axis_types=(axis_type,) * 2)


def _names(entry: Any) -> Any:
    return entry if isinstance(entry, tuple) else None if entry is None else (entry,)


class ShardedRoute(JaxRoute):
    """The route of one implementation, on inputs that are spread over a mesh.

    ``how``: ``"shard_map"``, the same with ``"unchecked"`` types, with the gradient taken
    ``"inside"`` of it, ``"auto"`` for plain jit, or ``"explicit"`` axes.
    """

    def __init__(
        self, how: str, spec: Any, implementation: str = "xla", shape: tuple[int, ...] = (4, 2)
    ) -> None:
        super().__init__(implementation)
        self.how, self.spec = how, spec
        self.mesh = make_mesh(AxisType.Explicit if how == "explicit" else AxisType.Auto, shape)

    def run(
        self,
        p: np.ndarray,
        q: np.ndarray,
        labels: np.ndarray | None = None,
        *,
        upstream: Any = 1.0,
        wrt: str = "pq",
        layout: Any = None,
        **options: Any,
    ) -> Result:
        arrays = {"p": p, "q": q, "labels": labels}
        arrays |= {k: v for k, v in options.items() if isinstance(v, np.ndarray)}
        arrays = {k: v for k, v in arrays.items() if v is not None}
        specs = {k: self.spec_of(v) for k, v in arrays.items()}
        rest = {k: v for k, v in options.items() if k not in arrays}
        context = jax.set_mesh(self.mesh) if self.how == "explicit" else contextlib.nullcontext()
        with context:
            placed = {
                k: jax.device_put(v, NamedSharding(self.mesh, specs[k])) for k, v in arrays.items()
            }
            step = jax.jit(self.step(rest, specs, wrt))
            loss, gradients = step(placed, jnp.asarray(np.asarray(upstream, np.float32)))
        for name, gradient in gradients.items():
            expected = NamedSharding(self.mesh, specs[name])
            assert gradient.sharding.is_equivalent_to(expected, gradient.ndim), gradient.sharding
        dp, dq = (np.asarray(gradients[n]) if n in gradients else None for n in "pq")
        return Result(np.asarray(loss), dp, dq)

    def spec_of(self, x: np.ndarray) -> P:
        return P(*self.spec[: x.ndim])

    def step(self, rest: dict[str, Any], specs: dict[str, P], wrt: str) -> Callable[..., Any]:
        def call(arrays: dict[str, Any]) -> Any:
            options = dict(arrays)
            p, q = options.pop("p"), options.pop("q")
            return self.call(p, q, options.pop("labels", None), **options, **self.axes(), **rest)

        reduction = rest.get("reduction", "batchmean")
        out = {"none": self.spec, "per_token": P(*self.spec[:-1])}.get(reduction, P())

        def gradients(f: Callable[..., Any], arrays: Any, upstream: Any) -> Any:
            def of(*wanted: Any) -> Any:
                return f({**arrays, **dict(zip(wrt, wanted, strict=True))})

            loss, vjp = jax.vjp(of, *(arrays[n] for n in wrt))
            along = (jnp.ones_like(loss) * upstream).astype(loss.dtype)
            return loss, dict(zip(wrt, vjp(along), strict=True))

        if self.how in ("auto", "explicit"):
            return functools.partial(gradients, call)
        over = functools.partial(jax.shard_map, mesh=self.mesh, check_vma=self.how != "unchecked")
        if self.how == "inside":
            whole = (out, {n: specs[n] for n in wrt})
            inside = functools.partial(gradients, call)
            return over(inside, in_specs=(specs, P()), out_specs=whole)
        return functools.partial(gradients, over(call, in_specs=(specs,), out_specs=out))

    def axes(self) -> dict[str, Any]:
        if self.how in ("auto", "explicit"):
            return {}
        tokens = sum((_names(e) or () for e in self.spec[:-1]), ())
        vocab = _names(self.spec[-1])
        # One axis by its name, several as a tuple.
        named = {"axis_name": vocab, "token_axis_name": tokens or None}
        return {k: v[0] if v and len(v) == 1 else v for k, v in named.items()}


# --- cases ---------------------------------------------------------------------------------------

CASES: dict[str, Callable[[], None]] = {}


def case(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(function: Callable[[], None]) -> Callable[[], None]:
        CASES[name] = function
        return function

    return add


def spell(spec: Any) -> str:
    return ",".join("x".join(_names(e) or ("-",)) for e in spec)


def distributions(**options: Any) -> dict[str, Any]:
    p, q = inputs.rows(TOKENS, VOCAB, **options)
    return {"p": p, "q": q, "labels": inputs.labels_for(TOKENS)}


def check_every_spec(how: str, spec: Any) -> None:
    """Labels, weights and a divisor; the default reduction and one value a token."""
    route = ShardedRoute(how, spec)
    weights = inputs.weights_for(TOKENS)
    oracle.check(route, **distributions(), weights=weights, upstream=1 / 3)
    if how != "inside":
        oracle.check(route, **distributions(), reduction="per_token")
    s, t = logits(TOKENS, VOCAB)
    labels = inputs.labels_for(TOKENS) % 64
    logits_oracle.check(route, s, t, labels, temperature=2.0, weights=weights, upstream=-2.0)


for _how in ("shard_map", "unchecked", "inside", "auto", "explicit"):
    for _spec in SPECS:
        if _how == "explicit" or _spec is not REPLICATED:
            CASES[f"{_how} {spell(_spec)}"] = functools.partial(check_every_spec, _how, _spec)


def main() -> None:
    """Runs the cases whose name contains the first argument."""
    jax.config.update("jax_default_matmul_precision", "highest")
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, run in CASES.items():
        if part in name:
            try:
                run()
                problem = None
            except Exception:
                problem = traceback.format_exc(limit=-6)
            print(json.dumps([name, problem]), flush=True)


if __name__ == "__main__":
    main()
