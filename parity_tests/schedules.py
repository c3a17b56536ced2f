"""Runs the body of the forward Pallas kernel from logits under random schedules, in NumPy.

The interpreter runs a block's warpgroups in threads too, but copies are there at once, so that it
sees few of the orders in which a GPU may do things. Here each warpgroup is a thread that runs only
when it is its turn; turns are drawn at random before every access to shared memory and at every
barrier; a copy lands at a random time. It raises

* ``Race`` if memory is touched to which a copy is under way,
* ``Overtaken`` if a wait passes in another phase of its barrier than its own (the hardware compares
  parities only),
* ``Deadlock`` if nobody can go on.

What reads or overwrites values of another warpgroup too early changes the results; callers compare
these with the ones of other schedules. The classes of ``logits_pallas`` run as they are, with fewer
lanes; its ``jax`` names are replaced by NumPy and by the classes here.
"""

import contextlib
import math
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from tvd_core import config
from tvd_jax import logits_pallas

LANES = 16  # a warpgroup's, of 4 warps with 4 neighbours each
LOGITS_LANES = LANES * logits_pallas.GROUPS
LOGITS_TILE = LOGITS_LANES * logits_pallas.SUB_TILES
SAMPLE = LOGITS_LANES - 2


class Race(Exception):
    """Memory was touched to which a copy was under way."""


class Overtaken(Exception):
    """A wait passed in a phase of its barrier that is not its own."""


class Deadlock(Exception):
    """Nobody could go on."""


class _Stopped(BaseException):
    """Ends a thread after another one has failed."""


class Scheduler:
    """Threads of which one runs at a time, and copies under way; drawn from by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.turn = threading.Condition()
        self.running: int | None = None
        self.ready: dict[int, Callable[[], bool]] = {}
        self.copies: list[Callable[[], None]] = []
        self.failure: BaseException | None = None
        self.ids = threading.local()
        # Slow ones fall behind by whole rows.
        self.weights = [self.random.choice((1.0, 1.0, 0.03)) for _ in range(16)]
        self.copy_weight = self.random.choice((3.0, 0.3, 0.03))

    @property
    def me(self) -> int:
        return self.ids.number

    def run(self, bodies: list[Callable[[], None]]) -> None:
        threads = [
            threading.Thread(target=self._thread, args=(i, body), daemon=True)
            for i, body in enumerate(bodies)
        ]
        self.ready = {i: lambda: True for i in range(len(bodies))}
        for thread in threads:
            thread.start()
        with self.turn:
            self._next()
        for thread in threads:
            thread.join()
        if self.failure is None and self.copies:
            self.failure = Race("a copy is under way at the end")
        if self.failure is not None:
            raise self.failure

    def pause(self) -> None:
        """Lets another one have a turn, now and then."""
        if self.random.random() < 0.3:
            self.wait(lambda: True)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until the caller is drawn, which it is only when it is ready."""
        with self.turn:
            self.ready[self.me] = ready
            self._next()
            self._until_drawn()

    def _thread(self, number: int, body: Callable[[], None]) -> None:
        self.ids.number = number
        try:
            with self.turn:
                self._until_drawn()
            with np.errstate(all="ignore"):  # as of -inf - -inf; it holds for one thread
                body()
        except _Stopped:
            return
        except BaseException as error:
            self.failure = self.failure or error
        with self.turn:
            del self.ready[number]
            self._next()

    def _until_drawn(self) -> None:
        self.turn.wait_for(lambda: self.running == self.me or self.failure is not None)
        if self.failure is not None:
            raise _Stopped

    def _next(self) -> None:
        """Draws until a thread has its turn; copies land in between."""
        while self.failure is None:
            able = [i for i, ready in self.ready.items() if ready()]
            if not able and not self.copies:
                if self.ready:
                    self.failure = Deadlock(f"threads {sorted(self.ready)} wait")
                break
            weights = [self.weights[i] for i in able]
            copying = self.copy_weight if self.copies else 0.0
            drawn = self.random.uniform(0, sum(weights) + copying)
            if able and drawn >= copying:
                (self.running,) = self.random.choices(able, weights)
                break
            self.copies.pop(self.random.randrange(len(self.copies)))()
        self.turn.notify_all()


class Barrier:
    """As the hardware's: a wait passes when the parity of the phase is no longer its own."""

    def __init__(self, scheduler: Scheduler, arrivals: int) -> None:
        self.scheduler, self.arrivals = scheduler, arrivals
        self.arrived = self.completed = 0
        self.waits: dict[int, int] = {}

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.arrivals:
            self.arrived, self.completed = 0, self.completed + 1

    def wait(self) -> None:
        own = self.waits.get(self.scheduler.me, 0)
        self.scheduler.wait(lambda: self.completed % 2 != own % 2)
        if self.completed != own + 1:
            raise Overtaken(f"wait {own} passed after {self.completed} phases")
        self.waits[self.scheduler.me] = own + 1


class _At:
    def __init__(self, get: Callable[[Any], Any]) -> None:
        self.get = get

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)


