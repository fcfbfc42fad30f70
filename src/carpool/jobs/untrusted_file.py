"""Files that a job can replace: opened only if they are regular files, without following links or waiting."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_TAIL_BYTES = 4096  # of a log in which its last line is looked for
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_untrusted(path: Path, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """A descriptor of a regular file; OSError for a link, pipe, device or folder in its place."""
    handle = os.open(path, flags | _FLAGS, mode)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return handle


def first_kept_byte(handle: int) -> int:
    """Where a file begins whose oldest part was discarded; 0 for a whole one."""
    return next_data(handle, 0)[0]


def next_data(handle: int, start: int) -> tuple[int, int]:
    """The next part of a file, from a byte on, that is not a hole: its first byte and the byte after its last.

    A job can make its files as long as it likes without writing to them; reading such holes would take minutes. Both
    are the size of the file if only a hole is left.
    """
    size = os.fstat(handle).st_size
    try:
        first = os.lseek(handle, start, os.SEEK_DATA)
        return first, os.lseek(handle, first, os.SEEK_HOLE)
    except OSError as error:
        return (size, size) if error.errno == errno.ENXIO else (min(start, size), size)  # else: holes are unsupported


def read_untrusted(path: Path, most: int) -> bytes:
    """The first `most` bytes of a regular file; OSError as `open_untrusted`."""
    with os.fdopen(open_untrusted(path), "rb") as file:
        return file.read(most)


def append_untrusted(path: Path, content: bytes) -> None:
    """Append to a regular file, which is created if it is missing; OSError as `open_untrusted`."""
    with os.fdopen(open_untrusted(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0) as file:
        file.write(content)


def open_new_untrusted(path: Path) -> int:
    """A descriptor of a new file, which takes the place of whatever file, link or pipe is there."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o644)


def last_line(path: Path, most: int = 200) -> str:
    """The last line of a log, at most `most` printable characters of it; rulers count only where there is no text.

    Empty if none can be read.
    """
    try:
        with os.fdopen(open_untrusted(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
    lines = ["".join(filter(str.isprintable, line)).strip() for line in text.splitlines()]
    found = max(reversed(lines), key=_content, default="")
    return found if len(found) <= most else f"{found[: most - 1]}…"


def _content(line: str) -> int:
    """2 for a line with a letter or digit, 1 for other characters, 0 for an empty line."""
    return 2 if any(map(str.isalnum, line)) else int(bool(line))
