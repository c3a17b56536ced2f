"""The documents: links lead somewhere, and the summation order as written is the model's."""

import contextlib
import importlib
import importlib.util
import inspect
import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from parity_tests import inputs
from parity_tests.oracle import assert_same_bits
from tvd_core.reference import per_token_float32, reduce_float32

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ("README.md", "CHANGELOG.md", "bench/README.md", *PAGES)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    document = ROOT / name
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_api_reference_has_every_public_name(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    package = importlib.import_module(f"tvd_{framework}")
    page = (ROOT / f"docs/api-{framework}.md").read_text()
    listed = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", page, re.MULTILINE)
    assert sorted([*listed, "__version__"]) == sorted(package.__all__)


def test_the_contracts_summation_order_is_the_models() -> None:
    text = (ROOT / "docs/contract.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    p, q = inputs.rows(700, 1271)
    names = {"np": np, "p": p, "q": q, "divisor": np.float32(700)}
    exec(block, names)
    assert_same_bits("per_token", names["per_token"], per_token_float32(p, q))
    total = reduce_float32(names["per_token"]) / np.float32(700)
    assert_same_bits("loss", np.asarray(names["loss"]), np.asarray(total))


EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def _shown(example: str) -> str:
    """What the comments say that the example prints: behind a ``print``, and the lines below it."""
    shown = []
    for line in example.splitlines():
        if line.startswith("print("):
            shown += re.findall(r"  # (.*)", line)
        elif line.startswith("# "):
            shown.append(line[2:])
    return "\n".join(shown)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_readmes_examples_print_what_they_say(number: int) -> None:
    example = EXAMPLES[number]
    framework = "torch" if "tvd_torch" in example else "jax"
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example, {})
    assert printed.getvalue().rstrip() == _shown(example)
    assert _shown(example)


def test_the_readmes_examples_begin_with_logits() -> None:
    names = [re.findall(r"from (\w+) import (\w+)", example)[-1] for example in EXAMPLES]
    functions = ("tvd_from_logits", "tvd_loss")
    packages = ("tvd_torch", "tvd_jax")
    assert names == [(package, name) for name in functions for package in packages]


FUNCTIONS = (
    *("tvd_from_logits", "acceptance_loss", "hybrid_loss", "cross_entropy_tvd_loss"),
    "tvd_loss",
)
GROUPS = {
    "torch": "vocab_group=None, token_group=None",
    "jax": "axis_name=None, token_axis_name=None",
}


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_readmes_signatures_are_the_functions(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    package = importlib.import_module(f"tvd_{framework}")
    text = (ROOT / "README.md").read_text()
    shown = dict(re.findall(r"^    (\w+)\(([^)]*<groups>[^)]*)\)$", text, re.MULTILINE))
    assert sorted(shown) == sorted(name for name in package.__all__ if name in FUNCTIONS)
    assert GROUPS[framework] in " ".join(text.split())
    for name, arguments in shown.items():
        expected = " ".join(arguments.replace("<groups>", GROUPS[framework]).split())
        parameters = inspect.signature(getattr(package, name)).parameters.values()
        bare = [x.replace(annotation=inspect.Parameter.empty) for x in parameters]
        assert str(inspect.Signature(bare)).replace("'", '"') == f"({expected})"


TABLE_COMMANDS = re.findall(
    r"python -m bench (table [^`\n]* --readme README\.md[^`\n]*)", (ROOT / "README.md").read_text()
)


@pytest.mark.parametrize("command", TABLE_COMMANDS)
def test_the_readmes_tables_are_what_its_commands_print(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich", reason="the bench needs the extra `bench`")
    from bench.__main__ import main

    text = (ROOT / "README.md").read_text()
    copy = tmp_path / "README.md"
    copy.write_text(text)
    words = command.replace("README.md", str(copy)).split()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    assert main() == 0
    assert copy.read_text() == text


def test_each_table_of_the_readme_has_a_command() -> None:
    blocks = re.findall(r"<!-- bench:(\w+):start -->", (ROOT / "README.md").read_text())
    named = [re.findall(r"--block (\w+)", command) or ["table"] for command in TABLE_COMMANDS]
    assert sorted(blocks) == sorted(name for (name,) in named)
