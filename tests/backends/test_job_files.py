"""Event files: checked against the format's own numbers, and read back record by record."""

import struct
from math import exp
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.backends.job_files import EventFile, crc32c


def records(path: Path) -> list[bytes]:
    """The data of every record, checksums checked."""
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        data = content[12 : 12 + length]
        for part, masked in ((content[:8], content[8:12]), (data, content[12 + length : 16 + length])):
            rotated = (struct.unpack("<I", masked)[0] - 0xA282EAD8) & 0xFFFFFFFF
            assert crc32c(part) == (rotated >> 17 | rotated << 15) & 0xFFFFFFFF
        found.append(data)
        content = content[16 + length :]
    return found


def test_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


def test_points_are_written_as_tensorboard_reads_them(tmp_path: Path) -> None:
    file = EventFile(tmp_path, clock=lambda: 7.0)
    file.add(300, {"loss": 0.5, "accuracy": 1.0})
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("events.out.tfevents.")
    first, second = records(path)
    wall = b"\x09" + struct.pack("<d", 7.0)
    assert first == wall + b"\x1a\x0dbrain.Event:2"
    loss = b"\x0a\x04loss\x15" + struct.pack("<f", 0.5)
    accuracy = b"\x0a\x08accuracy\x15" + struct.pack("<f", 1.0)
    summary = b"\x0a" + bytes([len(loss)]) + loss + b"\x0a" + bytes([len(accuracy)]) + accuracy
    assert second == wall + b"\x10\xac\x02" + b"\x2a" + bytes([len(summary)]) + summary


@given(st.text(), st.floats() | st.integers(-(10**400), 10**400))
@example("perplexity", exp(100))
@example("\ud800", -1e300)
def test_any_figure_can_be_written(tmp_path_factory: pytest.TempPathFactory, tag: str, value: float) -> None:
    folder = tmp_path_factory.mktemp("events")
    EventFile(folder).add(1, {tag: value})
    (path,) = folder.iterdir()
    (written,) = struct.unpack("<f", records(path)[1][-4:])
    if abs(value) > 3.4e38:
        assert abs(written) > 3.3e38
        assert (written > 0) == (value > 0)
    else:
        assert written == pytest.approx(value, rel=1e-6, abs=1e-37, nan_ok=True)
