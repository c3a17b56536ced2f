"""Arrays that are spread over devices: by ``jax.shard_map``, or by the sharding in their type.

Inside ``jax.shard_map`` a loss sees its device's shard. What it needs of the others are sums over
mesh axes, a few numbers a token: over ``axis_name`` of a row's parts, over ``token_axis_name`` of
the tokens' values. They are ``lax.psum``, outside of the kernels' derivative rules, so that JAX
transposes them itself: right with ``check_vma`` on, and with it off where the ``shard_map`` is
differentiated from outside, see docs/composability.md.

In plain ``jax.jit`` XLA spreads the computation itself, but knows nothing of a kernel: it would
gather its inputs on every device. ``call_by_rows`` tells it to run the kernel on each shard.

An array on a mesh of explicit axes says in its type how it is spread; a loss of it is
``jax.shard_map`` over these axes.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tvd_core.contract import NORMALIZED_REDUCTIONS
from tvd_jax import compat

AxisName = str | tuple[str, ...]


class Axes(NamedTuple):
    """Mesh axes over which the vocab and the tokens are spread; empty where they are not."""

    vocab: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.vocab or self.tokens)

    def vocab_size(self, local: int) -> int:
        """The number of elements of a whole row."""
        return local * size_of(self.vocab)


NOT_SPREAD = Axes()


def size_of(axes: tuple[str, ...]) -> int:
    """Number of devices along mesh axes."""
    return math.prod(lax.axis_size(axis) for axis in axes)


def check_axes(axis_name: Any, token_axis_name: Any) -> Axes:
    """The axes that a caller named; raises unless they are axes of the ``shard_map`` around it."""
    axes = Axes(_names("axis_name", axis_name), _names("token_axis_name", token_axis_name))
    both = sorted(set(axes.vocab) & set(axes.tokens))
    if both:
        raise ValueError(
            f"axis_name and token_axis_name must not share a mesh axis, both have {both[0]!r}"
        )
    return axes


def _names(argument: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    names = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{argument} must be the name of a mesh axis or a tuple of them, got {value!r}"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"{argument} must not name a mesh axis twice, got {value!r}")
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"{argument} {name!r} is no mesh axis here: call the loss inside jax.shard_map "
                "over a mesh with that axis"
            ) from None
    return names


def psum(x: Any, axes: tuple[str, ...]) -> Any:
    """``lax.psum``; ``x`` as it is where nothing is spread."""
    return lax.psum(x, axes) if axes else x


def pmax(x: Any, axes: tuple[str, ...]) -> Any:
    """``lax.pmax``; ``x`` as it is where nothing is spread."""
    return lax.pmax(x, axes) if axes else x


def shard_number(axes: tuple[str, ...]) -> Any:
    """Number of this device's shard along mesh axes, the first axis major as in ``P((a, b))``."""
    return lax.axis_index(axes) if axes else jnp.int32(0)


def local_positions(positions: jax.Array, size: int, axes: tuple[str, ...]) -> jax.Array:
    """Positions in whole rows as those in this shard of ``size`` columns, -1 for others.

    Not for a derivative rule: JAX may trace it where the mesh axes have no names any more.
    """
    here = positions - shard_number(axes).astype(positions.dtype) * size
    return jnp.where((here >= 0) & (here < size), here, -1)


def reduce_tokens(
    per_token: jax.Array,
    row_weights: jax.Array | None,
    normalizer: jax.Array | float | None,
    reduction: str,
    vocab: int,
    axes: Axes,
    total: Callable[[jax.Array], jax.Array],
    divide: Callable[[jax.Array, jax.Array], jax.Array] = operator.truediv,
) -> jax.Array:
    """What the reduction makes of values that have their weights already; any but ``none``.

    Args:
        per_token: values of this device's tokens, each of a whole row, times the weights.
        row_weights: weights of this device's tokens, or ``None``.
        normalizer: divisor in place of the weights' sum over all devices.
        reduction: any but ``none``.
        vocab: elements of a whole row.
        axes: over which the tokens are spread.
        total: sums the values of this device.
        divide: divides the sum.
    """
    if reduction == "per_token":
        return per_token
    value = psum(total(per_token), axes.tokens)
    if reduction not in NORMALIZED_REDUCTIONS:
        return value
    if normalizer is not None:
        divisor = jnp.asarray(normalizer, value.dtype)
    elif row_weights is not None:
        divisor = psum(total(row_weights), axes.tokens)
    else:
        divisor = jnp.asarray(per_token.size * size_of(axes.tokens), value.dtype)
    if reduction == "mean":
        divisor = divisor * vocab
    # 0 / 0 counts as 0, as in one process: no token is kept anywhere.
    nothing = (value == 0) & (divisor == 0)
    return divide(value, jnp.where(nothing, jnp.ones_like(divisor), divisor))


