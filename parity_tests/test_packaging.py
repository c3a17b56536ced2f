"""Wheel and sdist: what they hold, that they work where they are installed, and the command."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import tvd_core
from parity_tests import child
from tvd_core import __main__ as command

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("tvd_core", "tvd_torch", "tvd_jax")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in")
FRAMEWORKS = {"torch", "jax", "triton", "jax-triton", "liger-kernel"}


def _build(kind: str, source: Path, out: Path) -> Path:
    """The ``wheel`` or ``sdist`` of ``source``, without network."""
    # Straight through the build backend: pip would want a network for an isolated build. 77 is
    # what pyproject.toml asks for.
    setuptools = importlib.metadata.version("setuptools")
    if int(setuptools.split(".")[0]) < 77:
        pytest.skip(f"setuptools {setuptools} is older than the build needs")
    code = f"from setuptools.build_meta import *; print(build_{kind}({str(out)!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return out / run.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the sources, in which a build may leave what it makes."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    for name in (*PRODUCT, "parity_tests", "bench"):
        ignore = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """Path of a wheel built from a copy of the sources, without network."""
    return _build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_of_sdist(source, tmp_path_factory):
    """Path of a wheel built from what the sdist holds, and nothing else."""
    out = tmp_path_factory.mktemp("sdist")
    with tarfile.open(_build("sdist", source, out)) as archive:
        # Python 3.11.0 to 3.11.3 know no filter; from 3.14 on this is the default.
        archive.extractall(out, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    assert (out / f"tvd_loss-{tvd_core.__version__}/CHANGELOG.md").exists()
    return _build("wheel", out / f"tvd_loss-{tvd_core.__version__}", out)


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


@pytest.mark.parametrize("built", ["wheel", "wheel_of_sdist"])
def test_it_works_in_an_empty_environment(built, tmp_path, request):
    pytest.importorskip("pip")
    path = request.getfixturevalue(built)
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*words):
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(*pip, "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", str(path))
    where = run(str(python), "-c", "import tvd_core; print(tvd_core.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    found = json.loads(run(str(python), "-m", "tvd_core", "--json"))
    assert found["version"] == tvd_core.__version__
    for package, framework in command.FRAMEWORKS.items():
        state = found["packages"][package]
        assert state["error"].startswith(
            f"{framework} is not installed: pip install '.[{framework}]'"
        )
        assert state["framework_version"] is None and state["implementations"] == {}
        assert state["error"] in run(str(python), "-m", "tvd_core")  # no rich in there either


USE = """
import tvd_core.contract, tvd_jax, tvd_torch
reveal_type(tvd_core.contract.code_tiles(1))
tvd_torch.tvd_loss("p", "q", reduction=1)
tvd_jax.tvd_loss("p", "q", reduction=1)
"""


def _mypy(python: Path, folder: Path) -> list[str]:
    """What a type checker says of ``USE`` where only the installed packages are to be seen."""
    (folder / "use.py").write_text(USE)
    words = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull, "--config-file", os.devnull]
    words += ["--python-executable", str(python), "use.py"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True).stdout.splitlines()


def test_a_type_checker_reads_the_types_of_the_wheel(wheel, tmp_path):
    pytest.importorskip("mypy")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, capture_output=True, text=True).stdout.strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    said = _mypy(python, tmp_path)
    assert 'Revealed type is "int"' in said[0]
    wrong = 'Argument "reduction" to "tvd_loss" has incompatible type "int"; expected "str"'
    assert [wrong in line for line in said[1:3]] == [True, True]
    assert said[3:] == ["Found 2 errors in 1 file (checked 1 source file)"]
    for package in PRODUCT:
        (site / package / "py.typed").unlink()
    assert sum("missing library stubs or py.typed" in line for line in _mypy(python, tmp_path)) >= 3


@pytest.mark.parametrize("missing", ["torch", "jax"])
def test_the_command_works_with_one_framework(missing):
    code = f"""
        import sys
        sys.modules[{missing!r}] = None  # an import of it fails as if it were not there
        from tvd_core.__main__ import main
        main(["--json"])
    """
    packages = json.loads(child.run(code))["packages"]
    for package, framework in command.FRAMEWORKS.items():
        absent = framework == missing or importlib.util.find_spec(framework) is None
        assert (packages[package]["error"] is not None) == absent
        assert (packages[package]["implementations"] == {}) == absent


def test_the_command_says_what_the_packages_say(capsys):
    command.main(["--json"])
    packages = json.loads(capsys.readouterr().out)["packages"]
    for package, framework in command.FRAMEWORKS.items():
        if importlib.util.find_spec(framework) is not None:
            said = __import__(package).available_implementations()
            assert packages[package]["implementations"] == said
    command.main([])
    table = capsys.readouterr().out
    for package, state in packages.items():
        for name, reason in state["implementations"].items():
            lines = [x for x in table.splitlines() if package in x and f" {name} " in x]
            assert len(lines) == 1
            words = [word for word in lines[0].split() if word != "│"]  # with rich or without
            assert words[:3] == [package, name, "no" if reason else "yes"]


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
        "examples": set(),
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
    # From one place: the build reads it there, and test_wheel_metadata what came of it.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and "version" in project["dynamic"]
