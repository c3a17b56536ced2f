"""The wheel: what it holds, what it does not, and that it works where it is unpacked."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import tvd_core

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("tvd_core", "tvd_torch", "tvd_jax")
SOURCES = ("pyproject.toml", "README.md", "LICENSE")
FRAMEWORKS = {"torch", "jax", "triton", "jax-triton", "liger-kernel"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Path of a wheel built from a copy of the sources, without network."""
    # Straight through the build backend: pip would want a network for an isolated build. 77 is
    # what pyproject.toml asks for.
    setuptools = importlib.metadata.version("setuptools")
    if int(setuptools.split(".")[0]) < 77:
        pytest.skip(f"setuptools {setuptools} is older than the build needs")
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    for name in (*PRODUCT, "parity_tests", "bench"):
        ignore = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    out = tmp_path_factory.mktemp("wheel")
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    run = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = out.glob("*.whl")
    return path


def test_wheel_holds_the_product_and_nothing_else(wheel):
    assert wheel.name == f"tvd_loss-{tvd_core.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        str(file.relative_to(ROOT))
        for package in PRODUCT
        for file in (ROOT / package).rglob("*")
        if file.suffix == ".py" or file.name == "py.typed"
    }
    assert names == expected
    assert {f"{package}/py.typed" for package in PRODUCT} <= names


def test_wheel_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        prefix = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info/"
        metadata = Parser().parsestr(archive.read(prefix + "METADATA").decode())
        assert prefix + "licenses/LICENSE" in archive.namelist()
    assert metadata["Version"] == tvd_core.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    required = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert [r.partition(">")[0] for r in required] == ["numpy"]


def test_wheel_works_where_it_is_unpacked(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import tvd_core, tvd_core.contract as c; print(tvd_core.__file__, c.REDUCTIONS[0])"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(tmp_path / "site/tvd_core/__init__.py"), "batchmean"]


def test_extras_do_not_force_a_framework():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {
        extra: FRAMEWORKS & {r.split(">")[0].split("=")[0].split("[")[0] for r in requirements}
        for extra, requirements in extras.items()
    }
    assert named == {
        "torch": {"torch", "triton"},
        "jax": {"jax"},
        "cuda12": {"jax"},
        "cuda13": {"jax"},
        "jax-triton": {"jax-triton", "triton"},
        "peers": {"liger-kernel"},
        "bench": set(),
        "test": set(),
        "lint": set(),
        "docs": set(),
    }


def test_versions_agree():
    import_errors = {}
    for package in ("tvd_torch", "tvd_jax"):
        try:
            module = __import__(package)
        except ModuleNotFoundError as error:  # that framework is not installed here
            import_errors[package] = error.name
            continue
        assert module.__version__ == tvd_core.__version__
    assert set(import_errors.values()) <= {"torch", "jax"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == tvd_core.__version__
