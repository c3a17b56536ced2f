"""Launches the Triton kernels on PyTorch tensors.

Triton is imported at the first use: ``import tvd_torch`` works without it, and leaves the choice of
Triton's interpreter (TRITON_INTERPRET, read when Triton is imported) to the caller.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tvd_core import config
from tvd_core.contract import (
    LANES,
    NORMALIZED_REDUCTIONS,
    TRITON_CAPABILITY,
    base_2_scale,
    capability_message,
    code_tiles,
    install_words,
    no_gpu_message,
    not_installed_message,
)

# Codes of the reduction in the upstream gradient's shape: one number, one per token or element.
_UPSTREAM = {"per_token": 1, "none": 2}


def _constant_to_dynamo(function: Callable[[], Any]) -> Callable[[], Any]:
    """What ``torch.compiler.assume_constant_result`` does, which would import Triton to do it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant_to_dynamo
def unavailable_reason() -> str | None:
    """Why the Triton kernels cannot run in this process, or ``None`` if they can."""
    return _unavailable_reason()


@_constant_to_dynamo
def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, which takes CPU tensors."""
    return _interpreting()


# Looked up once: finding a module costs tens of microseconds. The cache is inside, because Dynamo
# would trace through a cached function and not call it.
@functools.cache
def _unavailable_reason() -> str | None:
    installed = importlib.util.find_spec("triton") is not None
    if installed and _interpreting():
        return None
    remedy = "implementation 'eager'"
    if torch.version.hip is not None:
        return f"the kernels are for NVIDIA GPUs: use {remedy}"
    if not torch.cuda.is_available():
        first = "" if installed else f"install Triton ({install_words('torch')}) and "
        build = "" if torch.version.cuda else "; this PyTorch is built without CUDA"
        return no_gpu_message(
            f"{remedy}, or {first}set TRITON_INTERPRET=1 before the first import of triton to run "
            f"the kernels in Triton's interpreter{build}"
        )
    capability = torch.cuda.get_device_capability()
    if capability < TRITON_CAPABILITY:
        return capability_message(TRITON_CAPABILITY, capability, remedy)
    return None if installed else not_installed_message("triton", "torch", remedy)


@functools.cache
def _interpreting() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _kernels() -> Any:
    from tvd_core import triton_kernels

    return triton_kernels


# Compiled kernels, by what Triton compiles another one for.
_compiled: dict[tuple[Any, ...], Any] = {}


def _launch(
    kernel: Any,
    programs: int,
    *arguments: Any,
    num_warps: int,
    options: tuple[tuple[str, Any], ...] = (),
    **constants: bool | int,
) -> None:
    """``kernel[programs](*arguments, **constants)``, without Triton's search for what to run.

    Triton binds and looks at every argument before it finds the compiled kernel: 17 us a launch and
    not 13. What Triton reads at each launch (hooks before a run, debug switches) counts only in the
    first launch of a kind.

    Args:
        options: of the compiler, beside ``num_warps``.
        constants: the constexprs, in the order of the kernel's parameters.
    """
    device = arguments[0].device
    key = _key(arguments)
    # By id, because Triton hashes a kernel's source for it. The module keeps the kernels.
    key = key and (id(kernel), device, num_warps, *options, *key, *constants.values())
    compiled = _compiled.get(key) if key else None
    if compiled is not None:
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        compiled[programs, 1, 1](*arguments, *constants.values(), stream=stream)
        return
    compiled = kernel[programs,](*arguments, **constants, **dict(options), num_warps=num_warps)
    if key and compiled is not None:  # None in the interpreter
        _compiled[key] = compiled


def _key(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What Triton compiles another kernel for: each argument's type, as no number is specialized.

    ``None`` if not all memory is aligned, as almost all is.
    """
    key: list[Any] = []
    addresses = 0
    for x in arguments:
        if isinstance(x, Tensor):
            key.append(x.dtype)
            addresses |= x.data_ptr()
        else:
            key.append(type(x) is int and not -(2**31) <= x < 2**31)  # of 64 bits
    return None if addresses % 16 else tuple(key)


