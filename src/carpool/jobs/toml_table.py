"""TOML files and typed access to their tables; errors name the file, the key, the value and the expected type."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from carpool.core.errors import InputError, UnknownName, cause
from carpool.core.typed_fields import MAX_INT, shown

_MAX = 1 << 53  # JSON readers agree on integers up to here


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; InputError if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot be read: {cause(error)}", where=str(path), way_out="Name an existing file.") from None
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text: byte {error.object[error.start]:#04x} at position {error.start}"
        raise InputError(problem, where=str(path), way_out="Name a TOML file.") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"is not TOML: {error}", where=str(path), way_out="Fix that line.") from None


class Table:
    """A table and its place in the file, for errors."""

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, Mapping):
            raise InputError(f"{values!r} is not a table", where=where, way_out="Write a table: { key = value }.")
        self.values: Mapping[str, Any] = values
        self.where = where

    def only(self, keys: Iterable[str]) -> None:
        known = list(keys)
        for key in self.values:
            if key not in known:
                raise UnknownName("key", key, known, where=self.where)

    def text(self, key: str) -> str:
        """A string; empty if missing."""
        value = self.values.get(key, "")
        return value if isinstance(value, str) else self._refuse(key, 'Write a string: "…".')

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; a single string stands for a list of one."""
        value = self.values.get(key, [])
        items = [value] if isinstance(value, str) and key != "command" else value
        if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
            example = value.split() if isinstance(value, str) and value.strip() else ["a", "b"]
            self._refuse(key, f"Write a list of strings: {json.dumps(example)}.")
        return tuple(items)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key, default)
        return value if isinstance(value, bool) else self._refuse(key, "Write true or false.")

    def whole(self, key: str, default: int, *, least: int = 1, most: int = MAX_INT) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or (value < least and key in self.values):
            self._refuse(key, f"Write an integer of at least {least}.")
        if value > most:
            self._refuse(key, f"Write an integer of at most {most}.")
        return int(value)

    def number(self, key: str, default: float, *, least: float = 0.0, most: float = _MAX) -> float:
        """A number above 0, within limits."""
        value = self.values.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value <= 0 or not least <= value <= most:
            self._refuse(key, f"Write a number {f'from {least:g} to' if least else 'above 0 and at most'} {most:.16g}.")
        return float(value)

    def choice(self, key: str, among: Sequence[str]) -> str:
        """One of a few values; the first if missing."""
        value = self.values.get(key, among[0])
        words = " or ".join(repr(word) for word in among if word)
        return str(value) if value in among else self._refuse(key, f"Write {words}.")

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.values.get(key, {})
        if not isinstance(value, Mapping):
            self._refuse(key, "Write a table: { lr = 0.1 }.")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            self._refuse(key, "Use only strings, finite numbers, true, false, lists and tables.")
        return dict(value)

    def settings(self, key: str) -> dict[str, str]:
        """A nested table of strings; numbers are converted."""
        given = self.mapping(key)
        if not all(isinstance(value, str | int | float) for value in given.values()):
            self._refuse(key, 'Write a table of strings: { NAME = "…" }.')
        return {name: str(value) for name, value in given.items()}

    def _refuse(self, key: str, way_out: str) -> NoReturn:
        raise InputError(f"{key} is {shown(self.values.get(key))}", where=self.where, way_out=way_out)
