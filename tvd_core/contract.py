"""The contract that both packages keep: reductions, layout constants, input checks and their words.

Nothing here imports a framework. Tensors and arrays are looked at through ``shape`` and ``dtype``
only, so the checks work on PyTorch tensors, JAX arrays, tracers and fake tensors alike.
"""

import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

REDUCTIONS = ("batchmean", "sum", "mean", "none", "per_token")
# Reductions that divide by the kept tokens, and so may be given another divisor.
NORMALIZED_REDUCTIONS = ("batchmean", "mean")
# Reductions of losses that have one value per token, and none per element.
TOKEN_REDUCTIONS = ("batchmean", "sum", "mean", "per_token")

# A row is summed by LANES lanes; TILE elements of a row share LANES bytes of 2-bit sign codes.
LANES = 512
CODES_PER_BYTE = 4
TILE = LANES * CODES_PER_BYTE
# The same of a row of logits, whose lanes are more because there is more to do for each element.
LOGITS_LANES = 2048
LOGITS_TILE = LOGITS_LANES * CODES_PER_BYTE

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")
KERNEL_DTYPES = ("float32", "bfloat16", "float16")
KERNEL_VOCAB = 2**31 - 2 * LOGITS_TILE  # positions, up to two tiles beyond, are 32 bits wide
# Compute capabilities of the first GPUs with what the kernels use: L2 eviction policies, TMA.
TRITON_CAPABILITY = (8, 0)
PALLAS_CAPABILITY = (9, 0)
# Those whose SMs have the 228 KiB of shared memory that Pallas's rings are sized for. Consumer
# Blackwell (12) has 100.
PALLAS_GENERATIONS = (9, 10)
# Float32 without its subnormal numbers: XLA takes those for 0 on a CPU, 1e-30 / 1e-40 is inf there.
FLOAT32_RANGE = (2.0**-126, (2 - 2.0**-23) * 2.0**127)
# What is multiplied with logits in base 2, log2(e) / temperature, is kept in this range: times -inf
# it stays -inf (XLA takes subnormal numbers for 0 on a CPU), and times 1e8 it is finite.
SCALE_RANGE = (2.0**-100, 2.0**100)
INTEGER_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

# 0-d arrays and the numbers that are not `numbers.Real`, as ml_dtypes' bfloat16.
_NUMPY_TYPES = (np.ndarray, np.generic)


def dtype_name(array: Any) -> str:
    """Name of the dtype without its framework: ``float32`` for ``torch.float32``."""
    return str(array.dtype).removeprefix("torch.")


