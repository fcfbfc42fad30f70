"""One flipped bit of a line is put right wherever it is; more are not taken for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.service.accept_log import LogLine
from carpool.service.mending import mend

LINE = LogLine.after(0xDEADBEEF, 17, '{"record":{"at":3.5,"facts":[{"fact":"JobSubmitted","spec":{"id":"mlp-3"}}]}}')
TEXT = f"{LINE.crc:08x} {LINE.before:08x} {LINE.number} {LINE.body}".encode("ascii")


def flipped(*bits: int) -> bytes:
    text = bytearray(TEXT)
    for bit in bits:
        text[bit // 8] ^= 1 << bit % 8
    return bytes(text)


def test_any_one_bit_is_put_right() -> None:
    assert [bit for bit in range(8 * len(TEXT)) if mend(flipped(bit)) != LINE] == []


@given(st.lists(st.integers(0, 8 * len(TEXT) - 1), min_size=2, max_size=6, unique=True))
def test_several_are_not_taken_for_one(bits: list[int]) -> None:
    assert mend(flipped(*bits)) in (None, LINE)  # the latter where both are in the checksum's own digits


@pytest.mark.parametrize("piece", [b"", b"x", b"\n" * 9, TEXT[:40], b"0" * 200])
def test_what_never_was_a_line_is_none(piece: bytes) -> None:
    assert mend(piece) is None
