"""One adapter per route (framework and implementation), so that a test body is written once.

A route takes NumPy arrays, moves them to the device that it runs on, and gives NumPy arrays back.
With a CUDA GPU the kernels run there, compiled; without one, in the interpreters.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from parity_tests import interpreters

NAMES = ("torch-triton", "torch-eager", "jax-pallas", "jax-triton", "jax-xla")


def identity(x: Any) -> Any:
    """The layout of contiguous inputs."""
    return x


@dataclasses.dataclass(frozen=True)
class Result:
    """Loss and gradients as NumPy arrays in the dtype that the route gave them."""

    loss: np.ndarray
    dp: np.ndarray | None
    dq: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Forward:
    """What the forward of a kernel route computes and keeps."""

    loss: np.ndarray
    per_token: np.ndarray
    codes: np.ndarray


class Route:
    """One implementation of one package."""

    framework: str
    can_run = False
    compiled_on_gpu = False
    mode = ""

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.name = f"{self.framework}-{implementation}"
        self.is_kernel = implementation not in ("eager", "xla")
        reason = self._reason()
        self.can_run = reason is None
        self.mode = f"skipped: {reason}" if reason else self._mode()
        self.compiled_on_gpu = self.mode.startswith("compiled on ")

    def __repr__(self) -> str:
        return self.name

    @property
    def interpreted(self) -> bool:
        return self.mode.startswith("interpreted")

    def _reason(self) -> str | None:
        """Why the route cannot run here."""
        raise NotImplementedError

    def _mode(self) -> str:
        """How it runs here."""
        raise NotImplementedError

    @property
    def has_logits(self) -> bool:
        """Whether the tests of the losses from logits run on this route.

        Pallas's interpreter takes 10 s and more for a row of them: test_logits_interpreted.py runs
        a few there.
        """
        return self.can_run and not (self.framework == "jax" and self.interpreted)

    # What follows is the same for both frameworks.

    def arrays(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options of ``tvd_loss`` with NumPy arrays moved to the device."""
        return {k: self.array(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}

    def loss(self, p: np.ndarray, q: np.ndarray, labels: Any = None, **options: Any) -> np.ndarray:
        """``tvd_loss`` of NumPy arrays, no gradient asked for."""
        options = self.arrays({"labels": labels, **options})
        return self.numpy(self.call(self.array(p), self.array(q), **options))

    def running(self) -> contextlib.AbstractContextManager[None]:
        """What has to be in force while the route traces or runs."""
        raise NotImplementedError

    def array(self, x: np.ndarray) -> Any:
        raise NotImplementedError

    def numpy(self, x: Any) -> np.ndarray:
        raise NotImplementedError

    def call(
        self, p: Any, q: Any, labels: Any = None, *, function: str = "tvd_loss", **options: Any
    ) -> Any:
        """A loss of the package with this route's implementation on arrays of the framework."""
        raise NotImplementedError

    def run(
        self,
        p: np.ndarray,
        q: np.ndarray,
        labels: np.ndarray | None = None,
        *,
        upstream: Any = 1.0,
        wrt: str = "pq",
        layout: Callable[[Any], Any] = identity,
        **options: Any,
    ) -> Result:
        """Loss and gradients. ``layout`` views the leaves p and q; gradients are of the leaves."""
        raise NotImplementedError

    def forward(
        self, p: np.ndarray, q: np.ndarray, labels: np.ndarray | None = None, **options: Any
    ) -> Forward:
        """The forward that keeps codes (kernel routes only)."""
        options = self.arrays({"labels": labels, **options})
        outputs = self.call_with_codes(self.array(p), self.array(q), **options)
        return Forward(*(self.numpy(x) for x in outputs))

    def call_with_codes(self, p: Any, q: Any, labels: Any = None, **options: Any) -> Any:
        raise NotImplementedError


class TorchRoute(Route):
    framework = "torch"

    def _reason(self) -> str | None:
        if importlib.util.find_spec("torch") is None:
            return "PyTorch is not installed"
        import tvd_torch

        return tvd_torch.available_implementations()[self.implementation]

    def _mode(self) -> str:
        import torch

        if self.implementation == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
            return "interpreted"
        if torch.cuda.is_available():
            return f"compiled on {torch.cuda.get_device_name(0)}"
        return "run on the CPU"

    @property
    def device(self) -> str:
        return "cuda" if self.compiled_on_gpu else "cpu"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Triton's interpreter computes in NumPy, which warns about NaN and Inf; kernels do not."""
        if not self.interpreted:
            yield
            return
        interpreters.quicken_triton()
        with np.errstate(all="ignore"):
            yield

    def array(self, x: np.ndarray) -> Any:
        import torch

        x = np.array(x, copy=True, order="C")  # writable: from_numpy warns about others
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(self.device)
        return torch.from_numpy(x).to(self.device)

    def numpy(self, x: Any) -> np.ndarray:
        import torch

        x = x.detach().cpu().contiguous()
        if x.dtype == torch.bfloat16:
            return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()

    def call(
        self, p: Any, q: Any, labels: Any = None, *, function: str = "tvd_loss", **options: Any
    ) -> Any:
        import tvd_torch

        loss = getattr(tvd_torch, function)
        with self.running():
            return loss(p, q, labels, implementation=self.implementation, **options)

    def call_with_codes(self, p: Any, q: Any, labels: Any = None, **options: Any) -> Any:
        from tvd_torch.loss import forward_with_codes

        with self.running():
            return forward_with_codes(p, q, labels, implementation=self.implementation, **options)

    def run(
        self,
        p: np.ndarray,
        q: np.ndarray,
        labels: np.ndarray | None = None,
        *,
        upstream: Any = 1.0,
        wrt: str = "pq",
        layout: Callable[[Any], Any] = identity,
        **options: Any,
    ) -> Result:
        import torch

        leaves = {"p": self.array(p), "q": self.array(q)}
        wanted = [leaves[name].requires_grad_() for name in wrt]
        options = self.arrays({"labels": labels, **options})
        loss = self.call(layout(leaves["p"]), layout(leaves["q"]), **options)
        gradients: dict[str, Any] = {}
        if wanted:
            along = torch.as_tensor(np.asarray(upstream, np.float64), device=self.device)
            along = along.to(loss.dtype).expand(loss.shape)
            with self.running():
                gradients = dict(zip(wrt, torch.autograd.grad(loss, wanted, along), strict=True))
        dp, dq = (self.numpy(gradients[n]) if n in gradients else None for n in "pq")
        return Result(self.numpy(loss), dp, dq)


class JaxRoute(Route):
    framework = "jax"

    def _reason(self) -> str | None:
        if importlib.util.find_spec("jax") is None:
            return "JAX is not installed"
        import tvd_jax

        reason = tvd_jax.available_implementations()[self.implementation]
        # On a CPU the suite turns Pallas's interpreter on; jax-triton has none.
        return None if self.implementation == "pallas" and not _jax_gpu() else reason

    def _mode(self) -> str:
        if _jax_gpu():
            return f"compiled on {_jax_gpu()}"
        return "interpreted" if self.implementation == "pallas" else "run on the CPU"

    @contextlib.contextmanager
    def running(self, **options: Any) -> Iterator[None]:
        """The interpreter where the route needs it; usable again if a kernel raised in it.

        One that runs already goes on with the options it has, such as its race detector.
        """
        if not self.interpreted:
            yield
            return
        from tvd_jax import compat

        if compat.interpreting():
            yield
            return
        try:
            with compat.interpret_mode(**options), interpreters.quick_pallas():
                yield
        except BaseException:
            compat.reset_interpreter()
            raise

    def array(self, x: np.ndarray) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(x)

    def numpy(self, x: Any) -> np.ndarray:
        return np.asarray(x)

    def call(
        self, p: Any, q: Any, labels: Any = None, *, function: str = "tvd_loss", **options: Any
    ) -> Any:
        import tvd_jax

        loss = getattr(tvd_jax, function)
        with self.running():
            return loss(p, q, labels, implementation=self.implementation, **options)

    def call_with_codes(self, p: Any, q: Any, labels: Any = None, **options: Any) -> Any:
        from tvd_jax.loss import forward_with_codes

        with self.running():
            return forward_with_codes(p, q, labels, implementation=self.implementation, **options)

    def run(
        self,
        p: np.ndarray,
        q: np.ndarray,
        labels: np.ndarray | None = None,
        *,
        upstream: Any = 1.0,
        wrt: str = "pq",
        layout: Callable[[Any], Any] = identity,
        **options: Any,
    ) -> Result:
        import jax.numpy as jnp

        options = {"labels": labels, **options}
        arrays = {k: jnp.asarray(v) for k, v in options.items() if isinstance(v, np.ndarray)}
        rest = tuple((k, v) for k, v in options.items() if k not in arrays)
        leaves = {"p": self.array(p), "q": self.array(q)}
        step = self._step if self.interpreted else self._jitted_step
        with self.running():
            loss, gradients = step((wrt, layout, rest), leaves, arrays, np.asarray(upstream))
            dp, dq = (self.numpy(gradients[n]) if n in gradients else None for n in "pq")
            return Result(self.numpy(loss), dp, dq)

    def loss(self, p: np.ndarray, q: np.ndarray, labels: Any = None, **options: Any) -> np.ndarray:
        return self.run(p, q, labels, wrt="", **options).loss

    def _step(self, static: Any, leaves: Any, arrays: Any, upstream: Any) -> Any:
        import jax
        import jax.numpy as jnp

        wrt, layout, rest = static

        def loss_of(*wanted: Any) -> Any:
            p_q = {**leaves, **dict(zip(wrt, wanted, strict=True))}
            return self.call(layout(p_q["p"]), layout(p_q["q"]), **dict(rest), **arrays)

        loss, vjp = jax.vjp(loss_of, *(leaves[name] for name in wrt))
        if not wrt:
            return loss, {}
        along = jnp.broadcast_to(jnp.asarray(upstream, loss.dtype), loss.shape)
        return loss, dict(zip(wrt, vjp(along), strict=True))

    @functools.cached_property
    def _jitted_step(self) -> Callable[..., Any]:
        """``run`` under ``jit``: tests that share shapes and options share one compilation.

        Interpreted kernels share more without it, each being compiled for itself. How a route does
        with and without ``jit`` is the business of test_clause_11_jax.py.
        """
        import jax

        return jax.jit(self._step, static_argnums=0)


@functools.cache
def _jax_gpu() -> str | None:
    """Name of the GPU that JAX runs on, ``None`` if it runs on a CPU."""
    import jax

    device = jax.devices()[0]
    return str(device.device_kind) if device.platform == "gpu" else None


def _make(name: str) -> Route:
    framework, implementation = name.split("-")
    return {"torch": TorchRoute, "jax": JaxRoute}[framework](implementation)


ROUTES = tuple(_make(name) for name in NAMES)


def get(name: str) -> Route:
    """The route of that name."""
    return ROUTES[NAMES.index(name)]


def runnable(framework: str | None = None, *, kernels: bool = False) -> list[Route]:
    """Routes that this machine can run."""
    return [
        route
        for route in ROUTES
        if route.can_run
        and framework in (None, route.framework)
        and (route.is_kernel or not kernels)
    ]
