"""JAX: inputs, candidates and phases. Imported in JAX's own child process only."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bench import Unavailable, inputs, timing
from bench.shapes import LOGITS, LOSS, Shape

LossFn = Callable[[Array, Array], Array]


def formula(p: Array, q: Array) -> Array:
    """What a user writes without a library."""
    return 0.5 * jnp.abs(p - q).sum(-1).mean()


def logits_formula(student: Array, teacher: Array) -> Array:
    """What a user writes without a library, from logits."""
    return formula(*(jax.nn.softmax(x.astype(jnp.float32), -1) for x in (student, teacher)))


def candidate(name: str, op: str = LOSS) -> LossFn:
    """Loss ``(p, q) -> scalar`` (batchmean) of an implementation; raises Unavailable."""
    if name == "jax-formula":
        return logits_formula if op == LOGITS else formula
    import tvd_jax

    implementation = name.removeprefix("jax-")
    reason = tvd_jax.available_implementations()[implementation]
    if reason is not None:
        raise Unavailable(reason)
    function = getattr(tvd_jax, op)
    return lambda p, q: function(p, q, implementation=implementation)


class MosaicCupti:
    """Fallback reader: the kernel times (no copies or fills) of Mosaic GPU's profiler."""

    name = "mosaic_gpu.profiler"

    def __init__(self) -> None:
        from jax._src.lib import mosaic_gpu

        self._extension = mosaic_gpu._mosaic_gpu_ext

    def begin(self) -> None:
        self._extension._cupti_init()

    def end(self) -> list[timing.Activity]:
        timings = self._extension._cupti_get_timings(False) or []
        return [timing.Activity(name, i, ms * 1e6) for i, (name, ms) in enumerate(timings)]