class Memory:
    """An array, or a part of one, that knows to which of its elements a copy is under way."""

    def __init__(self, scheduler: Scheduler, values: np.ndarray, landing: np.ndarray) -> None:
        self.scheduler, self.values, self.landing = scheduler, values, landing

    @property
    def at(self) -> _At:
        return _At(self._part)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def _part(self, index: Any) -> "Memory":
        if index is not ...:
            index = (*index, ...) if isinstance(index, tuple) else (index, ...)  # a view of one too
        return Memory(self.scheduler, self.values[index], self.landing[index])

    def touch(self) -> None:
        self.scheduler.pause()
        if self.landing.any():
            raise Race("touched while a copy is under way")

    def __getitem__(self, index: Any) -> Any:
        part = self._part(index)
        part.touch()
        return part.values.copy() if part.shape else part.values[()]

    def __setitem__(self, index: Any, value: Any) -> None:
        part = self._part(index)
        part.touch()
        part.values[...] = value


def _copy(source: Memory, target: Memory, barrier: Barrier, **_: Any) -> None:
    target.touch()
    assert source.shape == target.shape
    target.landing[...] = True

    def land() -> None:
        target.values[...], target.landing[...] = source.values, False
        barrier.arrive()

    target.scheduler.copies.append(land)


def _when(condition: Any) -> Callable[[Callable[[], None]], None]:
    return lambda then: then() if condition else None


def _fori_loop(start: Any, stop: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    for i in range(int(start), int(stop)):
        carry = body(np.int32(i), carry)
    return carry


LAX = SimpleNamespace(
    fori_loop=_fori_loop,
    div=lambda a, b: np.int32(a // b),
    rem=lambda a, b: np.int32(a % b),
    max=np.maximum,
    log=np.log,
    bitcast_convert_type=lambda x, dtype: x.view(dtype),
    broadcasted_iota=lambda dtype, shape, _: np.arange(shape[0], dtype=dtype),
)


@contextlib.contextmanager
def _replaced(slots: int | None) -> Iterator[None]:
    """``logits_pallas`` with few lanes, one block, and NumPy for JAX."""
    real = logits_pallas.plgpu
    names = {
        "LANES": LANES,
        "LOGITS_LANES": LOGITS_LANES,
        "LOGITS_TILE": LOGITS_TILE,
        "SAMPLE": SAMPLE,
        "jnp": np,
        "lax": LAX,
        "pl": SimpleNamespace(when=_when, ds=lambda start, size: slice(start, start + size)),
        "compat": SimpleNamespace(interpreting=lambda: True, sm_count=lambda: 1),
        "_vector": lambda x: x,
        "plgpu": SimpleNamespace(
            SMEM=lambda shape, dtype: (shape, dtype),
            Barrier=lambda **numbers: numbers,
            OOBFillMode=real.OOBFillMode,
            commit_smem=lambda: None,
            copy_gmem_to_smem=_copy,
            barrier_wait=lambda barrier: barrier.wait(),
            barrier_arrive=lambda barrier: barrier.arrive(),
        ),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(logits_pallas, **names))
        if slots is not None:
            fit = mock.patch.object(config, "logits_pallas_slots", lambda *_: slots)
            stack.enter_context(fit)
        yield


class _Barriers:
    """One barrier, or several in ``at``."""

    def __init__(self, scheduler: Scheduler, num_arrivals: int, num_barriers: int) -> None:
        barriers = [Barrier(scheduler, num_arrivals) for _ in range(num_barriers)]
        self.at, self.wait, self.arrive = barriers, barriers[0].wait, barriers[0].arrive


def forward(
    seed: int,
    student: np.ndarray,
    teacher: np.ndarray,
    weights: np.ndarray | None = None,
    given: np.ndarray | None = None,
    *,
    slots: int,
    statistics: Any = logits_pallas._Statistics.COMPUTED,
    want_kl: bool = True,
) -> dict[str, np.ndarray]:
    """Outputs of the forward kernel, run by one block whose ring has ``slots`` slots at most."""
    scheduler = Scheduler(seed)

    def memory(values: np.ndarray) -> Memory:
        return Memory(scheduler, values, np.zeros(values.shape, bool))

    def scratch_of(asked: Any) -> Any:
        if isinstance(asked, dict):
            return _Barriers(scheduler, **asked)
        shape, dtype = asked
        return memory(np.full(shape, np.nan, dtype))

    with _replaced(slots):
        tokens, vocab = student.shape
        plan = logits_pallas._Plan(student, teacher, vocab, 1.0, want_kl, True, statistics)
        outputs = {
            "tvd": (tokens,),
            "below": (tokens,),
            "kl": (tokens,),
            **{f"{name}_rows": (3, tokens) for name in "st"},
            **{f"{name}_lse": (tokens,) for name in "st"},
        }
        gmem = {name: np.zeros(shape, np.float32) for name, shape in outputs.items()}
        gmem["codes"] = np.zeros((tokens, math.ceil(vocab / LOGITS_TILE) * LOGITS_LANES), np.uint8)
        optional = {"s": student, "t": teacher, "weights": weights, "given": given}
        in_gmem = {name: memory(x) for name, x in optional.items() if x is not None}
        smem = {name: scratch_of(asked) for name, asked in plan.scratch().items()}
        out = {name: memory(x) for name, x in gmem.items()}

        def parts(group: int) -> tuple[Any, ...]:
            return plan, in_gmem, out, smem, np.int32(0), np.int32(group)

        groups = range(logits_pallas.GROUPS)
        bodies = [logits_pallas._Forward(*parts(group)).consume for group in groups]
        bodies.append(logits_pallas._Copies(*parts(len(groups))).produce)
        scheduler.run(bodies)
    return gmem
