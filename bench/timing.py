"""One clock for both frameworks: durations of GPU activities as CUPTI records them.

A reader has ``begin()`` and ``end() -> activities``. ``Cupti`` talks to the libcupti that PyTorch
or JAX ships; the frameworks' own profilers (``candidates_*.py``) are the fallback. Everything is
framework-neutral here: callers pass the call to time, a synchronisation and an L2 flush.
"""

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

Call = Callable[[], Any]
FLUSH_BYTES = 256 * 2**20  # more than the L2 of any GPU listed in gpus.py (B200: 126 MB)
WARM_UP = 3
KERNEL_REPEATS = 20
WALL_REPEATS = 5
# Time budgets that cut the repeats of slow calls; at least MIN_REPEATS are made.
KERNEL_BUDGET_US = 60_000.0
WALL_BUDGET_US = 20_000.0
MIN_REPEATS = 5


@dataclass(frozen=True)
class Activity:
    """A kernel, copy or fill that ran on the GPU."""

    name: str
    start_ns: int
    duration_ns: float


class Reader(Protocol):
    """Collects what runs on the GPU between ``begin`` and ``end``."""

    name: str

    def begin(self) -> None: ...

    def end(self) -> list[Activity]: ...


class ReaderError(RuntimeError):
    """The reader cannot be used here, or found no records."""


# --- CUPTI ---------------------------------------------------------------------------------------

_MEMCPY, _MEMSET, _CONCURRENT_KERNEL, _MEMCPY2 = 1, 2, 10, 22  # CUpti_ActivityKind
_KINDS = (_CONCURRENT_KERNEL, _MEMCPY, _MEMSET, _MEMCPY2)
_NAMES = {_MEMCPY: "memcpy", _MEMSET: "memset", _MEMCPY2: "memcpy peer"}
_BUFFER_BYTES = 1 << 20
_NO_MORE_RECORDS = 12  # CUPTI_ERROR_MAX_LIMIT_REACHED
# Byte offsets within the records. kind, start and end stand at the same place in every version of
# CUpti_ActivityKernel*, Memcpy* and Memset* of CUDA 12 and 13; a kernel's name at 104.
_START, _END, _KERNEL_NAME = 16, 24, 104


def find_libcupti() -> str:
    """Path of the libcupti that this process has loaded, else of one that its packages bring."""
    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "libcupti.so" in line:
                return line.split(maxsplit=5)[5]
    except OSError:
        pass
    found = [x for folder in sys.path for x in Path(folder).glob("nvidia/*/lib/libcupti.so*")]
    return str(max(found, key=lambda path: path.name)) if found else "libcupti.so"


class Cupti:
    """Reads the activity records of libcupti through ctypes."""

    name = "cupti"

    def __init__(self, library: str | None = None) -> None:
        self.library = library or find_libcupti()
        try:
            self._lib = ctypes.CDLL(self.library)
        except OSError as error:
            raise ReaderError(f"no libcupti: {error}") from error
        self._buffers: dict[int, Any] = {}
        self._activities: list[Activity] = []
        self._errors: list[str] = []
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        request = ctypes.CFUNCTYPE(
            None, ctypes.POINTER(pointer), ctypes.POINTER(size), ctypes.POINTER(size)
        )
        complete = ctypes.CFUNCTYPE(None, pointer, ctypes.c_uint32, pointer, size, size)
        # Kept, or ctypes frees the callbacks while CUPTI still holds their addresses.
        self._callbacks = (request(self._requested), complete(self._completed))
        self._lib.cuptiActivityGetNextRecord.argtypes = [pointer, size, ctypes.POINTER(pointer)]
        self._call("cuptiActivityRegisterCallbacks", *self._callbacks)

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._lib, function)(*arguments)
        if status != 0:
            raise ReaderError(f"{function} of {self.library} answered {status}")

    def _requested(self, buffer: Any, size: Any, max_records: Any) -> None:
        memory = ctypes.create_string_buffer(_BUFFER_BYTES + 8)
        address = (ctypes.addressof(memory) + 7) & ~7  # CUPTI wants 8-byte alignment
        self._buffers[address] = memory
        buffer[0], size[0], max_records[0] = address, _BUFFER_BYTES, 0

    def _completed(self, context: Any, stream: int, buffer: int, size: int, valid: int) -> None:
        record = ctypes.c_void_p(None)
        try:
            while valid:
                status = self._lib.cuptiActivityGetNextRecord(buffer, valid, ctypes.byref(record))
                if status == _NO_MORE_RECORDS:
                    break
                if status != 0 or record.value is None:
                    self._errors.append(f"cuptiActivityGetNextRecord answered {status}")
                    break
                self._keep(record.value)
        finally:
            self._buffers.pop(buffer, None)

    def _keep(self, record: int) -> None:
        kind = ctypes.c_uint32.from_address(record).value
        start = ctypes.c_uint64.from_address(record + _START).value
        end = ctypes.c_uint64.from_address(record + _END).value
        if kind == _CONCURRENT_KERNEL:
            name = ctypes.c_char_p.from_address(record + _KERNEL_NAME).value or b""
            self._activities.append(Activity(name.decode(errors="replace"), start, end - start))
        elif kind in _NAMES:
            self._activities.append(Activity(_NAMES[kind], start, end - start))

    def begin(self) -> None:
        self._activities = []
        for kind in _KINDS:
            self._call("cuptiActivityEnable", ctypes.c_int(kind))

    def end(self) -> list[Activity]:
        self._call("cuptiActivityFlushAll", ctypes.c_uint32(1))
        for kind in _KINDS:  # enabled, they would slow down the calls that wall_us times
            self._call("cuptiActivityDisable", ctypes.c_int(kind))
        if self._errors:
            raise ReaderError(self._errors[0])
        return sorted(self._activities, key=lambda activity: activity.start_ns)


