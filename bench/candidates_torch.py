"""PyTorch: inputs, candidates and phases. Imported in PyTorch's own child process only."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from bench import Unavailable, inputs, timing
from bench.shapes import LOGITS, LOSS, Shape

LossFn = Callable[[Tensor, Tensor], Tensor]
CHUNK_ELEMENTS = 1 << 26


def formula(p: Tensor, q: Tensor) -> Tensor:
    """What a user writes without a library."""
    return 0.5 * (p - q).abs().sum(-1).mean()


def logits_formula(student: Tensor, teacher: Tensor) -> Tensor:
    """What a user writes without a library, from logits."""
    p, q = (torch.softmax(x, -1, dtype=torch.float32) for x in (student, teacher))
    return formula(p, q)


def _project(implementation: str, op: str) -> LossFn:
    import tvd_torch

    reason = tvd_torch.available_implementations()[implementation]
    if reason is not None:
        raise Unavailable(reason)
    function = getattr(tvd_torch, op)
    return lambda p, q: function(p, q, implementation=implementation)


def _liger(device: str, op: str) -> LossFn:
    if device == "cpu":
        raise Unavailable("Liger-Kernel needs a GPU")
    name = "fused_ce_tvd" if op == LOGITS else "tvd"
    try:
        module = importlib.import_module(f"liger_kernel.transformers.{name}")
    except ImportError as error:
        raise Unavailable(f"liger-kernel is not installed: {error}") from error
    if op == LOSS:
        return module.LigerTVDLoss(reduction="batchmean")
    return _liger_from_logits(module.LigerFusedCETVDLoss())


def _liger_from_logits(fused: Any) -> LossFn:
    """The TVD of Liger's fused cross-entropy and TVD; it has none of the TVD alone.

    It cannot leave the cross-entropy out. That costs one logit, one label and one stored value a
    row, and in the backward a gradient of zeros: nothing beside the rows themselves. The values of
    the tokens come unreduced, so the mean over them and its backward run as PyTorch's.
    """

    @cache
    def labels(tokens: int, device: torch.device) -> Tensor:
        return torch.zeros(tokens, dtype=torch.int64, device=device)

    return lambda p, q: fused(p, q, labels(len(p), p.device))[1].mean()


def _speculators(device: str, op: str) -> LossFn:
    """vLLM's speculators: its loss of ``[1, tokens, vocab]`` logits, unreduced."""
    if op == LOSS:
        raise Unavailable("speculators has no loss from probabilities")
    if device == "cpu":
        raise Unavailable("the fused loss of speculators needs a GPU")
    fused = _speculators_fused().fused_tv_loss
    return lambda p, q: fused(p[None], q[None]).mean()


def _speculators_fused() -> ModuleType:
    name = "speculators.losses.fused"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        found = importlib.util.find_spec("speculators")
        if found is None or not found.submodule_search_locations:
            raise Unavailable(f"speculators is not installed: {error}") from error
    # The package imports transformers and more, of which the file with the kernels needs nothing
    # but an answer to whether it runs on an Ascend NPU.
    path = Path(found.submodule_search_locations[0], "losses", "fused.py")
    spec = importlib.util.spec_from_file_location(name, path)
    answer = ModuleType("speculators.utils.util")
    answer.is_npu_available = lambda: False  # type: ignore[attr-defined]
    try:
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with mock.patch.dict(sys.modules, {answer.__name__: answer}):
            spec.loader.exec_module(module)
    except (ImportError, OSError) as error:
        raise Unavailable(f"speculators' {path.name} does not load alone: {error}") from error
    return module


def candidate(name: str, device: str, op: str = LOSS) -> LossFn:
    """Loss ``(p, q) -> scalar`` (batchmean) of an implementation; raises Unavailable."""
    plain = logits_formula if op == LOGITS else formula
    match name:
        case "torch-triton":
            return _project("triton", op)
        case "torch-eager":
            return _project("eager", op)
        case "torch-formula":
            return plain
        case "torch-compile":
            torch._dynamo.reset()
            return torch.compile(plain, dynamic=False, fullgraph=True)
        case "liger":
            return _liger(device, op)
        case "speculators":
            return _speculators(device, op)
    raise ValueError(f"unknown PyTorch implementation {name!r}")


