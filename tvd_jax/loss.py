"""Total variation distance loss for JAX: the public function and its derivative rules."""

import dataclasses
import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from tvd_core.contract import (
    KERNEL_DTYPES,
    KERNEL_VOCAB,
    PALLAS_CAPABILITY,
    PALLAS_GENERATIONS,
    REDUCTIONS,
    TRITON_CAPABILITY,
    as_number,
    capability_message,
    check_implementation,
    check_inputs,
    constant_message,
    dtype_name,
    install_words,
    kernel_dtype_message,
    kernel_vocab_message,
    no_gpu_message,
    not_installed_message,
    shared_memory_message,
)
from tvd_jax import compat, pallas_ptx, sharded, triton_launch, xla

IMPLEMENTATIONS = ("pallas", "triton", "xla")
ARRAY_TYPES = (jax.Array, np.ndarray)
_CAPABILITY = {"pallas": PALLAS_CAPABILITY, "triton": TRITON_CAPABILITY}


def available_implementations() -> dict[str, str | None]:
    """Implementations by name: ``None`` if this machine can run it, else the reason and remedy."""
    return {name: _unavailable_reason(name) for name in IMPLEMENTATIONS}


def _unavailable_reason(implementation: str) -> str | None:
    if implementation == "xla" or compat.assuming_cuda():
        return None
    if implementation == "pallas" and compat.interpreting():
        return None
    capability = compat.gpu_compute_capability()
    needed = _CAPABILITY[implementation]
    if capability is None:  # before what is not installed, which would not help
        more = ",jax-triton" if implementation == "triton" else ""
        install = install_words(f"cuda12{more}", f"cuda13{more}")
        return no_gpu_message(f"implementation 'xla', or on a machine with one {install}")
    others = _others(implementation, capability)
    if capability < needed:
        return capability_message(needed, capability, others)
    if implementation == "triton":
        package = triton_launch.missing_package()
        return package and not_installed_message(package, "jax-triton", others)
    if capability[0] not in PALLAS_GENERATIONS:
        return shared_memory_message(capability, others)
    if not pallas_ptx.importable():
        return (
            f"JAX {jax.__version__} has other names for what the kernels' PTX is written with: "
            f"use {others}"
        )
    return None


def _others(implementation: str, capability: tuple[int, int]) -> str:
    """What can take an implementation's place on a GPU, if what it needs is installed."""
    triton = implementation != "triton" and capability >= TRITON_CAPABILITY
    return "implementation 'triton' or 'xla'" if triton else "implementation 'xla'"


def _platform(*arrays: Any) -> str:
    """Platform that the arrays are on, or that a traced computation is for by default."""
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            return str(next(iter(array.devices())).platform)
    device = jax.config.jax_default_device
    if device is not None:
        return device if isinstance(device, str) else str(device.platform)
    return jax.default_backend()


def choose_implementation(
    p: Any, q: Any, implementation: str | None, names: tuple[str, str] = ("p", "q")
) -> str:
    """Resolves ``None`` by hardware; fails for a named one that these inputs cannot use."""
    check_implementation(implementation, IMPLEMENTATIONS)
    on_gpu = _platform(p, q) in ("gpu", "cuda")
    in_kernel_dtypes = all(dtype_name(x) in KERNEL_DTYPES for x in (p, q))
    if implementation is None:
        if not (on_gpu and in_kernel_dtypes and p.shape[-1] <= KERNEL_VOCAB):
            return "xla"
        large = _too_large_for_pallas(p, q)
        usable = (x for x in IMPLEMENTATIONS if not (x == "pallas" and large))
        return next(name for name in usable if _unavailable_reason(name) is None)
    if implementation == "xla":
        return implementation
    reason = _unavailable_reason(implementation)
    if reason is not None:
        raise ValueError(f"implementation {implementation!r} cannot run: {reason}")
    if not in_kernel_dtypes:
        name, x = (names[0], p) if dtype_name(p) not in KERNEL_DTYPES else (names[1], q)
        raise TypeError(kernel_dtype_message(implementation, name, dtype_name(x), "xla"))
    if p.shape[-1] > KERNEL_VOCAB:
        raise ValueError(kernel_vocab_message(implementation, p.shape[-1], "xla"))
    if implementation == "pallas" and _too_large_for_pallas(p, q):
        raise ValueError(
            f"implementation 'pallas' takes no {names[0]} of 2**31 elements or more in rows of "
            f"2**25 or more that are not a multiple of 16 bytes, got shape {tuple(p.shape)}: use "
            "implementation 'triton' or 'xla'"
        )
    interpreted = implementation == "pallas" and compat.interpreting()
    if not (on_gpu or interpreted or compat.assuming_cuda()):
        raise ValueError(
            f"implementation {implementation!r} needs arrays on a CUDA GPU, got {names[0]} on "
            f"{_platform(p, q)}: move them there or use implementation 'xla'"
        )
    return implementation


