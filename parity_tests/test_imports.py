"""Which package may import which: in a fresh process, in the source, and that both checks can fail.

tvd_core <- tvd_torch, tvd_jax <- parity_tests, bench. Neither framework's package loads the other
framework, and product code never loads the oracle that it is tested against.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("tvd_core", "tvd_torch", "tvd_jax")

# Module to import -> roots that must not be loaded by it, in a fresh process.
FRESH_PROCESS_RULES = {
    "tvd_core": ("torch", "jax", "triton", "tvd_core.reference"),
    # The command asks both packages, and imports nothing before it runs.
    "tvd_core.__main__": ("torch", "jax", "triton", "rich", "tvd_core.reference"),
    "tvd_core.contract": ("torch", "jax", "triton", "tvd_core.reference"),
    "tvd_core.reference": ("torch", "jax", "triton"),
    "tvd_core.triton_kernels": ("torch", "jax", "tvd_core.reference"),
    "tvd_core.logits_kernels": ("torch", "jax", "tvd_core.reference"),
    # Not triton: TRITON_INTERPRET is read when it is imported, and the choice is the user's.
    "tvd_torch": ("jax", "jaxlib", "tvd_jax", "triton", "tvd_core.reference"),
    "tvd_jax": ("torch", "tvd_torch", "triton", "jax_triton", "tvd_core.reference"),
}
NEEDS = {
    "tvd_core.triton_kernels": "triton",
    "tvd_core.logits_kernels": "triton",
    "tvd_torch": "torch",
    "tvd_jax": "jax",
}

# Package -> roots that no import statement of it may name, however late it runs.
SOURCE_RULES = {
    "tvd_core": ("torch", "jax", "tvd_torch", "tvd_jax", "parity_tests", "bench"),
    "tvd_torch": ("jax", "jax_triton", "tvd_jax", "tvd_core.reference", "parity_tests", "bench"),
    "tvd_jax": ("torch", "tvd_torch", "tvd_core.reference", "parity_tests", "bench"),
}


def _within(module: str, roots: tuple[str, ...]) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)


def _loaded_in_fresh_process(
    module: str, forbidden: tuple[str, ...], path: Path = ROOT
) -> set[str]:
    """Forbidden modules that ``import module`` loads, looking for modules in ``path`` first."""
    code = f"import sys, {module}; print('\\n'.join(['loaded:', *sys.modules]))"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(path)
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=path, env=env, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    loaded = run.stdout.partition("loaded:\n")[2].split()
    assert module in loaded
    return {name for name in loaded if _within(name, forbidden)}


def _named_in_source(folder: Path, forbidden: tuple[str, ...]) -> set[str]:
    """``file:line module`` of each import statement under ``folder`` that names a forbidden one."""
    found = set()
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                package = "." * node.level + (node.module or "")
                names = [package, *(f"{package}.{alias.name}" for alias in node.names)]
            else:
                continue
            bad = [name for name in names if _within(name, forbidden)]
            found |= {f"{file.name}:{node.lineno} {name}" for name in bad}
    return found


@pytest.mark.parametrize("module", FRESH_PROCESS_RULES)
def test_import_loads_nothing_forbidden(module):
    needed = NEEDS.get(module)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    assert _loaded_in_fresh_process(module, FRESH_PROCESS_RULES[module]) == set()


@pytest.mark.parametrize("package", SOURCE_RULES)
def test_source_names_nothing_forbidden(package):
    assert _named_in_source(ROOT / package, SOURCE_RULES[package]) == set()


def test_only_the_kernel_files_of_the_core_import_triton():
    naming = {line.split(":")[0] for line in _named_in_source(ROOT / "tvd_core", ("triton",))}
    assert naming == {"triton_kernels.py", "logits_kernels.py"}


def test_every_product_package_has_rules():
    packages = {f.parent.name for f in ROOT.glob("tvd_*/__init__.py")}
    assert packages == set(PRODUCT) == set(SOURCE_RULES)
    assert packages <= set(FRESH_PROCESS_RULES)


def test_the_fresh_process_check_can_fail(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("")
    (tmp_path / "jax" / "numpy.py").write_text("")
    (tmp_path / "planted.py").write_text("def f(): pass\nimport jax.numpy\n")
    assert _loaded_in_fresh_process("planted", ("jax",), tmp_path) == {"jax", "jax.numpy"}
    assert _loaded_in_fresh_process("planted", ("torch",), tmp_path) == set()


@pytest.mark.parametrize(
    "line",
    [
        "import jax",
        "import os, jax.numpy as jnp",
        "from jax import numpy",
        "from jax.experimental import pallas",
        "def late():\n    import jax",
        "from tvd_core import reference",
        "from tvd_core.reference import tvd_reference",
    ],
)
def test_the_source_check_can_fail(tmp_path, line):
    (tmp_path / "planted.py").write_text(line + "\n")
    assert _named_in_source(tmp_path, ("jax", "tvd_core.reference")) != set()
    assert _named_in_source(tmp_path, ("torch", "jaxtyping", "tvd_core.contract")) == set()