class TorchProfiler:
    """Fallback reader: the activities that torch.profiler (Kineto, CUPTI too) reports."""

    name = "torch.profiler"

    def begin(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profile.__enter__()

    def end(self) -> list[timing.Activity]:
        torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        return [
            timing.Activity(
                event.name, int(event.time_range.start * 1e3), event.time_range.elapsed_us() * 1e3
            )
            for event in self._profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]


class Backend:
    """What the child process asks of a framework."""

    framework = "torch"

    def __init__(self, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise Unavailable("PyTorch sees no CUDA GPU")
        self.device = device
        self._flush_buffer: Tensor | None = None

    def environment(self) -> dict[str, Any]:
        if self.device == "cpu":
            return {"torch_threads": torch.get_num_threads()}
        properties = torch.cuda.get_device_properties(0)
        return {"torch_cuda": torch.version.cuda, "sms": properties.multi_processor_count}

    # --- inputs ---

    def make_inputs(self, shape: Shape, seed: int) -> tuple[Tensor, Tensor]:
        dtype = getattr(torch, shape.dtype)
        if shape.op == LOGITS:
            return self._logits(shape.tokens, shape.vocab, seed, dtype)
        made = (
            self._random(shape.tokens, shape.vocab, inputs.seed_of(seed, w), dtype) for w in "pq"
        )
        p, q = made
        return p, q

    def from_numpy(self, x: np.ndarray, dtype: str) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.device).to(getattr(torch, dtype))

    def _random(self, tokens: int, vocab: int, offset: int, dtype: torch.dtype) -> Tensor:
        table = torch.from_numpy(inputs.weight_table()).to(self.device)
        out = torch.empty(tokens, vocab, dtype=dtype, device=self.device)
        for start, rows in self._row_chunks(out):
            weights = table[_hash32(self._index(start, rows) + _signed(offset)) >> 16 & 0xFFFF]
            sums = weights.sum(-1, dtype=torch.int64).cpu().numpy().astype(np.uint32)
            scale = torch.from_numpy(inputs.reciprocal(sums)).to(self.device)
            rows.copy_(weights.to(torch.float32) * scale[:, None])
        return out

    def _logits(
        self, tokens: int, vocab: int, seed: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        student, teacher = (
            torch.empty(tokens, vocab, dtype=dtype, device=self.device) for _ in "pq"
        )
        noise_table, table = (
            torch.from_numpy(inputs.logit_table(spread)).to(self.device)
            for spread in (inputs.STUDENT_NOISE, inputs.TEACHER_SPREAD)
        )
        noise_offset, offset = (_signed(inputs.seed_of(seed, which)) for which in "pq")
        for start, rows in self._row_chunks(teacher):
            index = self._index(start, rows)
            exact = table[_hash32(index + offset) >> 16 & 0xFFFF]
            rows.copy_(exact)
            noise = noise_table[_hash32(index + noise_offset) >> 16 & 0xFFFF]
            student[start : start + len(rows)].copy_(exact + noise)
        return student, teacher

    def _row_chunks(self, x: Tensor) -> list[tuple[int, Tensor]]:
        step = max(1, CHUNK_ELEMENTS // x.shape[1])
        return [(start, x[start : start + step]) for start in range(0, x.shape[0], step)]

    def _index(self, start: int, rows: Tensor) -> Tensor:
        """Flat index of the elements as int32, modulo 2^32."""
        count, vocab = rows.shape
        first = start * vocab
        flat = torch.arange(first, first + count * vocab, dtype=torch.int64, device=self.device)
        return flat.to(torch.int32).reshape(count, vocab)

    def checksum(self, x: Tensor) -> int:
        total = 0
        for start, rows in self._row_chunks(x):
            if x.element_size() == 4:
                bits = rows.view(torch.int32)
            else:
                bits = rows.view(torch.int16).to(torch.int32) & 0xFFFF
            total += int((bits * (2 * self._index(start, rows) + 1)).sum(dtype=torch.int64))
        return total & 0xFFFFFFFF

    # --- oracle ---

    def oracle_per_token(self, p: Tensor, q: Tensor, op: str = LOSS) -> np.ndarray:
        """float64 values of the tokens."""
        values = []
        for start, rows in self._row_chunks(p):
            pair = rows.double(), q[start : start + len(rows)].double()
            if op == LOGITS:
                pair = pair[0].softmax(-1), pair[1].softmax(-1)
            values.append(0.5 * (pair[0] - pair[1]).abs().sum(-1))
        return torch.cat(values).cpu().numpy()

    def rows(self, x: Tensor, index: np.ndarray) -> np.ndarray:
        return x[torch.from_numpy(index).to(x.device)].detach().double().cpu().numpy()

    def scalar(self, loss: Tensor) -> float:
        return float(loss.detach().double())

    # --- candidates ---

    def candidate(self, name: str, op: str = LOSS) -> LossFn:
        return candidate(name, self.device, op)

    def phase(
        self, name: str, loss: LossFn, p: Tensor, q: Tensor, upstream: float
    ) -> Callable[[], tuple[Tensor | None, Tensor | None]]:
        """The call to time: returns ``(loss or None, gradient of p or None)``."""
        leaf = p.detach().requires_grad_()

        def forward() -> tuple[Tensor, None]:
            with torch.no_grad():
                return loss(p, q), None

        def forward_keep() -> tuple[Tensor, None]:
            return loss(leaf, q), None

        def total_upstream_1() -> tuple[Tensor, Tensor]:
            value = loss(leaf, q)
            return value, torch.autograd.grad(value, leaf)[0]

        if name in ("backward", "total"):
            kept = loss(leaf, q)
            # Made beforehand: the caller's own scaling of the loss is no part of this op.
            scale = torch.full_like(kept, upstream)

        def backward() -> tuple[None, Tensor]:
            return None, torch.autograd.grad(kept, leaf, scale, retain_graph=True)[0]

        def total() -> tuple[Tensor, Tensor]:
            value = loss(leaf, q)
            return value, torch.autograd.grad(value, leaf, scale)[0]

        call = {
            "forward": forward,
            "forward_keep": forward_keep,
            "backward": backward,
            "total_upstream_1": total_upstream_1,
            "total": total,
        }[name]
        if name == "total":
            del kept
        return call

    def sync(self, _: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def flush(self) -> None:
        if self._flush_buffer is None:
            self._flush_buffer = torch.ones(
                timing.FLUSH_BYTES // 4, dtype=torch.int32, device=self.device
            )
        self._flush_buffer.sum()

    def kept_bytes(self, loss: LossFn, p: Tensor, q: Tensor) -> int:
        """Bytes that live from forward to backward besides p, q and the loss.

        On a GPU: growth of the allocated memory (blocks of 512 bytes), less the loss's block. On a
        CPU: the saved tensors that are not p or q.
        """
        leaf = p.detach().requires_grad_()
        if self.device == "cuda":
            loss(leaf, q)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            value = loss(leaf, q)
            torch.cuda.synchronize()
            kept = torch.cuda.memory_allocated() - before - 512
            del value
            return max(0, kept)
        inputs_at = {x.untyped_storage().data_ptr() for x in (p, q)}
        saved: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in inputs_at and x.ndim > 0:
                saved[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            value = loss(leaf, q)
        del value
        return sum(saved.values())

    def peak_bytes(self, call: Callable[[], Any], p: Tensor, q: Tensor) -> int | None:
        """Most memory that the call allocates, plus p and q; ``None`` on a CPU."""
        if self.device == "cpu":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before + p.nbytes + q.nbytes

    # --- clock ---

    def reader_makers(self) -> list[Callable[[], timing.Reader]]:
        return [timing.Cupti, TorchProfiler]

    def copy_call(self, size: int) -> Callable[[], Any]:
        source = torch.ones(size // 4, dtype=torch.float32, device=self.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def copy_event_us(self, call: Callable[[], Any]) -> float | None:
        """Time of a call between two CUDA events, median of 9: what a reader is compared with."""
        if self.device == "cpu":
            return None
        times = []
        for _ in range(9):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return sorted(times)[4]

    def release(self) -> None:
        torch._dynamo.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def broken(self) -> bool:
        """Whether an error has left the device unusable for this process."""
        if self.device == "cpu":
            return False
        try:
            torch.cuda.synchronize()
            return False
        except RuntimeError:
            return True


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int32: PyTorch's >> keeps the sign."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _hash32(x: Tensor) -> Tensor:
    """``inputs.hash32`` on int32, whose products wrap as uint32's do."""
    x = (x ^ _shift_right(x, 16)) * _signed(inputs.MULTIPLIERS[0])
    x = (x ^ _shift_right(x, 15)) * _signed(inputs.MULTIPLIERS[1])
    return x ^ _shift_right(x, 16)
