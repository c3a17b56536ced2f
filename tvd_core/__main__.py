"""``python -m tvd_core``: which implementations this machine can run, and why not the others."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Sequence
from typing import Any

from tvd_core import __version__

FRAMEWORKS = {"tvd_torch": "torch", "tvd_jax": "jax"}
# As the contract words it, which is not imported here because it needs NumPy.
INSTALL = {
    "torch": "pip install '.[torch]' in this project's folder",
    "jax": "pip install '.[jax]' (with a GPU '.[cuda12]' or '.[cuda13]') in this project's folder",
}


def report() -> dict[str, Any]:
    """What the packages say of this machine.

    Returns:
        ``version``, ``python`` and ``packages``. Of each package its ``framework``, that one's
        ``framework_version`` (``None`` if it is not installed), ``error`` (``None`` if the package
        can be imported, else the reason) and ``implementations``, as its
        ``available_implementations()`` returns them: name to ``None`` or the reason.
    """
    return {
        "version": __version__,
        "python": platform.python_version(),
        "packages": {package: _package(package) for package in FRAMEWORKS},
    }


def _package(package: str) -> dict[str, Any]:
    framework = FRAMEWORKS[package]
    found: dict[str, Any] = {
        "framework": framework,
        "framework_version": _version(framework),
        "error": None,
        "implementations": {},
    }
    try:
        # By name: no statement of the core imports a framework, and what is missing is an answer.
        module = importlib.import_module(package)
        found["implementations"] = module.available_implementations()
    except Exception as error:  # a broken framework may raise anything; the other one's rows count
        missing = isinstance(error, ModuleNotFoundError) and error.name == framework
        found["error"] = (
            f"{framework} is not installed: {INSTALL[framework]}"
            if missing
            else f"{package} cannot be used: {type(error).__name__}: {error}"
        )
    return found


def _version(framework: str) -> str | None:
    try:
        return importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        return None


def _rows(found: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Package, implementation, whether it runs, and the reason if it does not."""
    rows = []
    for package, state in found["packages"].items():
        if state["error"] is not None:
            rows.append((package, "–", "no", state["error"]))
        for name, reason in state["implementations"].items():
            rows.append((package, name, "no" if reason else "yes", reason or ""))
    return rows


def _print_table(found: dict[str, Any]) -> None:
    versions = [f"TVD loss {found['version']}", f"Python {found['python']}"]
    for state in found["packages"].values():
        if state["framework_version"] is not None:
            versions.append(f"{state['framework']} {state['framework_version']}")
    title = ", ".join(versions)
    if importlib.util.find_spec("rich") is None:  # it comes with the extra `bench`
        print(title)
        for row in _rows(found):
            print("  ".join(row).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in ("package", "implementation", "runs", "why not, and what to do"):
        table.add_column(column)
    for package, name, runs, reason in _rows(found):
        style = "green" if runs == "yes" else "yellow"
        # As text: rich would take the brackets in `.[cuda13]` for markup.
        table.add_row(package, name, Text(runs, style=style), Text(reason))
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, or with ``--json`` what :func:`report` returns."""
    parser = argparse.ArgumentParser(
        prog="python -m tvd_core",
        description="Which implementations this machine can run and, for the others, why not.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    # JAX would take 75 % of the GPU's memory for this look at it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    found = report()
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print_table(found)


if __name__ == "__main__":
    main()
