"""The Dockerfile, as far as it can be checked without building it: what it names is there, pinned, and not root's."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from click import Context

from carpool.cli.main import VERBS, carpool
from carpool.service.config import PORT, SETTINGS, variable

ROOT = Path(__file__).resolve().parent.parent


def instructions() -> Iterator[tuple[str, str]]:
    """Every instruction and its words, lines that go on joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, words = line.partition(" ")
            yield name, words.strip()


def of(name: str) -> list[str]:
    return [words for each, words in instructions() if each == name]


def final() -> list[tuple[str, str]]:
    """The instructions of the last stage."""
    listed = list(instructions())
    last = max(place for place, (name, _) in enumerate(listed) if name == "FROM")
    return listed[last:]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))


def test_what_is_copied_is_there_and_sent_to_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    assert ignored[1] == "*"
    copied = [source for words in of("COPY") if "--from" not in words for source in shlex.split(words)[:-1]]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, pattern) for pattern in sent), f"{source} is left out by .dockerignore"
    for needed in ("readme", "license-files"):
        value = PROJECT[needed]
        assert {value} if isinstance(value, str) else set(value) <= set(copied)


def test_all_that_is_installed_is_pinned() -> None:
    installs = [part for words in of("RUN") for part in words.split("&&") if "pip install" in part]
    assert len(installs) == 2
    assert all("-c constraints.txt" in part for part in installs)
    extras = re.search(r"\.\[([\w,]+)\]", installs[1])
    assert extras is not None
    wanted = [*PROJECT["dependencies"], "hatchling"]
    for extra in extras[1].split(","):
        wanted += PROJECT["optional-dependencies"][extra]
    names = {re.split(r"[<>=\[ ]", each)[0].lower() for each in wanted}
    assert names <= set(PINS), names - set(PINS)


def test_the_interpreter_is_the_one_that_the_pins_are_for() -> None:
    bases = {words.split()[0] for words in of("FROM")}
    assert bases == {"python:3.11-slim-bookworm"}
    assert "Python 3.11" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[0]


def test_it_runs_as_somebody_with_a_state_that_outlives_it() -> None:
    stage = dict(final())
    made = re.search(r"useradd .*?(\w+)(?: |$)", re.sub(r"--\S+( \d+)?", "", stage["RUN"]))
    assert made is not None
    assert stage["USER"] == made[1] == "carpool"
    environment = dict(each.split("=", 1) for each in shlex.split(stage["ENV"]))
    assert json.loads(stage["VOLUME"]) == [environment["CARPOOL_STATE"]]
    ours = {name for name in environment if name.startswith("CARPOOL_")}
    assert ours <= {variable(name) for name in SETTINGS}
    assert int(stage["EXPOSE"]) == PORT


def test_what_it_runs_are_commands_of_ours() -> None:
    stage = dict(final())
    health = json.loads(stage["HEALTHCHECK"].partition("CMD ")[2])
    for words in (json.loads(stage["ENTRYPOINT"]) + json.loads(stage["CMD"]), health):
        assert words[0] in PROJECT["scripts"]
        assert words[1] in VERBS
        command = carpool.get_command(Context(carpool), words[1])
        assert command is not None
        command.make_context(words[1], list(words[2:]))