# --- explicit axes -------------------------------------------------------------------------------


def explicit_spec(x: Any) -> tuple[Any, ...] | None:
    """How its type says that ``x`` is spread; ``None`` unless it is on a mesh of explicit axes.

    One entry a dimension: ``None``, the name of an axis, or a tuple of names.
    """
    if not isinstance(x, jax.Array):
        return None
    sharding = jax.typeof(x).sharding
    mesh = sharding.mesh
    if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return None
    return tuple(sharding.spec) + (None,) * (x.ndim - len(sharding.spec))


def _axes_of(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def axes_of_spec(spec: tuple[Any, ...]) -> Axes:
    """The axes of a spec of ``[..., vocab]``."""
    return Axes(_axes_of(spec[-1]), sum((_axes_of(entry) for entry in spec[:-1]), ()))


def check_same_spec(names: tuple[str, str], arrays: tuple[Any, Any], spec: tuple[Any, ...]) -> None:
    """Raises unless the second array is spread as the first."""
    other = explicit_spec(arrays[1])
    if other != spec:
        raise ValueError(
            f"{names[1]} must be sharded as {names[0]} {PartitionSpec(*spec)}, got "
            f"{PartitionSpec(*(other or ()))}: use jax.sharding.reshard"
        )


def over_explicit_axes(
    function: Callable[..., Any], arguments: list[tuple[Any, PartitionSpec]], out_specs: Any
) -> Any:
    """``function`` of each device's shards, by ``jax.shard_map``.

    Args:
        function: takes the arguments' shards, and does the sums over the axes itself.
        arguments: each with its spec, to which it is moved; a number or ``None`` stays as it is.
        out_specs: of the results.
    """
    arrays = [(x, spec) for x, spec in arguments if isinstance(x, (jax.Array, np.ndarray))]
    moved = [jax.sharding.reshard(x, spec) for x, spec in arrays]

    def local(*shards: Any) -> Any:
        rest = iter(shards)
        values = (next(rest) if isinstance(x, (jax.Array, np.ndarray)) else x for x, _ in arguments)
        return function(*values)

    in_specs = tuple(spec for _, spec in arrays)
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs)(*moved)


# --- automatic partitioning ----------------------------------------------------------------------


def partitioned() -> bool:
    """Whether XLA may be about to spread what is traced now over several devices.

    Not in Pallas's interpreter, whose effects a partitioning rule cannot hold.
    """
    return jax.device_count() > 1 and not compat.interpreting()


