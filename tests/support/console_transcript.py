"""Console sessions in a page: their commands are run for real, and what they print is compared with what is shown.

A page holds files, in blocks such as ```` ```toml file=jobs.toml ````, and sessions, in blocks that begin with
```` ```console ````. In a session a line that begins with ``$ `` is a command and what follows is its output, both
streams together, as on a terminal. ```` ```console terminal=2 ```` is a second terminal, for what goes on while others
work: its command has printed what is shown before the page goes on, and a line ``^C`` presses Ctrl-C there.

What is shown matches what is printed when they are equal but for three things:

* ``…`` stands for any text within a line, and alone on a line for any lines;
* a number with a decimal point was measured: it stands for any such number;
* a run of spaces is as good as another, since columns are as wide as what is in them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from time import monotonic
from typing import NamedTuple

ANY = "…"
CTRL_C = "^C"
_BLOCK = re.compile(r"^```(?P<kind>\w+)(?P<rest>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_VARIES = re.compile(rf"(?P<word>\s+{ANY}(?=\s|$))|(?P<any>{ANY})|(?P<measured>\d+(?:\.\d+)+)|(?P<blank>\s+)")
_STANDS_FOR = {
    "word": r"(?: [^\n]*?)?",  # a cell of a table may be empty
    "any": r"[^\n]*?",
    "measured": r"\d+(?:\.\d+)+",
    "blank": " ",
}
_PATIENCE_S = 60.0


class PageFile(NamedTuple):
    """A file that the reader writes."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Typed:
    """A command, or Ctrl-C, with what is shown of its output."""

    command: str
    shown: tuple[str, ...]
    terminal: str = ""


class Differs(AssertionError):
    """A command printed something else than its page shows."""

    def __init__(self, entry: Typed, printed: str) -> None:
        shown = "\n".join(entry.shown)
        super().__init__(f"$ {entry.command}\n--- the page shows\n{shown}\n--- it printed\n{printed}")


def read_page(text: str) -> Iterator[PageFile | Typed]:
    """Files and commands of a page, in its order; other blocks are passed over."""
    for block in _BLOCK.finditer(text):
        words = dict(word.split("=", 1) for word in block["rest"].split() if "=" in word)
        if "file" in words:
            yield PageFile(words["file"], block["text"])
        elif block["kind"] == "console":
            yield from _entries(block["text"], words.get("terminal", ""))


def _entries(text: str, terminal: str) -> Iterator[Typed]:
    command: str | None = None
    shown: list[str] = []
    for line in [*text.splitlines(), "$ "]:
        if not line.startswith("$ ") and line != CTRL_C:
            shown.append(line)
            continue
        if command is not None:
            yield Typed(command, tuple(shown), terminal)
        command, shown = line.removeprefix("$ "), []


def matches(shown: tuple[str, ...], printed: str) -> bool:
    """Whether a command printed what its page shows."""
    return re.fullmatch("".join(map(_pattern, shown)), _lines(printed)) is not None


def _pattern(line: str) -> str:
    line = line.strip()
    if line == ANY:
        return r"(?:[^\n]*\n)*?"
    made, at = "", 0
    for found in _VARIES.finditer(line):
        made += re.escape(line[at : found.start()]) + _STANDS_FOR[found.lastgroup or ""]
        at = found.end()
    return made + re.escape(line[at:]) + r"\n"


def _lines(printed: str) -> str:
    """Output with one space for every run of them, and an end to every line."""
    return "".join(" ".join(line.split()) + "\n" for line in printed.splitlines())


class Reader:
    """A reader at the terminals: writes a page's files into a folder and types its commands there."""

    def __init__(self, folder: Path, environment: Mapping[str, str], patience_s: float = _PATIENCE_S) -> None:
        self._folder, self._environment, self._patience_s = folder, environment, patience_s
        self._terminals: dict[str, _Terminal] = {}

    def follow(self, page: str) -> int:
        """Do all that a page says; how many commands it has. Differs where one prints something else."""
        done = 0
        for step in read_page(page):
            if isinstance(step, PageFile):
                (self._folder / step.name).write_text(step.text, encoding="utf-8")
            else:
                self._do(step)
                done += 1
        return done

    def close(self) -> None:
        """End whatever still goes on in a terminal."""
        for terminal in self._terminals.values():
            terminal.close()

    def _do(self, entry: Typed) -> None:
        if not entry.terminal:
            printed = _Terminal(entry.command, self._folder, self._environment).whole(self._patience_s)
        else:
            if entry.command == CTRL_C:
                self._terminals[entry.terminal].interrupt()
            else:
                terminal = _Terminal(entry.command, self._folder, self._environment)
                self._terminals[entry.terminal] = terminal
            printed = self._terminals[entry.terminal].until(entry.shown, self._patience_s)
        if not matches(entry.shown, printed):
            raise Differs(entry, printed)


class _Terminal:
    """One command at work, and the lines that it has printed and nobody has read."""

    def __init__(self, command: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}" if command.split()[0] == "carpool" else command],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: Queue[str | None] = Queue()  # None: there will be no more
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def until(self, shown: tuple[str, ...], patience_s: float) -> str:
        """What it prints until that is what is shown, or it ends, or patience does."""
        until, printed = monotonic() + patience_s, ""
        while not matches(shown, printed):
            try:
                line = self._lines.get(timeout=max(0.0, until - monotonic()))
            except Empty:
                break
            if line is None:
                break
            printed += line
        return printed

    def whole(self, patience_s: float) -> str:
        """All that it prints until it ends."""
        try:
            self._process.wait(patience_s)
            self._reader.join(patience_s)
        finally:
            self.close()
        return "".join(line for line in iter(self._lines.get, None) if line)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.killpg(self._process.pid, signal.SIGINT)

    def close(self) -> None:
        """End it at once, and all that it has started in this terminal."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as out:
            for line in out:
                self._lines.put(line)
        self._lines.put(None)
