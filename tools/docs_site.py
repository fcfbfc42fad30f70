"""Hooks of mkdocs: publish the files that pages link to, and a page with the help of every command.

Pages link to scripts, results and source files of this repository by relative path, so that the links work in a
checkout. The site publishes these files under ``files/``; a link to a folder becomes plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath, relpath

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from carpool.cli.main import carpool

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = "files"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the linked files of the repository and the generated page of commands."""
    for name in sorted(set(linked_files(Path(config.docs_dir)))):
        files.append(File.generated(config, f"{PUBLISHED}/{name}", abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave the documentation to the published files."""
    folder = f"docs/{page.file.src_uri}".rsplit("/", 1)[0]

    def replaced(match: re.Match[str]) -> str:
        text, name = match[1], normpath(f"{folder}/{match[2]}")
        if name.startswith("docs/"):
            return match[0]
        return f"[{text}]({relpath(f'docs/{PUBLISHED}/{name}', folder)})" if (ROOT / name).is_file() else text

    return LINK.sub(replaced, markdown)


def linked_files(docs: Path) -> Iterator[str]:
    """The files outside the documentation that its pages link to, relative to the repository."""
    for page in docs.rglob("*.md"):
        folder = page.parent.relative_to(ROOT).as_posix()
        for _, target in LINK.findall(page.read_text(encoding="utf-8")):
            name = normpath(f"{folder}/{target}")
            if not name.startswith("docs/") and (ROOT / name).is_file():
                yield name


def commands_page() -> str:
    """The help of every command as one page."""
    parts = ["# Commands", "The output of `--help` of every command."]
    for words, command in commands(carpool, ["carpool"]):
        context = click.Context(command, info_name=" ".join(words), max_content_width=100, terminal_width=100)
        parts += [f"## {' '.join(words)}", f"```text\n{command.get_help(context)}\n```"]
    return "\n\n".join(parts) + "\n"


def commands(command: click.Command, words: list[str]) -> Iterator[tuple[list[str], click.Command]]:
    """The command and all commands below it, with the words that call each."""
    yield words, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=words[-1])
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None and not child.hidden:
                yield from commands(child, [*words, name])
