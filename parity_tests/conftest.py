"""Picks compiled kernels or interpreters for this machine, and reports how every route ran."""

import collections
import fcntl
import importlib.util
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

# JAX would take 75 % of the GPU's memory at its first use and leave PyTorch the rest.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _choose_triton_interpreter() -> None:
    """Triton reads TRITON_INTERPRET when it is imported; ``import torch`` does not import it."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


_choose_triton_interpreter()

from parity_tests import routes  # noqa: E402  (after the interpreter is chosen)

# Fixture name -> which routes a test that asks for it is run on.
ROUTE_FIXTURES = {
    "route": lambda route: True,
    "kernel_route": lambda route: route.is_kernel,
    "torch_route": lambda route: route.framework == "torch",
    "jax_route": lambda route: route.framework == "jax",
    "torch_kernel_route": lambda route: route.framework == "torch" and route.is_kernel,
    "jax_kernel_route": lambda route: route.framework == "jax" and route.is_kernel,
    # The same of the losses from logits.
    "logits_route": lambda route: route.has_logits,
    "logits_torch_route": lambda route: route.has_logits and route.framework == "torch",
    "logits_jax_route": lambda route: route.has_logits and route.framework == "jax",
    "logits_kernel_route": lambda route: route.has_logits and route.is_kernel,
}
ROUTE_PROPERTY = "route"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail unless every route runs compiled on a GPU",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    if not session.config.getoption("--require-gpu"):
        return
    missing = [f"{r.name} ({r.mode})" for r in routes.ROUTES if not r.compiled_on_gpu]
    if missing:
        raise pytest.UsageError("--require-gpu: not compiled on a GPU: " + ", ".join(missing))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A route that this machine cannot run is skipped once, in test_routes.py, with its reason."""
    for name, selects in ROUTE_FIXTURES.items():
        if name in metafunc.fixturenames:
            chosen = [r for r in routes.ROUTES if r.can_run and selects(r)]
            metafunc.parametrize(name, chosen, ids=[r.name for r in chosen], scope="session")


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], Any]], Any]:
    """``once(name, make)``: what ``make()`` returns, made by one of pytest-xdist's processes.

    A fixture of the session is one of each process. The others wait, and get it through JSON.
    """
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent  # which the processes share

    def made(name: str, make: Callable[[], Any]) -> Any:
        with (directory / name).open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if not (text := file.read()):
                text = json.dumps(make())
                file.write(text)
            return json.loads(text)

    return made


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # First what one process makes for all: at the end, another would wait for it with nothing else
    # to do.
    items.sort(key=lambda item: "once" not in getattr(item, "fixturenames", ()))
    for item in items:
        parameters = getattr(item, "callspec", None)
        for value in parameters.params.values() if parameters else ():
            if isinstance(value, routes.Route):
                # A plain string, so that xdist can carry it to the process that writes the summary.
                item.user_properties.append((ROUTE_PROPERTY, f"{value.name}|{value.mode}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tests: collections.Counter[str] = collections.Counter()
    modes: dict[str, str] = {}
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            for key, value in getattr(report, "user_properties", ()):
                if key == ROUTE_PROPERTY:
                    name, modes[name] = value.split("|", 1)
                    tests[name] += outcome != "skipped" and report.when == "call"
    if not modes:
        return
    terminalreporter.section("routes")
    for name in routes.NAMES:
        mode = modes.get(name, "no test of this route was selected")
        terminalreporter.write_line(f"{name:14s} {mode} ({tests[name]} tests)")
