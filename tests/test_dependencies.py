"""Declared dependencies and imports agree: src imports all that it declares, and declares all that it imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Distributions whose module has another name.
MODULES = {"nvidia-ml-py": "pynvml", "pillow": "PIL", "scikit-learn": "sklearn"}
# Of the extra `dev`: run as commands or plugins, or read by other tools.
TOOLS = {"hatchling", "import-linter", "mkdocs-material", "mypy", "pytest-xdist", "ruff", "scipy-stubs"}
# Imported where the user has it, with an error that names it where not.
OPTIONAL = {"PIL"}
DEV = "dev"


def declared(requirements: list[str]) -> dict[str, str]:
    """Modules by the name of their distribution."""
    names = [re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() for requirement in requirements]
    return {name: MODULES.get(name, name.replace("-", "_")) for name in names}


def extras(*, dev: bool) -> dict[str, str]:
    """The requirements of all extras but `all`, which names the others; those of `dev`, or of the others."""
    groups = PROJECT["optional-dependencies"].items()
    return declared([each for name, group in groups if name != "all" and (name == DEV) is dev for each in group])


@cache
def imported(*folders: str) -> dict[str, str]:
    """Top-level modules that are neither ours nor the standard library's, and one file that imports each."""
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for module in imports_of(path.read_text(encoding="utf-8")):
                found.setdefault(module, str(path.relative_to(ROOT)))
    return {module: path for module, path in found.items() if module not in sys.stdlib_module_names | {"carpool"}}


def imports_of(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "importorskip":
            yield ast.literal_eval(node.args[0]).partition(".")[0]


def test_every_import_is_declared() -> None:
    known = {*declared(PROJECT["dependencies"]).values(), *extras(dev=False).values(), *OPTIONAL}
    contracts = {"hypothesis", "pytest"}  # of carpool.testing, by the extra `dev`
    assert contracts <= set(extras(dev=True).values())
    undeclared = {module: path for module, path in imported("src").items() if module not in known | contracts}
    assert undeclared == {}


@pytest.mark.parametrize(
    "group", ["dependencies", *(name for name in PROJECT["optional-dependencies"] if name != "all")]
)
def test_every_declared_dependency_is_imported(group: str) -> None:
    requirements = PROJECT.get(group) or PROJECT["optional-dependencies"][group]
    used = imported("src", "tests", "tools") if group == DEV else imported("src")
    unused = {name for name, module in declared(requirements).items() if module not in used}
    assert unused - (TOOLS if group == DEV else set()) == set()


def test_the_extra_all_names_every_other() -> None:
    (whole,) = PROJECT["optional-dependencies"]["all"]
    named = set(re.findall(r"\w+", whole.partition("[")[2]))
    assert named == PROJECT["optional-dependencies"].keys() - {"all"}


def test_every_declared_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    needed = {**declared(PROJECT["dependencies"]), **extras(dev=False), **extras(dev=True)}
    assert needed.keys() <= pinned