def _on_device_of(p: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    if p.is_cuda and p.device.index != torch.cuda.current_device():
        return torch.cuda.device(p.device)
    return contextlib.nullcontext()


def _plain(x: Tensor) -> Tensor:
    """Memory that holds the values in order: no strides, and no sign that PyTorch adds later.

    A view such as ``z.conj().imag`` has the negative bit, which a kernel would not see.
    """
    return x.contiguous().resolve_neg()


def reduce_tokens(
    per_token: Tensor,
    weights: Tensor | None,
    normalizer: Tensor | float | None,
    reduction: str,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """The 0-d sum of the tokens' values over the divisor, and the divisor."""
    tokens = per_token.numel()
    normalized = reduction in NORMALIZED_REDUCTIONS
    number = normalizer if isinstance(normalizer, (int, float)) else tokens
    loss = torch.empty((), dtype=torch.float32, device=per_token.device)
    divisor = torch.empty_like(loss)
    with _on_device_of(per_token):
        _launch(
            _kernels().tvd_reduce_kernel,
            1,
            per_token,
            per_token,
            per_token if weights is None else _plain(weights),
            _plain(normalizer) if isinstance(normalizer, Tensor) else per_token,
            0,
            tokens,
            float(number) if normalized else 1.0,
            float(vocab) if reduction == "mean" else 1.0,
            loss,
            divisor,
            HAS_LABELS=False,
            HAS_WEIGHTS=weights is not None,
            HAS_NORMALIZER=isinstance(normalizer, Tensor),
            COUNT=normalized and normalizer is None and weights is not None,
            num_warps=config.TRITON_REDUCE_WARPS,
        )
    return loss, divisor


def forward(
    p: Tensor,
    q: Tensor,
    labels: Tensor | None,
    weights: Tensor | None,
    normalizer: Tensor | float | None,
    reduction: str,
    ignore_index: int,
    keep_codes: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Runs the forward kernels.

    Returns:
        The result of the reduction (float32), the sign codes if ``keep_codes``, the 0-d divisor
        of a reduced loss, and the per-token values.
    """
    vocab = p.shape[-1]
    tokens = p.numel() // vocab
    p, q = _plain(p), _plain(q)
    per_token = torch.empty(p.shape[:-1], dtype=torch.float32, device=p.device)
    codes = None
    if keep_codes:
        shape = (tokens, code_tiles(vocab) * LANES)
        codes = torch.empty(shape, dtype=torch.uint8, device=p.device)
    elementwise = torch.empty_like(p, dtype=torch.float32) if reduction == "none" else None
    labels_arg = p if labels is None else _plain(labels)
    weights_arg = p if weights is None else _plain(weights)
    row_flags: dict[str, Any] = {
        "HAS_LABELS": labels is not None,
        "HAS_WEIGHTS": weights is not None,
    }

    kernels = _kernels()
    with _on_device_of(p):
        if tokens:
            _launch(
                kernels.tvd_forward_kernel,
                tokens,
                p,
                q,
                labels_arg,
                weights_arg,
                ignore_index,
                vocab,
                per_token,
                per_token if codes is None else codes,
                per_token if elementwise is None else elementwise,
                **row_flags,
                KEEP_CODES=keep_codes,
                ELEMENTWISE=elementwise is not None,
                ALIGNED=vocab % 16 == 0,
                STAGES=config.triton_forward_stages(
                    tokens, vocab, keep_codes, p.itemsize, q.itemsize
                ),
                STREAM=config.forward_stream(tokens, vocab, keep_codes),
                num_warps=config.TRITON_FORWARD_WARPS,
            )
        if reduction == "per_token":
            return per_token, codes, None, per_token
        if elementwise is not None:
            return elementwise, codes, None, per_token

        normalized = reduction in NORMALIZED_REDUCTIONS
        counted = normalized and normalizer is None and any(row_flags.values())
        number = normalizer if isinstance(normalizer, (int, float)) else tokens
        loss = torch.empty((), dtype=torch.float32, device=p.device)
        # Only the backward asks for it. Else it is written where the loss comes over it.
        divisor = torch.empty_like(loss) if keep_codes else loss
        _launch(
            kernels.tvd_reduce_kernel,
            1,
            per_token,
            labels_arg,
            weights_arg,
            _plain(normalizer) if isinstance(normalizer, Tensor) else per_token,
            ignore_index,
            tokens,
            float(number) if normalized else 1.0,
            float(vocab) if reduction == "mean" else 1.0,
            loss,
            divisor,
            **row_flags,
            HAS_NORMALIZER=isinstance(normalizer, Tensor),
            COUNT=counted,
            num_warps=config.TRITON_REDUCE_WARPS,
        )
    return loss, codes, divisor if keep_codes else None, per_token


def backward(
    codes: Tensor,
    upstream: Tensor,
    divisor: Tensor | None,
    labels: Tensor | None,
    weights: Tensor | None,
    shape: tuple[int, ...],
    p_dtype: torch.dtype | None,
    q_dtype: torch.dtype | None,
    reduction: str,
    ignore_index: int,
) -> tuple[Tensor | None, Tensor | None]:
    """Runs the backward kernel: the gradients of p and q, each in its dtype if that is given."""
    vocab = shape[-1]
    tokens = codes.shape[0]
    upstream = _plain(upstream.to(torch.float32))
    if codes.data_ptr() % 4:  # a hook on saved tensors may give them back anywhere
        codes = codes.clone()

    def gradient(dtype: torch.dtype | None) -> Tensor | None:
        return None if dtype is None else torch.empty(shape, dtype=dtype, device=codes.device)

    dp, dq = gradient(p_dtype), gradient(q_dtype)
    if tokens == 0:
        return dp, dq
    with _on_device_of(codes):
        _launch(
            _kernels().tvd_backward_kernel,
            config.triton_backward_grid(tokens, vocab),
            codes,
            upstream,
            upstream if divisor is None else divisor,
            codes if labels is None else _plain(labels),
            codes if weights is None else _plain(weights),
            ignore_index,
            vocab,
            codes if dp is None else dp,
            codes if dq is None else dq,
            UPSTREAM=_UPSTREAM.get(reduction, 0),
            HAS_DIVISOR=divisor is not None,
            HAS_LABELS=labels is not None,
            HAS_WEIGHTS=weights is not None,
            WANT_P=dp is not None,
            WANT_Q=dq is not None,
            ALIGNED=vocab % 16 == 0,
            PREFETCH=config.BACKWARD_PREFETCH,
            num_warps=config.TRITON_BACKWARD_WARPS,
        )
    return dp, dq


_NO_CONTRACTION = (("enable_fp_fusion", False),)


@functools.cache
def _sm_count(device: torch.device) -> int:
    """SMs of a GPU, 132 (H100, H200) for the interpreter. Sets grids, never a result."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 132
    )


def logits_forward(
    student: Tensor,
    teacher: Tensor,
    row_weights: Tensor | None,
    temperature: float,
    tvd: Tensor,
    student_rows: Tensor,
    teacher_rows: Tensor,
    student_lse: Tensor,
    teacher_lse: Tensor,
    kl: Tensor,
    codes: Tensor,
    statistics: str = "COMPUTED",
    given: Tensor | None = None,
) -> None:
    """Runs the forward kernel of the losses from logits into tensors; empty ones are not wanted.

    ``statistics`` is for shards of rows: ``ALONE``, then ``GIVEN`` with ``given``, as the kernel
    says.
    """
    from tvd_core import logits_kernels

    tokens, vocab = student.shape
    student, teacher = _plain(student), _plain(teacher)
    keep_codes, want_kl = codes.numel() > 0, kl.numel() > 0
    with _on_device_of(student):
        launch = config.logits_forward_launch(student.itemsize, teacher.itemsize)
        _launch(
            logits_kernels.logits_forward_kernel,
            min(tokens, launch.programs * _sm_count(student.device)),
            student,
            teacher,
            tvd if row_weights is None else _plain(row_weights),
            tvd if given is None else given,
            base_2_scale(temperature),
            tokens,
            vocab,
            tvd,
            student_rows,
            teacher_rows,
            student_lse,
            teacher_lse,
            kl if want_kl else tvd,
            codes if keep_codes else tvd,
            HAS_WEIGHTS=row_weights is not None,
            KEEP_CODES=keep_codes,
            WANT_KL=want_kl,
            ALIGNED=vocab % 16 == 0,
            COLD=base_2_scale(temperature) > config.LOGITS_COLD_SCALE,
            STATISTICS=getattr(logits_kernels, statistics).value,
            AHEAD=launch.ahead,
            num_warps=launch.warps,
            options=(("maxnreg", launch.registers), *_NO_CONTRACTION),
        )


def logits_backward(
    logits: Tensor,
    other: Tensor | None,
    rows: Tensor,
    other_rows: Tensor | None,
    kl: Tensor | None,
    tvd_upstream: Tensor,
    lse_upstream: Tensor | None,
    kl_upstream: Tensor | None,
    target_upstream: Tensor | None,
    targets: Tensor | None,
    codes: Tensor,
    row_weights: Tensor | None,
    temperature: float,
    is_student: bool,
    gradient: Tensor,
) -> None:
    """Runs the backward kernel of the losses from logits into ``gradient``."""
    from tvd_core import logits_kernels

    tokens, vocab = logits.shape
    logits = _plain(logits)

    def vector(x: Tensor | None) -> Tensor:
        return rows if x is None else _plain(x)

    with _on_device_of(logits):
        _launch(
            logits_kernels.logits_backward_kernel,
            tokens * config.logits_windows(vocab),
            logits,
            logits if kl_upstream is None or other is None else _plain(other),
            codes,
            rows,
            vector(other_rows),
            _plain(tvd_upstream),
            vector(lse_upstream),
            vector(kl_upstream),
            vector(kl),
            vector(target_upstream),
            vector(targets),
            vector(row_weights),
            base_2_scale(temperature),
            temperature,
            tokens,
            vocab,
            gradient,
            SIGN=1 if is_student else -1,
            HAS_SUM=lse_upstream is not None,
            HAS_KL=kl_upstream is not None,
            HAS_TARGET=target_upstream is not None,
            HAS_WEIGHTS=row_weights is not None,
            ALIGNED=vocab % 16 == 0,
            COLD=base_2_scale(temperature) > config.LOGITS_COLD_SCALE,
            num_warps=config.LOGITS_BACKWARD_WARPS,
            options=_NO_CONTRACTION,
        )