def choose_reader(
    makers: list[Callable[[], Reader]], copy: Call, sync: Callable[[Any], None]
) -> tuple[Reader | None, list[str]]:
    """First reader that works and sees a copy, and why those before it were passed over."""
    reasons = []
    for make in makers:
        try:
            reader = make()
            copied = [measure_once(reader, copy, sync) for _ in range(2)][-1]
        except Exception as error:
            reasons.append(f"{getattr(make, 'name', make)}: {type(error).__name__}: {error}")
            continue
        if sum(activity.duration_ns for activity in copied) > 0:
            return reader, reasons
        reasons.append(f"{reader.name}: found no records")
    return None, reasons


# --- measuring -----------------------------------------------------------------------------------


def measure_once(reader: Reader, call: Call, sync: Callable[[Any], None]) -> list[Activity]:
    """Activities of one call."""
    reader.begin()
    sync(call())
    return reader.end()


def _repeats(estimate_us: float, budget_us: float, most: int) -> int:
    return max(min(MIN_REPEATS, most), min(most, int(budget_us / max(estimate_us, 0.1))))


def quantiles(samples: list[float]) -> dict[str, float]:
    """20 %, 50 % and 80 % quantile and the extremes."""
    ordered = sorted(samples)

    def at(share: float) -> float:
        position = share * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

    return {"min": ordered[0], "q20": at(0.2), "q50": at(0.5), "q80": at(0.8), "max": ordered[-1]}


def time_call(
    call: Call,
    sync: Callable[[Any], None],
    flush: Call | None,
    reader: Reader | None,
    repeats: int = KERNEL_REPEATS,
) -> dict[str, Any]:
    """Times one phase: kernel time per call from cold L2, then wall and host time per call.

    * ``kernel_us``: sum of the durations of all kernels, copies and fills of one call; median over
      the repeats. Before each, ``flush`` reads FLUSH_BYTES (not counted): no input is in L2, and no
      line that the kernel would have to write back first (8-12 us at 16384 x 4096 on an H200).
    * ``wall_us``: time of many calls back to back, a synchronisation at the ends, over their
      number. L2 is as the calls leave it.
    * ``host_us``: until those calls are enqueued, over their number.
    """
    for _ in range(WARM_UP):
        sync(call())
    start = time.perf_counter()
    sync(call())
    estimate_us = (time.perf_counter() - start) * 1e6
    result: dict[str, Any] = {"kernel_us": None, "kernels": None, "clock": "wall"}
    samples: dict[str, list[float]] = {}
    if reader is not None:
        result |= _kernel_times(call, sync, flush, reader, estimate_us, repeats, samples)
    number = _repeats(estimate_us, WALL_BUDGET_US, 50)
    samples["wall_us"], samples["host_us"] = [], []
    for _ in range(min(WALL_REPEATS, repeats)):
        start = time.perf_counter()
        for _ in range(number):
            last = call()
        enqueued = time.perf_counter()
        sync(last)
        samples["wall_us"].append((time.perf_counter() - start) * 1e6 / number)
        samples["host_us"].append((enqueued - start) * 1e6 / number)
        del last
    result |= {name: median(samples[name]) for name in ("wall_us", "host_us")}
    result["wall_calls"] = number
    result["samples"] = samples
    result["quantiles"] = {name: quantiles(values) for name, values in samples.items()}
    return result


def _kernel_times(
    call: Call,
    sync: Callable[[Any], None],
    flush: Call | None,
    reader: Reader,
    estimate_us: float,
    repeats: int,
    samples: dict[str, list[float]],
) -> dict[str, Any]:
    kernel_us: list[float] = []
    counts: list[int] = []
    activities: list[Activity] = []
    for _ in range(_repeats(estimate_us, KERNEL_BUDGET_US, repeats)):
        if flush is not None:
            sync(flush())
        activities = measure_once(reader, call, sync)
        if not activities:
            raise ReaderError(f"{reader.name} found no records for this call")
        kernel_us.append(sum(activity.duration_ns for activity in activities) / 1e3)
        counts.append(len(activities))
    samples["kernel_us"] = kernel_us
    return {
        "kernel_us": median(kernel_us),
        "kernels": median(counts),
        "kernel_names": [
            f"{activity.name[:80]} {activity.duration_ns / 1e3:.1f}" for activity in activities[:12]
        ],
        "clock": reader.name,
    }