class Backend:
    """What the child process asks of a framework."""

    framework = "jax"

    def __init__(self, device: str) -> None:
        if device == "cuda" and jax.default_backend() != "gpu":
            raise Unavailable(f"JAX runs on {jax.default_backend()}, not on a GPU")
        self.device = device
        self._flush_buffer: Array | None = None

    def environment(self) -> dict[str, Any]:
        return {"jax_platform": jax.devices()[0].platform}

    # --- inputs ---

    def make_inputs(self, shape: Shape, seed: int) -> tuple[Array, Array]:
        if shape.op == LOGITS:
            spreads = inputs.STUDENT_NOISE, inputs.TEACHER_SPREAD
            tables = [jnp.asarray(inputs.logit_table(spread)) for spread in spreads]
            offsets = [np.uint32(inputs.seed_of(seed, which)) for which in "pq"]
            return _logits(tables, offsets, shape.tokens, shape.vocab, shape.dtype)
        table = jnp.asarray(inputs.weight_table())
        made = []
        for which in "pq":
            offset = np.uint32(inputs.seed_of(seed, which))
            sums = _row_sums(table, offset, shape.tokens, shape.vocab)
            scale = jnp.asarray(inputs.reciprocal(np.asarray(sums)))
            made.append(_scaled(table, offset, scale, shape.tokens, shape.vocab, shape.dtype))
        return made[0], made[1]

    def from_numpy(self, x: np.ndarray, dtype: str) -> Array:
        return jnp.asarray(x).astype(dtype)

    def checksum(self, x: Array) -> int:
        return int(_checksum(x))

    # --- oracle ---

    def oracle_per_token(self, p: Array, q: Array, op: str = LOSS) -> np.ndarray:
        """float64 values of the tokens."""
        with _x64():
            return np.asarray(_per_token64(p, q, op))

    def rows(self, x: Array, index: np.ndarray) -> np.ndarray:
        return np.asarray(x[jnp.asarray(index)].astype(jnp.float32)).astype(np.float64)

    def scalar(self, loss: Array) -> float:
        return float(loss)

    # --- candidates ---

    def candidate(self, name: str, op: str = LOSS) -> LossFn:
        return candidate(name, op)

    def phase(
        self, name: str, loss: LossFn, p: Array, q: Array, upstream: float
    ) -> Callable[[], tuple[Array | None, Array | None]]:
        """The call to time: returns ``(loss or None, gradient of p or None)``.

        Each phase is one jitted function. The upstream gradient is a run-time argument, so that
        XLA cannot fold it into the kernel.
        """
        forward_keep, gradient = _split(loss, p, q)

        def both(p: Array, q: Array, ct: Array) -> tuple[Array, Array]:
            value, vjp = jax.vjp(lambda p: loss(p, q), p)
            return value, vjp(ct)[0]

        ct = jnp.full((), upstream, jax.eval_shape(loss, p, q).dtype)
        match name:
            case "forward":
                function, arguments = jax.jit(loss), (p, q)
                call = lambda: (function(p, q), None)  # noqa: E731
            case "forward_keep":
                function, arguments = forward_keep, (p, q)
                call = lambda: forward_keep(p, q)  # noqa: E731
            case "backward":
                _, made = forward_keep(p, q)
                function, arguments = gradient, (made, p, q, ct)
                call = lambda: (None, gradient(made, p, q, ct))  # noqa: E731
            case "total_upstream_1":
                function, arguments = jax.jit(jax.value_and_grad(loss)), (p, q)
                call = lambda: function(p, q)  # noqa: E731
            case "total":
                function, arguments = jax.jit(both), (p, q, ct)
                call = lambda: function(p, q, ct)  # noqa: E731
        call.jitted = (function, arguments)  # type: ignore[attr-defined]
        return call

    def sync(self, result: Any) -> None:
        jax.block_until_ready(result)

    def flush(self) -> Array:
        if self._flush_buffer is None:
            self._flush_buffer = jnp.ones(timing.FLUSH_BYTES // 4, jnp.int32)
        return _sum(self._flush_buffer)

    def kept_bytes(self, loss: LossFn, p: Array, q: Array) -> int:
        """Bytes of the residual's arrays that are not p or q."""
        _, made = _split(loss, p, q)[0](p, q)
        return sum(leaf.nbytes for leaf in made)

    def peak_bytes(self, call: Callable[[], Any], p: Array, q: Array) -> int | None:
        """Temporaries and outputs of the compiled call, plus p and q."""
        function, arguments = call.jitted  # type: ignore[attr-defined]
        analysis = function.lower(*arguments).compile().memory_analysis()
        if analysis is None:
            return None
        own = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
        return own - analysis.alias_size_in_bytes + p.nbytes + q.nbytes

    # --- clock ---

    def reader_makers(self) -> list[Callable[[], timing.Reader]]:
        return [timing.Cupti, MosaicCupti]

    def copy_call(self, size: int) -> Callable[[], Any]:
        source = jnp.ones(size // 4, jnp.float32)
        return lambda: _negative(source)

    def copy_event_us(self, call: Callable[[], Any]) -> float | None:
        return None

    def release(self) -> None:
        jax.clear_caches()

    def broken(self) -> bool:
        try:
            jax.block_until_ready(_negative(jnp.ones(8)))
            return False
        except Exception:
            return True


def _split(loss: LossFn, p: Array, q: Array) -> tuple[Callable, Callable]:
    """Jitted ``forward(p, q) -> (loss, made)`` and ``backward(made, p, q, upstream) -> dp``.

    ``made`` are the residual's arrays other than p and q: a jitted function that returned those
    would copy them, which no user's ``value_and_grad`` does.
    """

    def keep(p: Array, q: Array) -> tuple[Array, Any]:
        return jax.vjp(lambda p: loss(p, q), p)

    closed, shapes = jax.make_jaxpr(keep, return_shape=True)(p, q)
    structure = jax.tree.structure(shapes[1])
    inputs_ = closed.jaxpr.invars
    sources = [
        next((i for i, x in enumerate(inputs_) if x is out), None) for out in closed.jaxpr.outvars
    ][1:]

    @jax.jit
    def forward(p: Array, q: Array) -> tuple[Array, list[Array]]:
        value, vjp = keep(p, q)
        leaves = jax.tree.leaves(vjp)
        return value, [x for x, source in zip(leaves, sources, strict=True) if source is None]

    @jax.jit
    def backward(made: list[Array], p: Array, q: Array, ct: Array) -> Array:
        remaining = iter(made)
        leaves = [next(remaining) if source is None else (p, q)[source] for source in sources]
        return jax.tree.unflatten(structure, leaves)(ct)[0]

    return forward, backward


def _x64() -> Any:
    """Context that enables float64; it moved in JAX 0.8."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64()


@partial(jax.jit, static_argnums=2)
def _per_token64(p: Array, q: Array, op: str) -> Array:
    pair = p.astype(jnp.float64), q.astype(jnp.float64)
    if op == LOGITS:
        pair = jax.nn.softmax(pair[0], -1), jax.nn.softmax(pair[1], -1)
    return 0.5 * jnp.abs(pair[0] - pair[1]).sum(-1)


@jax.jit
def _negative(x: Array) -> Array:
    """Moves as many bytes as a copy; XLA drops a copy that changes nothing."""
    return -x


@jax.jit
def _sum(x: Array) -> Array:
    return x.sum()


def _hash32(x: Array) -> Array:
    """``inputs.hash32``."""
    x = (x ^ (x >> 16)) * jnp.uint32(inputs.MULTIPLIERS[0])
    x = (x ^ (x >> 15)) * jnp.uint32(inputs.MULTIPLIERS[1])
    return x ^ (x >> 16)


def _index(tokens: int, vocab: int) -> Array:
    """Flat index of the elements modulo 2^32."""
    row = lax.broadcasted_iota(jnp.uint32, (tokens, vocab), 0)
    return row * jnp.uint32(vocab) + lax.broadcasted_iota(jnp.uint32, (tokens, vocab), 1)


def _entries(table: Array, offset: Array, tokens: int, vocab: int) -> Array:
    hashed = _hash32(_index(tokens, vocab) + jnp.asarray(offset, jnp.uint32))
    index = (hashed >> (32 - inputs.TABLE_BITS)).astype(jnp.int32)
    return table.at[index].get(mode="promise_in_bounds")


@partial(jax.jit, static_argnums=(2, 3))
def _row_sums(table: Array, offset: Array, tokens: int, vocab: int) -> Array:
    return _entries(table, offset, tokens, vocab).astype(jnp.uint32).sum(-1, dtype=jnp.uint32)


@partial(jax.jit, static_argnums=(3, 4, 5))
def _scaled(
    table: Array, offset: Array, scale: Array, tokens: int, vocab: int, dtype: str
) -> Array:
    weights = _entries(table, offset, tokens, vocab).astype(jnp.float32)
    return (weights * scale[:, None]).astype(dtype)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _logits(
    tables: list[Array], offsets: list[Array], tokens: int, vocab: int, dtype: str
) -> tuple[Array, Array]:
    noise, teacher = (
        _entries(table, offset, tokens, vocab)
        for table, offset in zip(tables, offsets, strict=True)
    )
    return (teacher + noise).astype(dtype), teacher.astype(dtype)


@jax.jit
def _checksum(x: Array) -> Array:
    integer = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, integer).astype(jnp.uint32)
    return (bits * (2 * _index(*x.shape) + 1)).sum(dtype=jnp.uint32)
