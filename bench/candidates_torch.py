"""PyTorch: inputs, candidates and phases. Imported in PyTorch's own child process only."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import Unavailable, inputs, timing
from bench.shapes import Shape

LossFn = Callable[[Tensor, Tensor], Tensor]
CHUNK_ELEMENTS = 1 << 26


def formula(p: Tensor, q: Tensor) -> Tensor:
    """What a user writes without a library."""
    return 0.5 * (p - q).abs().sum(-1).mean()


def _project(implementation: str) -> LossFn:
    import tvd_torch

    reason = tvd_torch.available_implementations()[implementation]
    if reason is not None:
        raise Unavailable(reason)
    return lambda p, q: tvd_torch.tvd_loss(p, q, implementation=implementation)


def _liger(device: str) -> LossFn:
    if device == "cpu":
        raise Unavailable("Liger-Kernel needs a GPU")
    try:
        module = importlib.import_module("liger_kernel.transformers.tvd")
    except ImportError as error:
        raise Unavailable(f"liger-kernel is not installed: {error}") from error
    return module.LigerTVDLoss(reduction="batchmean")


def candidate(name: str, device: str) -> LossFn:
    """Loss ``(p, q) -> scalar`` (batchmean) of an implementation; raises Unavailable."""
    match name:
        case "torch-triton":
            return _project("triton")
        case "torch-eager":
            return _project("eager")
        case "torch-formula":
            return formula
        case "torch-compile":
            torch._dynamo.reset()
            return torch.compile(formula, dynamic=False, fullgraph=True)
        case "liger":
            return _liger(device)
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

    def oracle_per_token(self, p: Tensor, q: Tensor) -> np.ndarray:
        """float64 values of the tokens."""
        values = [
            0.5 * (rows.double() - q[start : start + len(rows)].double()).abs().sum(-1)
            for start, rows in self._row_chunks(p)
        ]
        return torch.cat(values).cpu().numpy()

    def rows(self, x: Tensor, index: np.ndarray) -> np.ndarray:
        return x[torch.from_numpy(index).to(x.device)].detach().double().cpu().numpy()

    def scalar(self, loss: Tensor) -> float:
        return float(loss.detach().double())

    # --- candidates ---

    def candidate(self, name: str) -> LossFn:
        return candidate(name, self.device)

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
