"""From where jobs may be run: folders outside which no job reaches with its folder, entry, interpreter or program.

That keeps paths in order; it is no sandbox. Whoever may submit jobs runs programs as the daemon's user.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError
from carpool.runtime.entryfile import module_file

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Roots:
    """Folders and all that is in them, links followed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folder.resolve() for folder in folders)

    def check(self, path: Path, what: str, where: str) -> None:
        """InputError where a path, links followed, is in none of them."""
        if _CONTROL.search(str(path)):
            raise InputError(f"{what} holds control characters", where=where, way_out="Name a plain path.")
        try:
            real = path.resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(f"{what} cannot be found: {error}", where=where) from None
        if not any(real.is_relative_to(folder) for folder in self.folders):
            allowed = ", ".join(map(str, self.folders)) or "nowhere"
            raise InputError(
                f"{what} is {str(real)!r}, which is outside the folders from which jobs may be run",
                where=where,
                way_out=f"Allowed: {allowed}. The setting 'roots' of the daemon says which.",
            )

    def check_policy(self, text: str) -> None:
        """The same of a policy that is a class in a file."""
        file, dot, _ = text.partition(".py:")
        if dot:
            self.check(Path(f"{file}.py"), "policy", "policy")

    def check_tables(self, tables: Sequence[Mapping[str, Any]], base: Path) -> None:
        """The same of everything that job tables name, before anything of it is opened."""
        self.check(base, "folder", "folder")
        for table in tables:
            where = f"job {table.get('name')!r}"
            home = base / _text(table.get("folder"))
            self.check(home, "folder", where)
            for what, path in _paths(table, home, where):
                self.check(path, what, where)


def _paths(table: Mapping[str, Any], home: Path, where: str) -> list[tuple[str, Path]]:
    """What a table names on disk besides its folder."""
    found = []
    source = _text(table.get("entry")).rpartition(":")[0]
    if source.endswith(".py"):
        found.append(("entry", home / source))
    elif source and not _CONTROL.search(source):
        path = module_file(source, home, where)
        if path is None:
            raise InputError(
                f"entry names module {source!r}, which is in no file",
                where=where,
                way_out="Name a file: file.py:function.",
            )
        found.append(("entry", path))
    if python := _text(table.get("python")):
        found.append(("python", home / python))
    command = table.get("command")
    words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
    if words and "/" in words[0]:
        found.append(("command", home / words[0]))
    if len(words) > 1 and words[1].endswith(".py"):
        found.append(("script", home / words[1]))
    notify = table.get("notify")
    program = notify[0] if isinstance(notify, list) and notify else notify
    if isinstance(program, str) and "/" in program and "://" not in program:
        found.append(("notify", home / program))
    return found


def _text(value: object) -> str:
    """A text; what is of another kind is told by whoever reads the table."""
    return value if isinstance(value, str) else ""
