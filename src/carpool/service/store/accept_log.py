"""Accept log: an append-only file of checksummed, chained lines; the second copy of the journal.

SQLite silently drops a damaged part of its write-ahead log and all that follows it. This log is written in the same
commit. A line is ``CRC PREV NUMBER BODY``: the checksum covers the rest of the line, PREV is the checksum of the line
before, so that an altered, cut, moved or missing line is detected and every other line stays valid.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

_FORM = re.compile(rb"([0-9a-f]{8}) ([0-9a-f]{8}) ([0-9]+) (.+)", re.DOTALL)
_BEGIN = re.compile(rb"[0-9a-f]{8} ([0-9a-f]{8}) [0-9]+ \{")
_START = 0  # PREV of the first line


class LogLine(NamedTuple):
    """One line: its number, its text, its checksum and that of the line before."""

    number: int
    body: str
    crc: int
    before: int

    @classmethod
    def after(cls, before: int, number: int, body: str) -> LogLine:
        """The line that follows one with the checksum `before`."""
        return cls(number, body, checksum(before, number, body), before)

    @property
    def is_sound(self) -> bool:
        return self.crc == checksum(self.before, self.number, self.body)


class CorruptRegion(NamedTuple):
    """A part of a log that is not a sound line."""

    after: int  # number of the sound line before it; -1 if there is none
    text: bytes


class LogContents(NamedTuple):
    """The content of a log."""

    lines: Mapping[int, LogLine]  # sound ones by number
    damaged: tuple[CorruptRegion, ...]
    cut: bool  # the file ends in the middle of a line
    is_ended: bool  # lines can be appended


def checksum(before: int, number: int, body: str) -> int:
    """CRC-32 over the chain so far and this line."""
    return crc32(f"{before:08x} {number} {body}".encode("ascii"))


def read_log(content: bytes) -> LogContents:
    """Parse a log into sound lines and damaged parts."""
    lines: dict[int, LogLine] = {}
    damaged: list[CorruptRegion] = []
    last = -1
    *pieces, rest = content.split(b"\n")
    *ended, tail = _split_lines(rest)
    parts = [*(part for piece in pieces for part in _split_lines(piece)), *ended]
    for piece in parts:
        line = parse_line(piece)
        if line is None:
            damaged.append(CorruptRegion(last, piece))
        else:
            lines[line.number] = line
            last = line.number
    line = parse_line(tail) or parse_line(tail[:-1])  # only its line end may be damaged
    if line is not None:
        lines[line.number] = line
    return LogContents(
        lines, tuple(damaged), cut=bool(tail) and line is None, is_ended=not tail and len(parts) == len(pieces)
    )


def _split_lines(piece: bytes) -> list[bytes]:
    """The lines in a piece whose line ends were damaged: found by each line's checksum, which the next line repeats."""
    parts = []
    while (found := next((each for each in _BEGIN.finditer(piece, 1) if each[1] == piece[:8]), None)) is not None:
        parts.append(piece[: found.start() - 1])
        piece = piece[found.start() :]
    return [*parts, piece]


def parse_line(piece: bytes) -> LogLine | None:
    """Parse a line; None if its form or its checksum is wrong."""
    found = _FORM.fullmatch(piece)
    if found is None or not piece.isascii():
        return None
    crc, before, number, body = (part.decode("ascii") for part in found.groups())
    line = LogLine(int(number), body, int(crc, 16), int(before, 16))
    return line if line.is_sound else None


class AcceptLog:
    """A log open for appending: `add` writes all lines durably, or none."""

    def __init__(self, stream: FileIO, last_crc: int, *, sync: bool = True) -> None:
        self._stream = stream
        self._sync = sync
        self._size = stream.seek(0, os.SEEK_END)
        self.last_crc = last_crc

    @classmethod
    def write_anew(cls, path: Path, lines: Iterable[LogLine], *, sync: bool = True) -> AcceptLog:
        """Replace the log by exactly these lines; on failure the old one stays."""
        fresh = path.with_suffix(".new")
        written = list(lines)
        stream = FileIO(fresh, "ab")
        try:
            stream.truncate(0)
            _write_all(stream, b"".join(map(_text, written)))
            if sync:
                os.fsync(stream.fileno())
            fresh.replace(path)
        except BaseException:
            stream.close()
            fresh.unlink(missing_ok=True)
            raise
        if sync:
            fsync_folder(path.parent)
        return cls(stream, written[-1].crc if written else _START, sync=sync)

    @classmethod
    def extend(cls, path: Path, last_crc: int, *, sync: bool = True) -> AcceptLog:
        """Append to a log that is sound and ends with this checksum."""
        return cls(FileIO(path, "ab"), last_crc, sync=sync)

    def add(self, lines: Sequence[LogLine]) -> None:
        size, last_crc = self._size, self.last_crc
        text = b"".join(map(_text, lines))
        try:
            for line in lines:
                assert line.before == self.last_crc, "every line repeats the checksum of the one before"
                self.last_crc = line.crc
            self._size += _write_all(self._stream, text)
            if self._sync:
                os.fdatasync(self._stream.fileno())
        except BaseException:
            self.rewind(size, last_crc)
            raise

    @property
    def end(self) -> tuple[int, int]:
        """The position that `rewind` takes: size and last checksum."""
        return self._size, self.last_crc

    def rewind(self, size: int, last_crc: int) -> None:
        os.ftruncate(self._stream.fileno(), size)
        self._size, self.last_crc = size, last_crc

    def close(self) -> None:
        self._stream.close()


def _write_all(stream: FileIO, text: bytes) -> int:
    """Write all bytes; a single call may write a part."""
    written = 0
    while written < len(text):
        written += stream.write(text[written:])
    return written


def fsync_folder(folder: Path) -> None:
    """Make new file names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _text(line: LogLine) -> bytes:
    return f"{line.crc:08x} {line.before:08x} {line.number} {line.body}\n".encode("ascii")
