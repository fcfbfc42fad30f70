"""Event files are as TensorBoard reads them, and are read back from any pieces."""

import struct
from math import exp
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.runtime.commands.metric_lines import MetricRow
from carpool.runtime.commands.tensorboard import EventFile, EventReader, _field, _masked, crc32c


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


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def test_scalars_are_read_from_any_pieces(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.add(1, {"loss": 0.5})
    file.add(300, {"loss": 0.25, "val/acc": 0.75})
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    expected = [MetricRow(1, {"loss": 0.5}), MetricRow(300, {"loss": 0.25, "val/acc": 0.75})]
    for size in (1, 7, 40, len(content)):
        reader = EventReader()
        pieces = [content[at : at + size] for at in range(0, len(content), size)]
        assert [row for piece in pieces for row in reader.feed(piece)] == expected
        assert not reader.is_damaged


@pytest.mark.parametrize(
    "tensor",
    [
        b"\x08\x01" + _field(4, struct.pack("<f", 0.5)),
        b"\x08\x01" + _field(5, struct.pack("<f", 0.5)),
        b"\x08\x02" + _field(6, struct.pack("<d", 0.5)),
    ],
)
def test_scalars_written_as_tensors_are_read(tensor: bytes) -> None:
    event = b"\x10\x07" + _field(5, _field(1, _field(1, b"acc") + _field(8, tensor)))
    assert EventReader().feed(record(event)) == [MetricRow(7, {"acc": 0.5})]


def test_images_are_skipped(tmp_path: Path) -> None:
    EventFile(tmp_path).add(5, {"acc": 1.0})
    (path,) = tmp_path.iterdir()
    content = record(b"x" * 200_000) + path.read_bytes()
    reader = EventReader()
    rows = [row for at in range(0, len(content), 4096) for row in reader.feed(content[at : at + 4096])]
    assert rows == [MetricRow(5, {"acc": 1.0})]


@given(st.lists(st.binary(max_size=60), max_size=5), st.booleans())
def test_any_bytes_are_survived(pieces: list[bytes], framed: bool) -> None:
    reader = EventReader()
    for piece in pieces:
        for row in reader.feed(record(piece) if framed else piece):
            assert all(isinstance(value, float) for value in row.metrics.values())


def test_nothing_is_read_behind_damage(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.add(1, {"loss": 0.5})
    file.add(2, {"loss": 0.4})
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[-30] ^= 0xFF
    reader = EventReader()
    assert [row.step for row in reader.feed(bytes(content))] == [1]
    assert reader.is_damaged
    assert reader.feed(bytes(content)) == []