def code_tiles(vocab: int) -> int:
    """Number of code tiles (``LANES`` bytes each) that one row keeps."""
    return -(-vocab // TILE)


def _one_of(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + f" or {names[-1]}"


def _check_array(name: str, array: Any, array_type: Any, dtypes: tuple[str, ...]) -> None:
    if not isinstance(array, array_type):
        raise TypeError(f"{name} must be a tensor or array, got {type(array).__name__}")
    if dtype_name(array) not in dtypes:
        raise TypeError(f"{name} must be {_one_of(dtypes)}, got {dtype_name(array)}")


def _check_per_token(name: str, array: Any, of: str, leading_shape: tuple[int, ...]) -> None:
    if tuple(array.shape) != leading_shape:
        raise ValueError(
            f"{name} must have the leading shape of {of} {leading_shape}, got {tuple(array.shape)}"
        )


def check_reduction(reduction: Any, reductions: tuple[str, ...] = REDUCTIONS) -> None:
    """Raises ``ValueError`` unless ``reduction`` is one of ``reductions``."""
    if not isinstance(reduction, str) or reduction not in reductions:
        raise ValueError(f"reduction must be one of {', '.join(reductions)}, got {reduction!r}")


def check_labels(labels: Any, array_type: Any) -> None:
    """Raises ``TypeError`` unless there are labels: of losses that are nothing without them."""
    _check_array("labels", labels, array_type, INTEGER_DTYPES)


def check_implementation(implementation: Any, names: tuple[str, ...]) -> None:
    """Raises ``ValueError`` unless ``implementation`` is ``None`` or one of ``names``."""
    if implementation is None or (isinstance(implementation, str) and implementation in names):
        return
    raise ValueError(
        f"implementation must be None or one of {', '.join(names)}, got {implementation!r}"
    )


def check_ignore_index(ignore_index: Any) -> None:
    """Raises unless ``ignore_index`` is an integer that fits in 64 bits."""
    # Not a tensor: to read it would synchronise with the device.
    # The type first, because to ask an abstract class takes longer.
    if type(ignore_index) is not int and (
        isinstance(ignore_index, bool) or not isinstance(ignore_index, numbers.Integral)
    ):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")
    if not -(2**63) <= int(ignore_index) < 2**63:
        raise ValueError(f"ignore_index must fit in 64 bits, got {ignore_index!r}")


def _check_normalizer(normalizer: Any, array_type: Any, reduction: str) -> None:
    if reduction not in NORMALIZED_REDUCTIONS:
        raise ValueError(
            f"normalizer applies to reduction {_one_of(NORMALIZED_REDUCTIONS)} only, "
            f"got reduction {reduction!r}"
        )
    if not _is_number(normalizer):
        if not isinstance(normalizer, (array_type, *_NUMPY_TYPES)):
            raise TypeError(f"normalizer must be a number or a 0-d array, got {normalizer!r}")
        if tuple(normalizer.shape) != ():
            raise ValueError(
                f"normalizer must be a number or a 0-d array, got shape {tuple(normalizer.shape)}"
            )
        if dtype_name(normalizer) not in FLOAT_DTYPES + INTEGER_DTYPES:
            raise TypeError(
                "normalizer must have a real dtype (float or integer), "
                f"got {dtype_name(normalizer)}"
            )
    if _is_on_host(normalizer):
        _check_float32_range("normalizer", normalizer)


def _check_float32_range(name: str, number: Any) -> None:
    if not _in_float32_range(number):
        raise ValueError(
            f"{name} must be positive and in float32's range (1.2e-38 to 3.4e38), got {number!r}"
        )


def _check_number(name: str, number: Any) -> None:
    """Raises ``TypeError`` unless it is Python's or NumPy's, whose value is known as it traces."""
    scalar = isinstance(number, _NUMPY_TYPES) and number.shape == ()
    if not (_is_number(number) or (scalar and dtype_name(number) in FLOAT_DTYPES + INTEGER_DTYPES)):
        raise TypeError(f"{name} must be a Python or NumPy number, got {number!r}")


def check_temperature(temperature: Any) -> None:
    """Raises unless ``temperature`` is a positive number in float32's normal range."""
    _check_number("temperature", temperature)
    _check_float32_range("temperature", temperature)


def check_factor(name: str, factor: Any) -> None:
    """Raises unless ``factor`` is a number from 0 on that float32 holds."""
    _check_number(name, factor)
    value = factor.item() if isinstance(factor, _NUMPY_TYPES) else factor
    if not 0 <= value <= FLOAT32_RANGE[1]:
        raise ValueError(f"{name} must be finite in float32 and at least 0, got {factor!r}")


def logit_scale(temperature: float) -> float:
    """``1 / temperature``, as the softmax of logits multiplies with it: in ``SCALE_RANGE``."""
    low, high = (bound / math.log2(math.e) for bound in SCALE_RANGE)
    return min(max(1.0 / temperature, low), high)


def base_2_scale(temperature: float) -> float:
    """``logit_scale`` for exponentials to the base 2."""
    return logit_scale(temperature) * math.log2(math.e)


def _is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _is_on_host(x: Any) -> bool:
    """Whether the value can be read without waiting for a device."""
    return _is_number(x) or isinstance(x, _NUMPY_TYPES)


def _in_float32_range(number: Any) -> bool:
    # NumPy would compare in the number's own dtype. float() is not asked: an int may be beyond it.
    value = number.item() if isinstance(number, _NUMPY_TYPES) else number
    return bool(FLOAT32_RANGE[0] <= value <= FLOAT32_RANGE[1])


def as_number(normalizer: Any) -> Any:
    """A checked number of any kind, or a 0-d NumPy array, as a float; anything else as it is."""
    if normalizer is None:
        return None
    return float(normalizer) if _is_on_host(normalizer) else normalizer


def check_inputs(
    p: Any,
    q: Any,
    labels: Any,
    weights: Any,
    normalizer: Any,
    *,
    reduction: Any,
    ignore_index: Any,
    array_type: Any,
    device_of: Callable[[Any], Any],
    names: tuple[str, str] = ("p", "q"),
    reductions: tuple[str, ...] = REDUCTIONS,
    is_shard: bool = False,
) -> None:
    """Raises ``ValueError`` or ``TypeError`` for inputs that the contract excludes.

    Args:
        p: ``[..., vocab]``.
        q: shape of ``p``.
        labels: ``None`` or integers, the leading shape of ``p``.
        weights: ``None`` or floats, the leading shape of ``p``.
        normalizer: ``None``, a positive number in float32's range (whatever the dtype of the
            loss), or a 0-d array, whose value is looked at only if it is NumPy's.
        reduction: one of ``REDUCTIONS``.
        ignore_index: the label that marks an ignored token.
        array_type: what counts as a tensor or array in the calling framework.
        device_of: device of an array as something that compares and prints, or ``None`` if it is
            not known yet (a tracer).
        names: what the caller's signature calls ``p`` and ``q``.
        reductions: those that the calling loss has.
        is_shard: whether ``p`` is one of the shards of its rows, which may be empty.
    """
    check_reduction(reduction, reductions)
    check_ignore_index(ignore_index)
    of, other_of = names
    _check_array(of, p, array_type, FLOAT_DTYPES)
    _check_array(other_of, q, array_type, FLOAT_DTYPES)
    shape = tuple(p.shape)
    if len(shape) == 0:
        raise ValueError(f"{of} must have shape [..., vocab], got shape {shape}")
    if shape[-1] == 0 and not is_shard:
        raise ValueError(f"{of} must have a vocab of at least 1, got shape {shape}")
    if tuple(q.shape) != shape:
        raise ValueError(f"{other_of} must have the shape of {of} {shape}, got {tuple(q.shape)}")
    if labels is not None:
        _check_array("labels", labels, array_type, INTEGER_DTYPES)
        _check_per_token("labels", labels, of, shape[:-1])
    if weights is not None:
        _check_array("weights", weights, array_type, FLOAT_DTYPES)
        _check_per_token("weights", weights, of, shape[:-1])
    if normalizer is not None:
        _check_normalizer(normalizer, array_type, reduction)

    device = device_of(p)
    if device is None:
        return
    others = ((other_of, q), ("labels", labels), ("weights", weights), ("normalizer", normalizer))
    for name, array in others:
        if isinstance(array, array_type):
            other = device_of(array)
            if other is not None and other != device:
                raise ValueError(f"{name} must be on the device of {of} ({device}), got {other}")


def install_words(*extras: str) -> str:
    """What to type for one of these extras of this project."""
    names = " or ".join(f"'.[{extra}]'" for extra in extras)
    return f"pip install {names} in this project's folder"


def not_installed_message(package: str, extra: str, remedy: str) -> str:
    """Words for a package that an implementation needs, on a machine whose GPU it can run on."""
    return f"{package} is not installed: {install_words(extra)}, or use {remedy}"


def no_gpu_message(remedy: str) -> str:
    """Words for a machine without a GPU, or a framework that is built without CUDA."""
    return f"no CUDA GPU is available: use {remedy}"


def capability_message(needed: tuple[int, int], found: tuple[int, int], remedy: str) -> str:
    """Words for a GPU that is too old for an implementation."""
    generation = {TRITON_CAPABILITY: "Ampere", PALLAS_CAPABILITY: "Hopper"}[needed]
    return (
        f"it needs a GPU of the {generation} generation (compute capability "
        f"{needed[0]}.{needed[1]}) or newer, this one has {found[0]}.{found[1]}: use {remedy}"
    )


def shared_memory_message(found: tuple[int, int], remedy: str) -> str:
    """Words for a GPU whose shared memory is too small for Pallas's rings."""
    generations = " and ".join(f"{major}.x" for major in PALLAS_GENERATIONS)
    return (
        f"it needs the shared memory of a GPU of compute capability {generations}, this one has "
        f"{found[0]}.{found[1]}: use {remedy}"
    )


def kernel_vocab_message(implementation: str, vocab: int, remedy: str) -> str:
    """Words for rows whose positions do not fit in 32 bits."""
    return (
        f"implementation {implementation!r} takes a vocab of at most {KERNEL_VOCAB}, got {vocab}: "
        f"use implementation {remedy!r}"
    )


def constant_message(name: str) -> str:
    """Words for a request for the gradient of an argument that the loss holds constant."""
    return (
        f"{name} is a constant of this loss and has no gradient: detach it first "
        "(PyTorch: .detach(), JAX: jax.lax.stop_gradient)"
    )


def group_message(name: str, kind: str, group: Any) -> str:
    """Words for what cannot name the processes or devices that hold the other shards."""
    return f"{name} must be None or a {kind} that this process belongs to, got {group!r}"


def kernel_dtype_message(implementation: str, name: str, dtype: str, remedy: str) -> str:
    """Words for a dtype that the kernels do not take."""
    return (
        f"implementation {implementation!r} takes {_one_of(KERNEL_DTYPES)}, got {name} {dtype}: "
        f"cast it or use implementation {remedy!r}"
    )


def no_elements_message(implementation: str, remedy: str) -> str:
    """Words for the loss of each element, which the kernels that read logits do not write."""
    return (
        f"implementation {implementation!r} has no reduction 'none' for logits: use implementation "
        f"{remedy!r}"
    )


def no_compiled_forward_mode_message(implementation: str, remedy: str) -> str:
    """Words for a derivative that a compiler would leave out."""
    return (
        f"implementation {implementation!r} has no forward-mode derivative under torch.compile: "
        f"use implementation {remedy!r}"
    )


def no_second_derivative_message(implementation: str, remedy: str) -> str:
    """Words for the derivative of a gradient that a kernel computed."""
    return (
        f"implementation {implementation!r} has no second derivative from logits: use "
        f"implementation {remedy!r}"
    )


def no_second_derivative_of_shards_message() -> str:
    """Words for the derivative of the gradient of rows of which each process has a part."""
    return "losses from logits whose rows are cut over processes have no second derivative"


def no_sharded_transform_message(remedy: str) -> str:
    """Words for a transform of a loss whose inputs are spread over processes."""
    return (
        "torch.func transforms and forward-mode derivatives take no inputs that are sharded: use "
        f"{remedy}"
    )
