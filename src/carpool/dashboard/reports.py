"""Where comparisons come from: files in a folder, and what somebody has just handed in."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from carpool.core.errors import InputError
from carpool.dashboard.comparison import Comparison, read_comparison
from carpool.service.clerk import NotThere
from carpool.service.people import Person

LARGEST_BYTES = 64 << 20  # of a file in the folder

_KEPT = 64  # comparisons that were handed in, by all people together
_ENDINGS = (".json", ".html")


class ReportFound(NamedTuple):
    """A comparison that can be looked at."""

    key: str
    name: str
    at: float  # when it was written; 0: handed in


class Reports:
    """Comparisons by key. Those that were handed in are kept in memory, the newest ones, for whoever handed them in."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._handed_in: OrderedDict[tuple[str, str], tuple[str, Comparison]] = OrderedDict()

    def listed(self, who: Person) -> list[ReportFound]:
        """All that somebody can look at: their own first, then the folder's, newest first."""
        handed_in = reversed(self._handed_in.items())
        own = [ReportFound(key, name, 0.0) for (owner, key), (name, _) in handed_in if owner == who.name]
        files = [ReportFound(path.name, path.name, path.stat().st_mtime) for path in self._files()]
        return own + sorted(files, key=lambda each: -each.at)

    def hand_in(self, who: Person, name: str, text: str) -> str:
        """Take in a comparison; its key."""
        key = sha256(text.encode()).hexdigest()[:20]
        name = Path(name.replace("\\", "/")).name[:80] or "pasted"
        self._handed_in[who.name, key] = (name, read_comparison(text, name))
        self._handed_in.move_to_end((who.name, key))
        while len(self._handed_in) > _KEPT:
            self._handed_in.popitem(last=False)
        return key

    def get(self, who: Person, key: str) -> tuple[str, Comparison]:
        """A comparison and its name; reads a file."""
        own = self._handed_in.get((who.name, key))
        if own is not None:
            return own
        path = next((path for path in self._files() if path.name == key), None)
        if path is None:
            raise NotThere(f"there is no report {key!r}")
        if path.stat().st_size > LARGEST_BYTES:
            raise InputError(
                f"has {path.stat().st_size:,} bytes, more than {LARGEST_BYTES:,}",
                where=path.name,
                way_out="Use --json instead of --report.",
            )
        return path.name, read_comparison(path.read_text(encoding="utf-8", errors="replace"), path.name)

    def _files(self) -> list[Path]:
        """Only what lies in the folder itself: a key is compared with names, never joined to a path."""
        if self._folder is None or not self._folder.is_dir():
            return []
        return [path for path in self._folder.iterdir() if path.suffix in _ENDINGS and path.is_file()]