class _Call(NamedTuple):
    """A kernel that takes and gives arrays of rows: ``[..., *leading, ...]``."""

    function: Callable[..., Any]
    """Of arrays with one axis of tokens in place of the leading ones; a tuple of arrays."""
    starts: tuple[int, ...]
    """Where the leading axes start, for each argument."""
    out_starts: tuple[int, ...]
    """The same for each result."""
    leading: int
    """Number of leading axes."""

    def flat(self, *arrays: Any) -> tuple[Any, ...]:
        shape = arrays[0].shape[self.starts[0] : self.starts[0] + self.leading]
        tokens = math.prod(shape)

        def one_axis(x: Any, start: int) -> Any:
            return x.reshape(*x.shape[:start], tokens, *x.shape[start + self.leading :])

        results = self.function(*(one_axis(*x) for x in zip(arrays, self.starts, strict=True)))
        return tuple(
            x.reshape(*x.shape[:start], *shape, *x.shape[start + 1 :])
            for x, start in zip(results, self.out_starts, strict=True)
        )

    def over_tokens(self, *arrays: Any) -> tuple[Any, ...]:
        """``flat`` with a rule for XLA: spread over the tokens, rows whole."""
        rule, sizes = self._rule(arrays, jax.eval_shape(self.flat, *arrays))
        call = custom_partitioning(self.flat)
        call.def_partition(
            partition=self._partition,
            infer_sharding_from_operands=lambda mesh, args, out: self._shardings(
                mesh, self._token_spec(mesh, args), self.out_starts
            ),
            sharding_rule=rule,
            **sizes,
        )
        return call(*arrays)

    def _rule(self, arrays: Any, results: Any) -> tuple[str, dict[str, int]]:
        """How the axes of arguments and results belong together, for XLA, and sizes of factors.

        The leading ones are the same. Rows of logits or probabilities, and rows of their codes,
        differ in length, and are to be spread alike all the same: the factor "shared" of both.
        """
        tokens = [f"t{i}" for i in range(self.leading)]
        listed = [
            *zip(arrays, self.starts, strict=True),
            *zip(results, self.out_starts, strict=True),
        ]
        lengths = {x.shape[-1] for x, start in listed if start == 0 and x.ndim > self.leading}
        shared = math.gcd(*lengths)
        sizes = {f"rest{n}": n // shared for n in lengths if n > shared} | {"shared": shared}

        def row(n: int) -> str:
            return "shared" if n == shared else f"(shared rest{n})"

        def axes(x: Any, start: int) -> str:
            before = [f"values{n}" for n in x.shape[:start]]
            return " ".join([*before, *tokens, *(row(n) for n in x.shape[start + self.leading :])])

        names = [axes(x, start) for x, start in listed]
        rule = f"{', '.join(names[: len(arrays)])} -> {', '.join(names[len(arrays) :])}"
        # Sizes are given of the factors that are no whole axis.
        in_parts = any("(" in name for name in names)
        if shared in lengths or not in_parts:
            del sizes["shared"]
        return rule, sizes

    def _spec(self, mesh: Any, arguments: Any) -> list[tuple[str, ...]]:
        """How the argument that is spread most is spread, of those with the shape of the first."""
        dims = len(arguments[0].shape)
        specs = [
            [_axes_of(e) for e in x.sharding.spec] + [()] * (dims - len(x.sharding.spec))
            for x in arguments
            if len(x.shape) == dims
        ]
        return max(specs, key=lambda spec: math.prod(mesh.shape[a] for a in sum(spec, ())))

    def _token_spec(self, mesh: Any, arguments: Any) -> tuple[Any, ...]:
        """How the leading axes are spread on the way through the kernel.

        Rows that are spread go from all to all: each device gets some whole ones.
        """
        most, shape = self._spec(mesh, arguments), arguments[0].shape
        spec = most[: self.leading]
        for axis in sum(most[self.leading :], ()):
            for i in range(self.leading - 1, -1, -1):
                shards = math.prod(mesh.shape[a] for a in (*spec[i], axis))
                if shape[i] % shards == 0:
                    spec[i] = (*spec[i], axis)
                    break
        return tuple(entry or None for entry in spec)

    def _shardings(
        self, mesh: Any, spec: tuple[Any, ...], starts: tuple[int, ...]
    ) -> tuple[Any, ...]:
        return tuple(
            NamedSharding(mesh, PartitionSpec(*(None,) * start, *spec)) for start in starts
        )

    def _partition(self, mesh: Any, arguments: Any, results: Any) -> Any:
        spec, whole = self._spec(mesh, arguments), self._token_spec(mesh, arguments)
        changed = [i for i in range(self.leading) if whole[i] != (spec[i] or None)]
        axes = sum(spec[self.leading :], ())
        if len(changed) == 1 and _axes_of(whole[changed[0]]) == (*spec[changed[0]], *axes):
            return self._exchanged(mesh, spec, whole, changed[0], arguments, results)
        out, given = (self._shardings(mesh, whole, x) for x in (self.out_starts, self.starts))
        return mesh, self.flat, out, given

    def _exchanged(
        self, mesh: Any, spec: Any, whole: Any, at: int, arguments: Any, results: Any
    ) -> Any:
        """The rule for parts of rows. XLA itself would gather them where an axis is idle."""
        axes = sum(spec[self.leading :], ())
        shards = math.prod(mesh.shape[axis] for axis in axes)
        in_parts = PartitionSpec(*(entry or None for entry in spec[: self.leading]), axes)

        def is_row(x: Any, start: int) -> bool:
            return start == 0 and len(x.shape) > self.leading and x.shape[-1] % shards == 0

        rows, out_rows = (
            [is_row(*x) for x in zip(xs, starts, strict=True)]
            for xs, starts in ((arguments, self.starts), (results, self.out_starts))
        )

        def shardings(are_rows: list[bool], starts: tuple[int, ...]) -> tuple[Any, ...]:
            others = self._shardings(mesh, whole, starts)
            parts = NamedSharding(mesh, in_parts)
            return tuple(parts if r else x for r, x in zip(are_rows, others, strict=True))

        def on_device(*arrays: Any) -> tuple[Any, ...]:
            last = self.leading
            arrays = tuple(
                lax.all_to_all(x, axes, at, last, tiled=True) if r else x
                for x, r in zip(arrays, rows, strict=True)
            )
            return tuple(
                lax.all_to_all(x, axes, last, at, tiled=True) if r else x
                for x, r in zip(self.flat(*arrays), out_rows, strict=True)
            )

        return mesh, on_device, shardings(out_rows, self.out_starts), shardings(rows, self.starts)

    def run(self, *arrays: Any) -> tuple[Any, ...]:
        """The call, whose batch under ``vmap`` is one more leading axis."""

        @jax.custom_batching.custom_vmap
        def call(*arrays: Any) -> tuple[Any, ...]:
            return (self.over_tokens if self.leading and partitioned() else self.flat)(*arrays)

        @call.def_vmap
        def _(size: int, batched: Any, *arrays: Any) -> tuple[Any, Any]:
            def leading(x: Any, is_batched: bool, start: int) -> Any:
                x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
                return jnp.moveaxis(x, 0, start)

            moved = [leading(*x) for x in zip(arrays, batched, self.starts, strict=True)]
            results = self._replace(leading=self.leading + 1).run(*moved)
            results = tuple(
                jnp.moveaxis(x, start, 0) for x, start in zip(results, self.out_starts, strict=True)
            )
            return results, tuple(True for _ in results)

        return call(*arrays)


def call_by_rows(
    function: Callable[..., tuple[Any, ...]],
    leading: int,
    arguments: list[tuple[Any, int]],
    out_starts: tuple[int, ...],
) -> tuple[Any, ...]:
    """Calls a kernel on arrays of rows: on each shard of the tokens, and on a batch at once.

    Args:
        function: takes arrays with one axis of tokens, or ``None``; gives a tuple of such arrays.
        leading: number of the leading axes that become the axis of tokens.
        arguments: each array, or ``None``, and where its leading axes start. The first of them,
            which is none of ``None``, is of the shape of most.
        out_starts: where the leading axes of each result start.
    """
    given = [(x, start) for x, start in arguments if x is not None]

    def of_given(*arrays: Any) -> tuple[Any, ...]:
        rest = iter(arrays)
        return function(*(None if x is None else next(rest) for x, _ in arguments))

    call = _Call(of_given, tuple(start for _, start in given), out_starts, leading)
    return call.run(*(x for x, _ in given))


def call_total(function: Callable[[Any], Any], values: Any) -> Any:
    """The sum of ``values [..., tokens]``, of which ``function`` adds those of one device.

    Under ``vmap`` one sum after the other.
    """

    def flat(values: Any) -> Any:
        return function(values.reshape(-1)).reshape(1)

    if not partitioned() or values.ndim == 0:
        return jax.custom_batching.sequential_vmap(flat)(values)[0]

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        sharding = arguments[0].sharding
        axes = sum((_axes_of(entry) for entry in sharding.spec), ())
        everywhere = NamedSharding(mesh, PartitionSpec(None))
        return mesh, lambda x: psum(flat(x), axes), everywhere, (sharding,)

    call = custom_partitioning(flat)
    factors = [f"t{i}" for i in range(values.ndim)]
    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, args, out: NamedSharding(
            mesh, PartitionSpec(None)
        ),
        sharding_rule=f"{' '.join(factors)} -> one",
        reduction_factors=tuple(factors),
    )
    return jax.custom_batching.sequential_vmap(call)(values)[0]
