"""Lines that vouch for themselves: what was altered, cut, moved or left out is seen, and the rest is still good."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.service.store.accept_log import AcceptLog, LogLine, read_log


def chain(*bodies: str) -> list[LogLine]:
    lines: list[LogLine] = []
    for number, body in enumerate(bodies):
        lines.append(LogLine.after(lines[-1].crc if lines else 0, number, body))
    return lines


def written(path: Path, lines: list[LogLine]) -> bytes:
    AcceptLog.write_anew(path, lines).close()
    return path.read_bytes()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    lines = chain("header", "a", "b")
    log = AcceptLog.write_anew(tmp_path / "log", lines[:1])
    log.add(lines[1:])
    log.close()
    reading = read_log((tmp_path / "log").read_bytes())
    assert list(reading.lines.values()) == lines
    assert (reading.damaged, reading.cut) == ((), False)


def test_a_line_must_follow_the_last(tmp_path: Path) -> None:
    lines = chain("header", "a", "b")
    log = AcceptLog.write_anew(tmp_path / "log", lines[:1])
    with pytest.raises(AssertionError, match="checksum"):
        log.add(lines[2:])
    log.add(lines[1:])  # the refused line has left no trace
    log.close()
    assert list(read_log((tmp_path / "log").read_bytes()).lines.values()) == lines


def test_rewinding_takes_back_what_was_added(tmp_path: Path) -> None:
    lines = chain("header", "a", "b")
    log = AcceptLog.write_anew(tmp_path / "log", lines[:2])
    end = log.end
    log.add(lines[2:])
    log.rewind(*end)
    log.add(lines[2:])
    log.close()
    assert list(read_log((tmp_path / "log").read_bytes()).lines.values()) == lines


_CONTENT_LINES = chain("header", *(f'{{"n":{number}}}' for number in range(12)))


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(tmp_path_factory.mktemp("log") / "log", _CONTENT_LINES)


@settings(max_examples=200)
@given(data=st.data())
def test_a_flipped_bit_costs_the_line_it_is_in_and_no_other(content: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(content) - 1), label="byte")
    bit = data.draw(st.integers(0, 7), label="bit")
    flipped = bytearray(content)
    flipped[place] ^= 1 << bit
    reading = read_log(bytes(flipped))
    hit = content[:place].count(b"\n")
    touched = {hit, hit + 1} if content[place : place + 1] == b"\n" else {hit}
    for line in _CONTENT_LINES:
        if line.number not in touched:
            assert reading.lines.get(line.number) == line
    assert all(line in _CONTENT_LINES for line in reading.lines.values()), "no line that was never written"
    assert reading.damaged or not reading.is_ended


@given(ends=st.sets(st.integers(0, len(_CONTENT_LINES) - 1), min_size=1))
def test_altered_ends_of_lines_cost_no_line(content: bytes, ends: set[int]) -> None:
    pieces = content.split(b"\n")[:-1]
    altered = b"".join(piece + (b"\x1a" if place in ends else b"\n") for place, piece in enumerate(pieces))
    reading = read_log(altered)
    assert list(reading.lines.values()) == _CONTENT_LINES
    assert (reading.damaged, reading.cut, reading.is_ended) == ((), False, False)


@settings(max_examples=100)
@given(data=st.data())
def test_a_cut_file_keeps_its_whole_lines(content: bytes, data: st.DataObject) -> None:
    kept = content[: data.draw(st.integers(0, len(content)))]
    reading = read_log(kept)
    whole = _CONTENT_LINES[: (kept + b"\n").count(b"\n")] if content[len(kept) :].startswith(b"\n") else None
    assert list(reading.lines.values()) == (whole or _CONTENT_LINES[: kept.count(b"\n")])
    assert reading.is_ended == (not kept or kept.endswith(b"\n"))
    assert reading.cut == (not reading.is_ended and whole is None)
    assert reading.damaged == ()
