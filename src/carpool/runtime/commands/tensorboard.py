"""TensorBoard event files: append scalars, and read them as the file grows.

A file is a sequence of records: length (8 bytes, little-endian), its masked CRC, data, masked CRC. The data is a
protocol-buffer ``Event``: 1 wall_time (double), 2 step (int64), 3 file_version (string), 5 summary; a summary holds
values (1) of tag (1, string) and simple_value (2, float) or tensor (8: 1 dtype, 4 content, 5 floats, 6 doubles).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from math import inf
from pathlib import Path
from time import time

from carpool.jobs.untrusted_file import append_untrusted
from carpool.runtime.commands.metric_lines import MAX_STEP, MetricRow, as_metric_name

_POLYNOMIAL = 0x82F63B78  # CRC-32C, reversed
_MASK = 0xA282EAD8


class EventFile:
    """A TensorBoard event file of one job."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time) -> None:
        self._clock = clock
        self._path = folder / f"events.out.tfevents.{clock():.6f}.carpool"
        self._append(_field(3, b"brain.Event:2"))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        tagged = [_field(1, tag.encode("utf-8", "replace")) + b"\x15" + _float(value) for tag, value in values.items()]
        summary = b"".join(_field(1, value) for value in tagged)
        self._append(b"\x10" + _varint(step) + _field(5, summary))

    def _append(self, event: bytes) -> None:
        data = b"\x09" + struct.pack("<d", self._clock()) + event
        length = struct.pack("<Q", len(data))
        append_untrusted(self._path, length + _masked(length) + data + _masked(data))


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _float(value: float) -> bytes:
    """A number in four bytes; one that is too large becomes infinite."""
    try:
        return struct.pack("<f", value)
    except (OverflowError, struct.error):  # struct.error: an integer too large for a float
        return struct.pack("<f", inf if value > 0 else -inf)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """The CRC-32C (Castagnoli) checksum."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ _POLYNOMIAL if byte & 1 else byte >> 1
        table.append(byte)
    return table


_TABLE = _table()


_HEAD = 12  # bytes of a record before its data: length and checksum
_TAIL = 4  # checksum after the data
_MAX_RECORD = 1 << 16  # bytes; scalars take less, images and histograms are skipped
_FLOAT, _DOUBLE = 1, 2  # types of a tensor


class EventReader:
    """Decodes the scalars of an event file from its bytes, fed in pieces; stops at the first damaged record."""

    def __init__(self) -> None:
        self.is_damaged = False
        self._buffer = b""
        self._skip = 0  # bytes of a record that is too long

    def feed(self, data: bytes) -> list[MetricRow]:
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        self._buffer += data[skipped:]
        rows: list[MetricRow] = []
        while not self.is_damaged and len(self._buffer) >= _HEAD:
            length = struct.unpack_from("<Q", self._buffer)[0]
            self.is_damaged = self._buffer[8:_HEAD] != _masked(self._buffer[:8])
            if self.is_damaged:
                self._buffer = b""
            elif length > _MAX_RECORD:
                self._pass_over(_HEAD + length + _TAIL)
            elif len(self._buffer) < _HEAD + length + _TAIL:
                break
            else:
                rows += self._decode(self._buffer[_HEAD : _HEAD + length], self._buffer[_HEAD + length :][:_TAIL])
                self._buffer = self._buffer[_HEAD + length + _TAIL :]
        return rows

    def _pass_over(self, size: int) -> None:
        self._skip = max(0, size - len(self._buffer))
        self._buffer = self._buffer[size:]

    def _decode(self, event: bytes, checksum: bytes) -> Iterator[MetricRow]:
        if checksum != _masked(event):
            self.is_damaged = True
            return
        try:
            row = _scalars(event)
        except (ValueError, IndexError, struct.error):
            self.is_damaged = True
            return
        if row is not None:
            yield row


def _scalars(event: bytes) -> MetricRow | None:
    step, metrics = 0, dict[str, float]()
    for number, value in _fields(event):
        if number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            for _, summary in _fields(value):
                tag, scalar = _tagged(summary) if isinstance(summary, bytes) else ("", None)
                if tag and scalar is not None:
                    metrics[tag] = scalar
    return MetricRow(step, metrics) if metrics and 0 <= step <= MAX_STEP else None


def _tagged(summary: bytes) -> tuple[str, float | None]:
    tag, scalar = "", None
    for number, value in _fields(summary):
        if number == 1 and isinstance(value, bytes):
            tag = as_metric_name(value.decode("utf-8", "replace"))
        elif number == 2 and isinstance(value, bytes):
            scalar = struct.unpack("<f", value)[0]
        elif number == 8 and isinstance(value, bytes):
            scalar = _tensor(value)
    return tag, scalar


def _tensor(tensor: bytes) -> float | None:
    """The number of a tensor that holds one."""
    found = dict(_fields(tensor))
    kind, content = found.get(1), found.get(4) or found.get(5) or found.get(6)
    if not isinstance(content, bytes):
        return None
    if kind == _FLOAT and len(content) == 4:
        return float(struct.unpack("<f", content)[0])
    return float(struct.unpack("<d", content)[0]) if kind == _DOUBLE and len(content) == 8 else None


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields; fixed-width values as bytes."""
    place = 0
    while place < len(message):
        key, place = _read_varint(message, place)
        match key & 7:
            case 0:
                value: int | bytes
                value, place = _read_varint(message, place)
            case 1:
                value, place = message[place : place + 8], place + 8
            case 2:
                size, place = _read_varint(message, place)
                value, place = message[place : place + size], place + size
            case 5:
                value, place = message[place : place + 4], place + 4
            case wire_type:
                raise ValueError(f"wire type {wire_type}")
        if place > len(message):
            raise ValueError("a field is cut off")
        yield key >> 3, value


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("a varint is too long")
