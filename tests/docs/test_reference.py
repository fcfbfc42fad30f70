"""Pages list existing terms, options, worlds and policy parameters."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from carpool.cli.verbs.run import run
from carpool.cli.verbs.simulate import simulate
from carpool.policies.registry import POLICIES, parse_policy
from carpool.sim.worlds import WORLDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROW = re.compile(r"^\| (`[^|]*) \| ([^|]*) \|", re.MULTILINE)


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def parameters(text: str) -> dict[str, str]:
    """Parameters and defaults in the tables of a policy's page; a row may hold several."""
    found: dict[str, str] = {}
    for names, defaults in ROW.findall(text):
        values = [default.strip(" `") for default in defaults.split(",")]
        found.update(zip(re.findall(r"`([a-z_]+)`", names), values, strict=False))
    return found


def is_same_value(printed: str, value: object) -> bool:
    if isinstance(value, tuple):
        return tuple(map(float, printed.split("/"))) == value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(printed.replace("−", "-")) == value
    return printed == (str(value).lower() if isinstance(value, bool) else value)


def test_no_term_of_the_glossary_is_explained_twice() -> None:
    words = Counter(re.findall(r"^- \*\*(.+?)\*\* — ", page("glossary.md"), re.MULTILINE))
    assert words
    assert [word for word, times in words.items() if times > 1] == []


def test_every_option_of_run_is_on_its_page() -> None:
    text = page("how-to/run-jobs.md")
    options = [option for parameter in run.params for option in parameter.opts if option.startswith("--")]
    assert "--devices" in options
    assert [option for option in options if option not in text] == []


@pytest.mark.parametrize("world", [name for name in WORLDS if name != "FILE.toml"])
def test_every_world_is_in_the_help_and_on_its_page(world: str) -> None:
    (option,) = [parameter for parameter in simulate.params if parameter.name == "world"]
    assert re.search(rf"\b{world}\b", option.to_info_dict()["help"])
    assert re.search(rf"^\| `{world}\b", page("worlds.md"), re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "elastic"])  # whose page refers to `carpool`
def test_the_page_of_a_policy_has_its_parameters(name: str) -> None:
    policy = parse_policy(name)
    defaults = {field.name: getattr(policy, field.name) for field in fields(policy) if field.init}  # type: ignore[arg-type]
    listed = parameters(page(f"policies/{name}.md"))
    assert {key: value for key, value in defaults.items() if key not in listed} == {}
    assert {key: listed[key] for key, value in defaults.items() if not is_same_value(listed[key], value)} == {}
