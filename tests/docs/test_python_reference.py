"""The reference of the public names: its examples run, and it has every name, every method and no other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

import carpool
from carpool.runtime.worker.session import Session
from tests.support.http_rig import serve_http

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
NAMES: dict[str, Any] = {}
exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), NAMES)


def section(name: str) -> str:
    return PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def public(kind: type) -> set[str]:
    """The names of the methods of a class, without former names."""
    methods = {value.__name__ for value in vars(kind).values() if inspect.isfunction(value)}
    return {name for name in methods if not name.startswith("_")}


def test_every_public_name_is_in_the_table() -> None:
    rows = "\n".join(re.findall(r"^\| `carpool.*", PAGE, re.MULTILINE))
    assert [name for name in carpool.__all__ if not name.startswith("_") and name not in rows] == []


@pytest.mark.parametrize(("name", "kind"), [("Client", carpool.Client), ("Session", Session)])
def test_a_section_has_every_method_and_no_other(name: str, kind: type) -> None:
    listed = set(re.findall(r"`(\w+)\(", "\n".join(re.findall(r"^\| .*? \|", section(name), re.MULTILINE))))
    assert listed == public(kind)


def test_every_parameter_of_a_session_is_listed() -> None:
    assert [
        name for name in inspect.signature(carpool.session).parameters if f"`{name}`" not in section("Session")
    ] == []


def test_every_data_set_is_named() -> None:
    assert [name for name in carpool.datasets.__all__ if f"`{name}" not in section("Data sets")] == []


def test_a_session_resumes_to_the_same_weights(tmp_path: Path) -> None:
    first = NAMES["train_with_session"](str(tmp_path))
    assert first == NAMES["train_with_session"](str(tmp_path)) == NAMES["train_with_session"]()


def test_the_example_of_the_client_runs(tmp_path: Path) -> None:
    with serve_http(tmp_path) as served:
        lines = NAMES["submit_and_list"](served.url, served.tokens["ada"], served.rig.body("a", "b"))
    assert sorted(line.partition(":")[0] for line in lines) == ["a is cancelled", "b is running"]


def test_the_other_examples_run() -> None:
    assert NAMES["equal_models"]()
    train, test, digits = NAMES["small_data"]()
    assert (len(train), len(digits.train) + len(digits.test)) == (64, 1797)
    assert len(test)
