"""Opening a trace file: plain or gzip, UTF-8, and one clear error for whatever stands in the way."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from carpool.core.errors import InputError, cause
from carpool.sim.traces.cells import shown

_GZIP_MAGIC = b"\x1f\x8b"
FIRST_LINE_CHARS = 65_536  # a longer first line is no header of ours


@contextmanager
def _open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked when they are gzip (whatever the name says)."""
    with path.open("rb") as raw:
        if raw.peek(2)[:2] == _GZIP_MAGIC:
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast(BinaryIO, unpacked)
        else:
            yield raw


@contextmanager
def open_text(path: Path, *, escape: bool = False) -> Iterator[io.TextIOWrapper]:
    """The file's text, line ends untouched; with `escape` bytes that are not UTF-8 come as lone surrogates."""
    try:
        with _open_bytes(path) as raw:
            errors = "surrogateescape" if escape else "strict"
            with io.TextIOWrapper(raw, encoding="utf-8-sig", errors=errors, newline="") as text:
                yield text
    except OSError as error:
        raise _cannot_open(path, error) from error
    except (EOFError, zlib.error) as error:
        raise InputError(
            f"the gzip data is damaged or cut short ({error})", where=str(path), way_out="Fetch the file again."
        ) from error
    except csv.Error as error:
        raise InputError(
            f"this is not CSV ({error})", where=str(path), way_out="Look for a quote that is opened and never closed."
        ) from error


def _cannot_open(path: Path, error: OSError) -> InputError:
    """The error for a file that the system will not give us."""
    where = str(path)
    if isinstance(error, FileNotFoundError):
        return InputError("there is no such file", where=where, way_out="Check the path.")
    if isinstance(error, IsADirectoryError):
        return InputError("this is a folder, not a file", where=where, way_out="Name one trace file in it.")
    if isinstance(error, gzip.BadGzipFile):
        return InputError(f"the gzip data is damaged ({error})", where=where, way_out="Fetch the file again.")
    return InputError(f"cannot be read ({cause(error)})", where=where, way_out="Check its permissions.")


def not_utf8(path: Path) -> InputError:
    """The error for a file with bytes that are not UTF-8: it names the first such row."""
    with _open_bytes(path) as raw:
        for line, content in enumerate(raw, start=1):
            try:
                content.decode("utf-8")
            except UnicodeDecodeError as error:
                value = shown(content.strip().decode("utf-8", "backslashreplace"))
                return InputError(
                    f"byte 0x{content[error.start]:02x} in {value} is not UTF-8",
                    where=f"{path}, row {line}",
                    way_out="Save the file as UTF-8, or pass --skip-invalid to drop such rows.",
                )
    return InputError("the text is not UTF-8", where=str(path), way_out="Save the file as UTF-8.")


def ends_mid_line(path: Path) -> bool:
    """Whether a plain file's last line has no line end (gzip has its own check against being cut, a pipe no end)."""
    if not path.is_file():
        return False
    with path.open("rb") as raw:
        if raw.peek(2)[:2] == _GZIP_MAGIC:
            return False
        raw.seek(-1, io.SEEK_END)
        return raw.read(1) not in (b"\n", b"\r")