def _too_large_for_pallas(p: Any, q: Any) -> bool:
    if math.prod(p.shape) < 2**31:
        return False
    from tvd_jax import pallas_kernels

    return pallas_kernels.too_large(p.shape, (p.dtype, q.dtype))


def _device_of(array: Any) -> str | None:
    """The one device that an array is committed to, as far as it is known."""
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return None
    devices = array.devices()
    return str(next(iter(devices))) if array.committed and len(devices) == 1 else None


def check_arrays(
    p: Any,
    q: Any,
    labels: Any,
    weights: Any,
    normalizer: Any,
    reduction: str,
    ignore_index: int,
    names: tuple[str, str] = ("p", "q"),
    reductions: tuple[str, ...] = REDUCTIONS,
) -> None:
    """Raises for inputs that the contract excludes."""
    check_inputs(
        p,
        q,
        labels,
        weights,
        normalizer,
        reduction=reduction,
        ignore_index=ignore_index,
        array_type=ARRAY_TYPES,
        device_of=_device_of,
        names=names,
        reductions=reductions,
    )


def kept_weights(
    labels: Any, weights: jax.Array | None, ignore_index: int, dtype: Any
) -> jax.Array | None:
    """Weight of each token with 0 for the ignored ones; ``None`` if every token counts 1."""
    if weights is not None:
        weights = jnp.asarray(weights).astype(dtype)
    if labels is None:
        return weights
    # A label dtype that cannot hold ignore_index must not wrap it around: uint8 has no -100.
    limits = np.iinfo(labels.dtype)
    if isinstance(labels, np.ndarray):
        # Compared before JAX narrows 64-bit labels to 32 bits.
        kept = jnp.asarray(labels != ignore_index)
    elif limits.min <= ignore_index <= limits.max:
        kept = jnp.asarray(labels) != jnp.asarray(ignore_index, labels.dtype)
    else:
        kept = jnp.ones(labels.shape, bool)
    return kept.astype(dtype) if weights is None else jnp.where(kept, weights, 0)


