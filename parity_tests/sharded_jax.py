"""Sharded calls of the JAX package on 8 devices, held against the float64 oracle.

``python -m parity_tests.sharded_jax`` runs every case and prints one JSON line for each: its name
and what went wrong, or null. A process of its own, because the number of devices is fixed when JAX
starts. A case runs a loss as a route does, with its inputs spread over a mesh, so the checks and
their budgets are those of one device.
"""

import contextlib
import functools
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tvd_jax
from parity_tests import inputs, jnp_kernels, logits_oracle, oracle
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


def gathered(hlo: str) -> list[int]:
    """Elements that each all-gather of a compiled program gives."""
    found = []
    for line in hlo.splitlines():
        results, is_gather, _ = line.partition(" all-gather")
        if is_gather and "=" in results:
            shapes = re.findall(r"\[([0-9,]*)\]", results.split("=", 1)[1])
            found += [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]
    return found


def check_not_gathered(hlo: str) -> None:
    """No device gets more of the others than three numbers a token."""
    assert all(size <= 3 * TOKENS < TOKENS * VOCAB // 8 for size in gathered(hlo)), gathered(hlo)


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
            upstream = jnp.asarray(np.asarray(upstream, np.float32))
            step = jax.jit(self.step(rest, specs, wrt))
            with self.running():
                compiled = step.lower(placed, upstream).compile()
            self.hlo = compiled.as_text()
            loss, gradients = compiled(placed, upstream)
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

    @contextlib.contextmanager
    def running(self, **options: Any) -> Iterator[None]:
        """On a CPU the kernels' rules run with what the kernels compute, in jax.numpy."""
        with jnp_kernels.in_place_of_pallas() if self.is_kernel else contextlib.nullcontext():
            yield


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


def check_every_spec(how: str, spec: Any, implementation: str = "xla") -> None:
    """Labels, weights and a divisor; the default reduction and one value a token."""
    route = ShardedRoute(how, spec, implementation)
    weights = inputs.weights_for(TOKENS)
    oracle.check(route, **distributions(), weights=weights, upstream=1 / 3)
    check_not_gathered(route.hlo)
    if how != "inside":
        oracle.check(route, **distributions(), reduction="per_token")
    s, t = logits(TOKENS, VOCAB)
    labels = inputs.labels_for(TOKENS) % 64
    logits_oracle.check(route, s, t, labels, temperature=2.0, weights=weights, upstream=-2.0)


def check_kernels_are_partitioned(spec: Any) -> None:
    """The rules of the kernels, in plain jit: values, gradients, and nothing gathered."""
    route = ShardedRoute("auto", spec, "pallas")
    weights = inputs.weights_for(TOKENS)
    oracle.check(route, **distributions(), weights=weights, upstream=1 / 3)
    check_not_gathered(route.hlo)
    oracle.check(route, **distributions(), reduction="per_token")
    s, t = logits(TOKENS, VOCAB)
    labels = inputs.labels_for(TOKENS) % 64
    logits_oracle.check(route, s, t, labels, temperature=2.0, weights=weights, upstream=-2.0)
    check_not_gathered(route.hlo)


for _spec in SPECS[:-1]:
    CASES[f"kernels {spell(_spec)}"] = functools.partial(check_kernels_are_partitioned, _spec)

for _how in ("shard_map", "unchecked", "inside", "auto", "explicit"):
    for _spec in SPECS:
        if _how == "explicit" or _spec is not REPLICATED:
            CASES[f"{_how} {spell(_spec)}"] = functools.partial(check_every_spec, _how, _spec)
        if (_spec is BOTH and _how != "auto") or (_how == "shard_map" and _spec is not REPLICATED):
            CASES[f"{_how} kernels {spell(_spec)}"] = functools.partial(
                check_every_spec, _how, _spec, "pallas"
            )


@case("reductions")
def _() -> None:
    """Every reduction over both axes, and the divisor of a caller."""
    route = ShardedRoute("shard_map", BOTH)
    rows = inputs.rows(TOKENS, VOCAB)
    labels, weights = inputs.labels_for(TOKENS), inputs.weights_for(TOKENS)
    for options in (
        {"reduction": "sum"},
        {"reduction": "mean", "weights": weights},
        {"reduction": "none", "weights": weights},
        {"reduction": "mean", "normalizer": 37.0},
    ):
        oracle.check(route, *rows, labels, **options)
        if options["reduction"] != "none":
            s, t = logits(TOKENS, VOCAB)
            logits_oracle.check(route, s, t, labels, **options)


@case("shards without a kept token")
def _() -> None:
    """One shard's tokens are ignored, then all; NaN in them stays out, NaN in a kept row shows."""
    p, q = inputs.rows(TOKENS, VOCAB)
    s, t = logits(TOKENS, VOCAB)
    for how in ("shard_map", "unchecked", "explicit"):
        route = ShardedRoute(how, BOTH)
        labels = np.ones(TOKENS, np.int32)
        labels[: TOKENS // 4] = -100
        p_nan, s_nan = p.copy(), s.copy()
        p_nan[0, 3] = s_nan[1, 40] = np.nan
        oracle.check(route, p_nan, q, labels)
        logits_oracle.check(route, s_nan, t, labels)
        nothing = np.full(TOKENS, -100, np.int32)
        for result in (
            oracle.check(route, p_nan, q, nothing),
            logits_oracle.check(route, s_nan, t, nothing),
        ):
            assert result.loss == 0 and not result.dp.any() and not result.dq.any()
        p_nan[5, 63] = np.nan
        result = oracle.check(route, p_nan, q, labels)
        assert np.isnan(result.loss) and np.isnan(result.dp).sum() == 1
        s_nan[5, 63] = np.nan
        result = route.run(s_nan, t, labels, function="tvd_from_logits")
        assert np.isnan(result.loss) and np.isnan(result.dp[5]).all()
        assert np.isfinite(np.delete(result.dp, 5, 0)).all()


@case("losses made of the rows")
def _() -> None:
    """The relatives, their statistics too, against one device; labels of other shards' logits."""
    check_losses_made_of_the_rows("xla")


@case("kernels: losses made of the rows")
def _() -> None:
    with jnp_kernels.in_place_of_pallas():
        check_losses_made_of_the_rows("pallas")


def check_losses_made_of_the_rows(implementation: str) -> None:
    s, t = (jnp.asarray(x) for x in logits(TOKENS, VOCAB, masked=0.0))
    labels = jnp.asarray(inputs.labels_for(TOKENS) % VOCAB).at[1].set(VOCAB).at[2].set(-100)
    for name in ("acceptance_loss", "hybrid_loss", "cross_entropy_tvd_loss", "tvd_from_logits"):
        options = {"reduction": "per_token", "temperature": 0.5}
        options |= {"return_stats": True} if name == "tvd_from_logits" else {}
        options["implementation"] = implementation

        def of(s: Any, t: Any, name: str = name, options: Any = options, **axes: Any) -> Any:
            def total(s: Any, t: Any, labels: Any) -> Any:
                return getattr(tvd_jax, name)(s, t, labels, **options, **axes)

            return total

        def both(loss: Any) -> Any:
            def total(s: Any, t: Any) -> Any:
                values = jax.tree.leaves(loss(s, t, labels))
                return sum(jnp.nansum(x * x) for x in values), values

            return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(s, t)

        expected = both(of(s, t))
        axes = {"axis_name": "v", "token_axis_name": "t"}
        for check_vma in (True, False):
            sharded = jax.shard_map(
                of(s, t, **axes),
                mesh=make_mesh(),
                in_specs=(BOTH, BOTH, P("t")),
                out_specs=P("t"),
                check_vma=check_vma,
            )
            for one, two in zip(
                jax.tree.leaves(expected), jax.tree.leaves(both(sharded)), strict=True
            ):
                np.testing.assert_allclose(one, two, rtol=2e-5, atol=2e-6)


@case("gradient of a jitted shard_map")
def _() -> None:
    """Derivative rules are traced after the mesh axes lost their names there."""
    s, t = (jnp.asarray(x) for x in logits(TOKENS, VOCAB, masked=0.0))
    labels = jnp.asarray(inputs.labels_for(TOKENS) % VOCAB)
    axes = {"axis_name": "v", "token_axis_name": "t"}

    def call(implementation: str, **axes: Any) -> Callable[..., Any]:
        def of(s: Any, t: Any, labels: Any) -> Any:
            loss = tvd_jax.cross_entropy_tvd_loss
            return loss(s, t, labels, implementation=implementation, **axes)

        return of

    right = jax.grad(call("xla"))(s, t, labels)
    over = functools.partial(jax.shard_map, in_specs=(BOTH, BOTH, P("t")), out_specs=P())
    for implementation in ("xla", "pallas"):
        for check_vma in (True, False):
            sharded = over(call(implementation, **axes), mesh=make_mesh(), check_vma=check_vma)
            with jnp_kernels.in_place_of_pallas():
                found = jax.grad(jax.jit(sharded))(s, t, labels)
            np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-7)


@case("batch and sequence")
def _() -> None:
    """Leading axes that are both spread: flattened on each device, never before."""
    mesh = make_mesh()
    p, q = (x.reshape(4, 4, VOCAB) for x in inputs.rows(16, VOCAB))
    s, t = (x.reshape(4, 4, VOCAB) for x in logits(16, VOCAB))
    for how in ("xla", "pallas"):
        for name, one, two in (("tvd_loss", p, q), ("tvd_from_logits", s, t)):
            route = ShardedRoute("auto", P("t", "v", None), how)
            check = oracle.check if name == "tvd_loss" else logits_oracle.check
            check(route, one, two, inputs.labels_for(16).reshape(4, 4) % VOCAB)
            check_not_gathered(route.hlo)
    assert mesh.size == 8


@case("the check for gathers can fail")
def _() -> None:
    mesh = make_mesh()
    struct = jax.ShapeDtypeStruct((TOKENS, VOCAB), "float32", sharding=NamedSharding(mesh, BOTH))
    whole = NamedSharding(mesh, REPLICATED)
    hlo = jax.jit(lambda x: x + 1, out_shardings=whole).lower(struct).compile().as_text()
    assert max(gathered(hlo)) >= TOKENS * VOCAB // 4, hlo


@case("transforms of partitioned kernels")
def _() -> None:
    """vmap over any axes, its gradient, checkpoint, second derivatives, donation, on shards."""
    p, q = (x.reshape(4, TOKENS, VOCAB) for x in inputs.rows(4 * TOKENS, VOCAB))
    s, t = (x.reshape(4, TOKENS, VOCAB) for x in logits(4 * TOKENS, VOCAB, masked=0.0))
    labels = inputs.labels_for(TOKENS) % VOCAB
    mesh = make_mesh()

    def check(run: Callable[[str], Any]) -> None:
        with jnp_kernels.in_place_of_pallas():
            ours = run("pallas")
        for one, two in zip(jax.tree.leaves(ours), jax.tree.leaves(run("xla")), strict=True):
            np.testing.assert_allclose(one, two, rtol=2e-5, atol=2e-6)

    def spread(x: Any, *spec: Any) -> Any:
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    for name, one, two in (("tvd_loss", p, q), ("tvd_from_logits", s, t)):
        loss = getattr(tvd_jax, name)
        for in_axes in ((1, None), (0, 2)):
            moved = [
                spread(x[0] if axis is None else np.moveaxis(x, 0, axis), None, "v")
                for x, axis in zip((one, two), in_axes, strict=True)
            ]

            def batched(
                implementation: str, loss: Any = loss, in_axes: Any = in_axes, moved: Any = moved
            ) -> Any:
                def of(p: Any, q: Any) -> Any:
                    return loss(p, q, labels, implementation=implementation)

                step = jax.vmap(jax.value_and_grad(of, (0, 1)), in_axes)

                def total(p: Any, q: Any) -> Any:
                    return (jax.vmap(of, in_axes)(p, q) ** 2).sum()

                return jax.jit(step)(*moved), jax.jit(jax.grad(total))(*moved)

            check(batched)

        def saved(implementation: str, loss: Any = loss, one: Any = one, two: Any = two) -> Any:
            def of(p: Any, q: Any) -> Any:
                return loss(2 * p, q, labels, implementation=implementation)

            step = jax.value_and_grad(jax.checkpoint(of), (0, 1))
            arrays = (spread(x[0], "t", "v") for x in (one, two))
            return jax.jit(step, donate_argnums=(0, 1))(*arrays)

        check(saved)

    def second(implementation: str) -> Any:
        def of(p: Any) -> Any:
            return tvd_jax.tvd_loss(p, q[0], implementation=implementation) ** 2

        p0 = spread(p[0], "t")
        return jax.jit(jax.grad(lambda p: jnp.vdot(jax.grad(of)(p), q[0])))(p0)

    check(second)


@case("axes that are not there")
def _() -> None:
    p, q = inputs.rows(TOKENS, VOCAB)
    over = functools.partial(jax.shard_map, mesh=make_mesh(), in_specs=BOTH, out_specs=P())

    def raises(error: type, words: str, function: Any = tvd_jax.tvd_loss, **options: Any) -> None:
        def call(p: Any, q: Any) -> Any:
            return function(p, q, **options)

        try:
            jax.eval_shape(over(call), p, q)
        except error as found:
            assert words in str(found), found
        else:
            raise AssertionError(f"{options} raised nothing")

    for function in (tvd_jax.tvd_loss, tvd_jax.tvd_from_logits):
        raises(ValueError, "axis_name 'x' is no mesh axis here", function, axis_name="x")
        raises(TypeError, "got 3", function, token_axis_name=3)
        raises(ValueError, "must not share", function, axis_name=("v", "t"), token_axis_name="t")
        raises(ValueError, "must not name a mesh axis twice", function, axis_name=("v", "v"))
    try:
        tvd_jax.tvd_loss(p, q, axis_name="v")
    except ValueError as found:
        assert "inside jax.shard_map" in str(found)
    with jax.set_mesh(make_mesh(AxisType.Explicit)):
        moved = (jax.sharding.reshard(jnp.asarray(x), s) for x, s in ((p, BOTH), (q, TOKENS_ONLY)))
        try:
            tvd_jax.tvd_loss(*moved)
        except ValueError as found:
            assert "q must be sharded as p" in str(found), found
        else:
            raise AssertionError("p and q are spread differently")


def main() -> None:
    """Runs the cases whose name contains the first argument."""
    jax.config.update("jax_default_matmul_precision", "highest")
    # LLVM's optimizations took a third of the time; partitioning comes before them.
    jax.config.update("jax_disable_most_optimizations", True)
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
