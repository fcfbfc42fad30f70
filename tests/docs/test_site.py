"""The documentation builds as a site, its code blocks parse, and its command lines exist."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from carpool.cli.main import carpool

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEREDOC = re.compile(r"<<'?(\w+)'?.*?^\1$", re.MULTILINE | re.DOTALL)
PREFIX = re.compile(r"^(?:\w+=\S+ |docker exec \w+ )+")


def blocks(language: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for found, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            if found == language:
                yield str(page.relative_to(ROOT)), text


def lines(language: str) -> Iterator[tuple[str, str]]:
    for page, text in blocks(language):
        for line in HEREDOC.sub("", text.replace("\\\n", " ")).splitlines():
            yield page, line


def command_lines() -> Iterator[tuple[str, str]]:
    """What shell blocks and console sessions call carpool with."""
    typed = [(page, line.removeprefix("$ ")) for page, line in lines("console") if line.startswith("$ ")]
    for page, line in [*typed, *lines("sh")]:
        for part in re.split(r"\s*(?:;|&&|\|)\s*", PREFIX.sub("", line)):
            if part.startswith("carpool "):
                yield page, part


def test_the_site_builds_with_every_page_and_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra 'dev' is not installed")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    commands = (tmp_path / "site" / "reference" / "commands.html").read_text(encoding="utf-8")
    assert "carpool trace generate" in commands


def test_python_blocks_parse() -> None:
    checked = 0
    for page, text in blocks("python"):
        try:
            ast.parse(text)
        except SyntaxError as error:
            pytest.fail(f"{page}: {error}\n{text}")
        checked += 1
    assert checked > 10


def test_toml_blocks_parse() -> None:
    checked = 0
    for page, text in blocks("toml"):
        try:
            tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            pytest.fail(f"{page}: {error}\n{text}")
        checked += 1
    assert checked > 10


def test_command_lines_name_commands_and_options_that_exist() -> None:
    checked = {(page, line): problem(line) for page, line in command_lines()}
    assert len(checked) > 60
    assert {where: wrong for where, wrong in checked.items() if wrong} == {}


def problem(line: str) -> str | None:
    """The first word of the line that carpool does not know, or None."""
    words = shlex.split(line, comments=True)[1:]
    if "--" in words:
        words = words[: words.index("--")]
    command: click.Command = carpool
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        child = command.get_command(click.Context(command), words[0])
        if child is None:
            return words[0]
        command, words = child, words[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    options = [word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)]
    return next((option for option in options if option not in known | {"-h", "--help", "--version"}), None)