def tvd_loss(
    p: jax.Array,
    q: jax.Array,
    labels: jax.Array | None = None,
    *,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: jax.Array | None = None,
    normalizer: jax.Array | float | None = None,
    axis_name: sharded.AxisName | None = None,
    token_axis_name: sharded.AxisName | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Total variation distance between two distributions per token, reduced over the tokens.

    ``tvd_t = 0.5 * sum_v |p[t, v] - q[t, v]|``, and for ``batchmean``
    ``loss = sum_t weights[t] * tvd_t / sum_t weights[t]`` over the tokens that are kept.

    With distributions the value lies in [0, 1], and 1 - TVD is the acceptance rate of speculative
    sampling. Inputs are not checked to sum to 1. The gradient is
    ``dL/dp = 0.5 * sign(p - q) * scale`` and ``dL/dq = -dL/dp``, with sign(0) = 0 and
    sign(NaN) = NaN.

    Args:
        p: ``[..., vocab]`` probabilities; float32, bfloat16 or float16 (float64: XLA only).
        q: probabilities with the shape of ``p``; its dtype may differ.
        labels: integers with the leading shape of ``p``. A token whose label is ``ignore_index``
            contributes exactly 0 to the loss and gradients, whatever its rows hold; other values
            are not used. ``None`` keeps every token.
        reduction: ``"batchmean"``, ``"sum"``, ``"mean"``, ``"none"`` or ``"per_token"``.
        ignore_index: the label that marks an ignored token.
        weights: weight of each token, floats with the leading shape of ``p``; a constant. A
            weight of 0 ignores the token.
        normalizer: divisor of ``batchmean`` and ``mean`` in place of the kept weights' sum: a
            positive number (Python's or NumPy's, in float32's range for every dtype of ``p``) or a
            0-d array; a constant. For gradient accumulation and data-parallel training, where the
            count of all the batch's tokens divides.
        axis_name: inside ``jax.shard_map``, the mesh axis (or a tuple of them) over which the vocab
            is spread: ``p`` and ``q`` are this device's equal part of every row. The values, and
            the gradients of the parts, are those of the whole rows; a sum a token is exchanged.
        token_axis_name: inside ``jax.shard_map``, the mesh axis (or a tuple) over which the tokens
            are spread: the loss and its divisor are summed over it.
        implementation: ``"pallas"`` (Mosaic GPU, Hopper and newer), ``"triton"`` (the kernels of
            the PyTorch package through jax-triton, Ampere and newer), ``"xla"``, or ``None`` to
            pick by device. A named one is used or the call fails.

    Returns:
        float32 (float64 if an input is). ``batchmean`` is 0-d, sum over kept tokens / sum of kept
        weights, 0 if none is kept. ``sum``: 0-d. ``mean``: 0-d, ``batchmean / vocab`` as
        ``torch.nn.KLDivLoss`` defines its mean. ``per_token``: the leading shape. ``none``: the
        shape of ``p``, ``0.5 * |p - q|`` times the weights.

    Raises:
        ValueError: a shape, device, reduction, normalizer, axis or implementation does not fit.
        TypeError: something is not an array, or has the wrong dtype.

    Source: Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation",
    ACL 2023; Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
    ICML 2023 (acceptance rate).
    """
    check_arrays(p, q, labels, weights, normalizer, reduction, ignore_index)
    axes = sharded.check_axes(axis_name, token_axis_name)
    chosen = choose_implementation(p, q, implementation)
    p, q = jnp.asarray(p), jnp.asarray(q)
    weights = as_constant("weights", weights)
    normalizer = as_constant("normalizer", as_number(normalizer))
    dtype = xla.accumulation_dtype(p, q)
    row_weights = kept_weights(labels, weights, int(ignore_index), dtype)
    spec = None if axes else sharded.explicit_spec(p)
    if spec is None:
        return _loss(p, q, row_weights, normalizer, reduction, chosen, axes)

    def of_shards(p: Any, q: Any, row_weights: Any, normalizer: Any) -> jax.Array:
        spread = sharded.axes_of_spec(spec)
        return _loss(p, q, row_weights, normalizer, reduction, chosen, spread)

    sharded.check_same_spec(("p", "q"), (p, q), spec)
    rows, tokens = PartitionSpec(*spec), PartitionSpec(*spec[:-1])
    arguments = [(p, rows), (q, rows), (row_weights, tokens), (normalizer, PartitionSpec())]
    out = {"none": rows, "per_token": tokens}.get(reduction, PartitionSpec())
    return sharded.over_explicit_axes(of_shards, arguments, out)


def _loss(
    p: jax.Array,
    q: jax.Array,
    row_weights: jax.Array | None,
    normalizer: jax.Array | float | None,
    reduction: str,
    implementation: str,
    axes: sharded.Axes,
) -> jax.Array:
    """``tvd_loss`` of checked arrays, or of this device's part of them."""
    vocab = p.shape[-1]
    if implementation == "xla" or p.size == 0:
        return xla.loss(p, q, row_weights, normalizer, reduction, axes)
    if (axes or sharded.partitioned()) and reduction != "none":
        from tvd_jax import logits_rows

        per_token = _kernel_loss(p, q, row_weights, None, "per_token", implementation)
        return sharded.reduce_tokens(
            sharded.psum(per_token, axes.vocab),
            row_weights,
            normalizer,
            reduction,
            axes.vocab_size(vocab),
            axes,
            functools.partial(logits_rows.total, implementation=implementation),
            logits_rows.divide,
        )
    if normalizer is not None:
        normalizer = jnp.asarray(normalizer, jnp.float32)
    return _kernel_loss(p, q, row_weights, normalizer, reduction, implementation)


# --- constants -----------------------------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constant(name: str, x: jax.Array) -> jax.Array:
    """The identity, and an error where its derivative is asked for: never a silent 0."""
    return x


@functools.partial(_constant.defjvp, symbolic_zeros=True)
def _constant_jvp(name: str, primals: Any, tangents: Any) -> Any:
    (x,), (tangent,) = primals, tangents
    if not isinstance(tangent, SymbolicZero):
        raise ValueError(constant_message(name))
    return x, tangent


def as_constant(name: str, x: Any) -> Any:
    """``x``, and an error where its derivative is asked for, if it is an array of floats."""
    if not isinstance(x, ARRAY_TYPES) or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return _constant(name, jnp.asarray(x))


# --- kernels -------------------------------------------------------------------------------------


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """What the backward has to know besides arrays: the dtypes of the gradients it returns."""

    p: Any
    q: Any
    vocab: int


def _kernels(implementation: str) -> Any:
    module = {"pallas": "pallas_kernels", "triton": "triton_launch"}[implementation]
    return importlib.import_module(f"tvd_jax.{module}")


def _run_forward(
    p: jax.Array,
    q: jax.Array,
    row_weights: jax.Array | None,
    normalizer: jax.Array | None,
    reduction: str,
    implementation: str,
    keep_codes: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array]:
    """Result of the reduction, codes, divisor, per-token values (and what fills them up)."""
    kernels = _kernels(implementation)
    leading, vocab = p.shape[:-1], p.shape[-1]
    tokens = math.prod(leading)
    elementwise, summed = reduction == "none", reduction not in ("none", "per_token")
    forward = functools.partial(
        kernels.forward, keep_codes=keep_codes, elementwise=elementwise, summed=summed
    )
    if not summed:
        given = [(p, 0), (q, 0), (row_weights, 0)]
        results = list(
            sharded.call_by_rows(
                lambda *arrays: tuple(x for x in forward(*arrays) if x is not None),
                len(leading),
                given,
                (0,) * (1 + keep_codes + elementwise),
            )
        )
        per_token = results.pop(0)
        codes = results.pop(0) if keep_codes else None
        return results[0] if elementwise else per_token, codes, None, per_token
    p, q = (x.reshape(tokens, vocab) for x in (p, q))
    row_weights = None if row_weights is None else row_weights.reshape(tokens)
    reduce = functools.partial(kernels.reduce, reduction=reduction, tokens=tokens, vocab=vocab)
    if not kernels.vmappable(p.shape, (p.dtype, q.dtype)):
        forward, reduce = _sequential_vmap(forward), _sequential_vmap(reduce)
    per_token, codes, _ = forward(p, q, row_weights)
    loss, divisor = reduce(per_token, row_weights, normalizer)
    if codes is not None:
        codes = codes.reshape(*leading, codes.shape[-1])
    return loss, codes, divisor, per_token


def _sequential_vmap(function: Any) -> Any:
    return jax.custom_batching.sequential_vmap(function)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _kernel_loss(
    p: jax.Array,
    q: jax.Array,
    row_weights: jax.Array | None,
    normalizer: jax.Array | None,
    reduction: str,
    implementation: str,
) -> jax.Array:
    """The kernels under autodiff: keeps the 2-bit sign codes, and nothing of p and q."""
    return _run_forward(p, q, row_weights, normalizer, reduction, implementation, False)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _kernel_loss_and_codes(
    p: jax.Array,
    q: jax.Array,
    row_weights: jax.Array | None,
    normalizer: jax.Array | None,
    reduction: str,
    implementation: str,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Result, codes and divisor. Has a derivative itself, for derivatives of higher order."""
    result, codes, divisor, _ = _run_forward(
        p, q, row_weights, normalizer, reduction, implementation, True
    )
    assert codes is not None
    return result, codes, divisor


def _forward_rule(
    p: Any, q: Any, row_weights: Any, normalizer: Any, reduction: str, implementation: str
) -> tuple[Any, Any]:
    values = [None if x is None else x.value for x in (p, q, row_weights, normalizer)]
    outputs = _kernel_loss_and_codes(*values, reduction, implementation)
    dtypes = [x.value.dtype if x.perturbed else None for x in (p, q)]
    _, codes, divisor = outputs
    return outputs, (codes, divisor, values[2], _Wanted(dtypes[0], dtypes[1], p.value.shape[-1]))


def _backward_rule(reduction: str, implementation: str, residuals: Any, upstream: Any) -> Any:
    codes, divisor, row_weights, wanted = residuals
    if isinstance(upstream, SymbolicZero):
        return None, None, None, None
    dp, dq = _kernel_gradient(codes, upstream, divisor, row_weights, wanted, implementation)
    return dp, dq, None, None


def _kernel_loss_fwd(*args: Any) -> tuple[Any, Any]:
    (result, _, _), residuals = _forward_rule(*args)
    return result, residuals


def _kernel_loss_and_codes_bwd(
    reduction: str, implementation: str, residuals: Any, upstreams: Any
) -> Any:
    return _backward_rule(reduction, implementation, residuals, upstreams[0])


_kernel_loss.defvjp(_kernel_loss_fwd, _backward_rule, symbolic_zeros=True)
_kernel_loss_and_codes.defvjp(_forward_rule, _kernel_loss_and_codes_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _kernel_gradient(
    codes: jax.Array,
    upstream: jax.Array,
    divisor: jax.Array | None,
    row_weights: jax.Array | None,
    wanted: _Wanted,
    implementation: str,
) -> list[jax.Array | None]:
    """The backward kernel under autodiff: linear in the upstream gradient."""
    kernels = _kernels(implementation)
    leading, vocab = codes.shape[:-1], wanted.vocab
    upstream = upstream.astype(jnp.float32)
    backward = functools.partial(kernels.backward, vocab=vocab, dtypes=(wanted.p, wanted.q))
    there = [dtype is not None for dtype in (wanted.p, wanted.q)]
    if divisor is None:  # of each token, or of each element

        def present(codes: Any, upstream: Any, row_weights: Any) -> tuple[Any, ...]:
            found = backward(codes, upstream, None, row_weights)
            return tuple(x for x in found if x is not None)

        arguments = [(codes, 0), (upstream, 0), (row_weights, 0)]
        found = sharded.call_by_rows(present, len(leading), arguments, (0,) * sum(there))
        rest = iter(found)
        return [next(rest) if is_there else None for is_there in there]
    if not kernels.vmappable(upstream.shape, (jnp.float32,)):
        backward = _sequential_vmap(backward)
    codes = codes.reshape(-1, codes.shape[-1])
    row_weights = None if row_weights is None else row_weights.reshape(-1)
    gradients = backward(codes, upstream, divisor, row_weights)
    return [None if x is None else x.reshape(*leading, vocab) for x in gradients]


def _kernel_gradient_fwd(
    codes: Any, upstream: Any, divisor: Any, row_weights: Any, wanted: _Wanted, implementation: str
) -> Any:
    gradients = _kernel_gradient(codes, upstream, divisor, row_weights, wanted, implementation)
    return gradients, (codes, upstream, divisor, row_weights)


def _kernel_gradient_bwd(
    wanted: _Wanted, implementation: str, residuals: Any, cotangents: Any
) -> Any:
    codes, upstream, divisor, row_weights = residuals
    unit, _ = _kernel_gradient(
        codes,
        jnp.ones_like(upstream),
        divisor,
        row_weights,
        _Wanted(jnp.dtype("float32"), None, wanted.vocab),
        implementation,
    )
    along = [
        c.astype(jnp.float32) * s for c, s in zip(cotangents, (1, -1), strict=True) if c is not None
    ]
    product = unit * sum(along)
    axes = tuple(range(upstream.ndim, product.ndim))
    return None, product.sum(axes), None, None


_kernel_gradient.defvjp(_kernel_gradient_fwd, _kernel_gradient_bwd)


def forward_with_codes(
    p: jax.Array,
    q: jax.Array,
    labels: jax.Array | None = None,
    *,
    implementation: str = "pallas",
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: jax.Array | None = None,
    normalizer: jax.Array | float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernels' forward as it runs when a gradient is wanted, for tests and measurements.

    Args:
        p, q: ``[tokens, vocab]``, else as for :func:`tvd_loss`.
        labels, reduction, ignore_index, weights, normalizer: as for :func:`tvd_loss`.
        implementation: ``"pallas"`` or ``"triton"``, which keep codes.

    Returns:
        The loss, the per-token values ``[tokens]`` (float32), and the packed sign codes
        ``[tokens, ceil(vocab / 2048) * 512]`` (uint8; unspecified in the rows of ignored tokens).
    """
    chosen = choose_implementation(p, q, implementation)
    if chosen == "xla":
        raise ValueError(f"implementation {chosen!r} keeps no codes")
    row_weights = kept_weights(labels, weights, ignore_index, jnp.float32)
    divisor = None if normalizer is None else jnp.asarray(as_number(normalizer), jnp.float32)
    loss, codes, _, per_token = _run_forward(p, q, row_weights, divisor, reduction, chosen, True)
    assert codes is not None
    return loss, per_token[: p.shape[0]], codes
