"""Arrays that are spread over devices: by ``jax.shard_map``, or by the sharding in their type.

Inside ``jax.shard_map`` a loss sees its device's shard. What it needs of the others are sums over
mesh axes, a few numbers a token: over ``axis_name`` of a row's parts, over ``token_axis_name`` of
the tokens' values. They are ``lax.psum``, outside of the kernels' derivative rules, so that JAX
transposes them itself: right with ``check_vma`` on and off.

An array on a mesh of explicit axes says in its type how it is spread; a loss of it is
``jax.shard_map`` over these axes.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from tvd_core.contract import NORMALIZED_REDUCTIONS

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


def reduce_tokens(
    per_token: jax.Array,
    row_weights: jax.Array | None,
    normalizer: jax.Array | float | None,
    reduction: str,
    vocab: int,
    axes: Axes,
    total: Callable[[jax.Array], jax.Array],
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
    return value / jnp.where(nothing, jnp.ones_like(divisor), divisor)


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
