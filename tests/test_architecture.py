"""The shape of the house, as far as import-linter cannot see it: a pure core, sole importers, honest names."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "carpool"

# Standard library modules that know the time, chance, other threads or the world outside.
IMPURE = frozenset(
    {
        *("asyncio", "concurrent", "multiprocessing", "queue", "sched", "signal", "subprocess", "threading", "_thread"),
        *("calendar", "datetime", "time", "zoneinfo"),
        *("random", "secrets", "uuid"),
        *("fileinput", "glob", "io", "mmap", "os", "pathlib", "shelve", "shutil", "sqlite3", "tempfile"),
        *("ftplib", "http", "select", "selectors", "smtplib", "socket", "socketserver", "ssl", "urllib"),
        *("ctypes", "getpass", "gc", "locale", "logging", "platform", "resource"),
    }
)
IMPURE_CALLS = frozenset({"__import__", "breakpoint", "eval", "exec", "id", "input", "open", "print"})

# Heavy or foreign packages, and the only packages of ours that may import them.
SOLE_IMPORTERS = {
    "click": {"cli"},
    "fastapi": {"dashboard", "service"},
    "hypothesis": {"testing"},
    "pydantic": {"service"},
    "pynvml": {"jobs"},
    "pytest": {"testing"},
    "torch": {"runtime", "testing"},
    "uvicorn": {"cli", "service"},
}
# Where ctypes and private names of other packages may be used.
COMPAT = PACKAGE / "runtime" / "compat"
# Underscored names that are documented: of named tuples, and os._exit.
DOCUMENTED = frozenset({"_asdict", "_exit", "_fields", "_make", "_replace"})
VAGUE_NAMES = frozenset({"common", "helper", "helpers", "manager", "misc", "util", "utils"})


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every absolute import, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def impurities(source: str) -> list[str]:
    """What a module of the core does that it must not, as ``line: reason``."""
    tree = ast.parse(source)
    found = []
    for line, name in imports(tree):
        top = name.partition(".")[0]
        if top == "carpool":
            if name != "carpool.core" and not name.startswith("carpool.core."):
                found.append((line, f"imports {name}, which is above the core"))
        elif top in IMPURE:
            found.append((line, f"imports {name}, which is impure"))
        elif top not in sys.stdlib_module_names:
            found.append((line, f"imports {name}, which is not in the standard library"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            found.append((node.lineno, f"calls {node.func.id}()"))
    return [f"{line}: {reason}" for line, reason in sorted(found)]


def foreign_imports(source: str, package: str) -> list[str]:
    """Imports that only another package of ours may make, as ``line: reason``."""
    found = []
    for line, name in imports(ast.parse(source)):
        owners = SOLE_IMPORTERS.get(name.partition(".")[0])
        if owners is not None and package not in owners:
            found.append(f"{line}: imports {name}, which only {' and '.join(sorted(owners))} may")
    return found


def fragile_uses(source: str) -> list[str]:
    """Uses of ctypes and of private names that the module itself does not define, as ``line: what``."""
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_own(node.value)}
    own |= {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [*(alias.name for alias in node.names), getattr(node, "module", None) or ""]
            parts = [part for name in names for part in name.split(".")]
            found += [(node.lineno, f"imports {part}") for part in parts if part == "ctypes" or is_private(part)]
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
            found += [(node.lineno, f"uses {node.attr}")] if node.attr not in own else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            words = [ast.unparse(each).strip("'") for each in node.args[1:2] if isinstance(each, ast.Constant)]
            found += [(node.lineno, f"uses {word}") for word in words if is_private(word)]
    return [f"{line}: {use}" for line, use in sorted(found)]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in {"self", "cls"}


def modules(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def test_core_is_there() -> None:
    assert modules(PACKAGE / "core"), "no modules found in the core, so the tests below would prove nothing"


def test_core_is_pure() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{problem}"
        for path in modules(PACKAGE / "core")
        for problem in impurities(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "problems"),
    [
        ("import time", ["1: imports time, which is impure"]),
        ("from datetime import datetime", ["1: imports datetime, which is impure"]),
        ("from os import urandom", ["1: imports os, which is impure"]),
        ("import concurrent.futures as futures", ["1: imports concurrent.futures, which is impure"]),
        ("def f():\n    import random", ["2: imports random, which is impure"]),
        ("import numpy as np", ["1: imports numpy, which is not in the standard library"]),
        ("from carpool.sim.engine import run", ["1: imports carpool.sim.engine, which is above the core"]),
        ("import carpool", ["1: imports carpool, which is above the core"]),
        ("from carpool.corelib import run", ["1: imports carpool.corelib, which is above the core"]),
        ("rows = open('jobs.csv')", ["1: calls open()"]),
        ("import time, heapq\nprint(1)", ["1: imports time, which is impure", "2: calls print()"]),
        ("from carpool.core.model import Job\nimport heapq\nfrom dataclasses import dataclass", []),
    ],
)
def test_impurities_are_seen(source: str, problems: list[str]) -> None:
    assert impurities(source) == problems


def test_heavy_packages_have_sole_importers() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{problem}"
        for path in modules(PACKAGE)
        for problem in foreign_imports(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).parts[0])
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "package", "problems"),
    [
        ("import torch.nn", "policies", ["1: imports torch.nn, which only runtime and testing may"]),
        ("from fastapi import FastAPI", "cli", ["1: imports fastapi, which only dashboard and service may"]),
        ("import torch", "runtime", []),
    ],
)
def test_foreign_imports_are_seen(source: str, package: str, problems: list[str]) -> None:
    assert foreign_imports(source, package) == problems


def test_fragile_interfaces_are_used_in_compat_only() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{problem}"
        for path in modules(PACKAGE)
        if COMPAT not in path.parents
        for problem in fragile_uses(path.read_text(encoding="utf-8"))
    ]
    assert found == [], "put these behind carpool.runtime.compat, with a fallback and a line in its features()"


@pytest.mark.parametrize(
    ("source", "problems"),
    [
        ("import ctypes", ["1: imports ctypes"]),
        ("from ctypes import CDLL", ["1: imports ctypes"]),
        ("from torch._C import Graph", ["1: imports _C"]),
        ("from torch.nn.modules.batchnorm import _BatchNorm", ["1: imports _BatchNorm"]),
        ("torch._foreach_copy_(a, b)", ["1: uses _foreach_copy_"]),
        ("version = weight._version", ["1: uses _version"]),
        ("parts = getattr(schedule, '_schedulers', ())", ["1: uses _schedulers"]),
        ("class A:\n    def _f(self): ...\n    def g(self, other): return other._f() + self._x", []),
        ("import os\nos._exit(0)\nrow._replace(a=1)\nimport __future__", []),
    ],
)
def test_fragile_uses_are_seen(source: str, problems: list[str]) -> None:
    assert fragile_uses(source) == problems


def test_names_say_what_is_inside() -> None:
    vague = [path.relative_to(PACKAGE) for path in modules(PACKAGE) if VAGUE_NAMES & set(path.with_suffix("").parts)]
    assert vague == []


def test_import_is_light() -> None:
    heavy = {"click", "numpy", "pydantic", "rich", "scipy", "sklearn", "torch"}
    program = f"import sys, carpool; print(*sorted({heavy!r} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert loaded == [], "`import carpool` must not load these; import them where they are used"


def test_testing_is_light() -> None:
    program = "import sys, carpool.testing; print(*sorted({'pytest', 'torch'} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert loaded == [], "`import carpool.testing` must not load these; whoever needs no torch must not wait for it"


def test_the_executor_starts_without_heavy_packages() -> None:
    heavy = {"numpy", "scipy", "sklearn", "torch"}
    program = f"import sys, carpool.runtime.executor.server; print(*sorted({heavy!r} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert loaded == [], "the executor must not load these: its fork server and workers do"


def test_a_run_with_the_default_policy_starts_without_heavy_packages() -> None:
    heavy = {"fastapi", "httpx", "pydantic", "scipy", "sklearn", "starlette", "torch", "uvicorn"}
    imported = "carpool.service.daemon.batch_run, carpool.policies.market.policy, carpool.cli.render.live_table"
    program = f"import sys, {imported}; print(*sorted({heavy!r} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert loaded == [], "`carpool run` must not load these before it needs them"


def test_public_names_are_found_when_used() -> None:
    program = (
        "import carpool; listed = set(carpool.__all__) <= set(dir(carpool)); "
        "print(carpool.Training.__module__, carpool.Stop(epochs=1).epochs, listed)"
    )
    told = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert told == "carpool.runtime.engine.training 1 True\n"


def test_a_missing_torch_is_told() -> None:
    program = "import sys; sys.modules['torch'] = None; import carpool; carpool.Training"
    told = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True).stderr
    assert "carpool.Training needs torch. Install it with: pip install 'carpool[torch]'" in told
