"""A line of the accept log with one flipped bit, put right: a checksum says not only that, but where.

A CRC is linear: a flipped bit changes it by an amount that depends only on how far the bit is from the end. That amount
is walked through from the end of the line, one bit at a time, until it is the difference between the checksum that
stands there and the one of the text. Two flipped bits are never taken for one: CRC-32 tells lines of up to 11 kB apart
that differ in fewer than four bits, and longer ones with all but certainty (P. Koopman, 32-bit cyclic redundancy codes
for Internet applications, 2002).
"""

from __future__ import annotations

from zlib import crc32

from carpool.service.accept_log import LogLine, sound_line

_POLYNOMIAL = 0xEDB88320  # of CRC-32, the lowest bit first, as zlib has it
_HEAD = 9  # the checksum in hexadecimal, and a space


def mend(piece: bytes) -> LogLine | None:
    """The line that a piece was before one bit of it was flipped; None where more than that happened to it."""
    head, rest = piece[:_HEAD], piece[_HEAD:]
    right = f"{crc32(rest):08x} ".encode("ascii")
    if len(head) == _HEAD and _bits_between(head, right) == 1:
        return sound_line(right + rest)
    try:
        amount = int(head, 16) ^ crc32(rest)
    except ValueError:
        return None
    place = _place(amount, len(rest))
    if place is None:
        return None
    byte, bit = place
    mended = bytearray(rest)
    mended[byte] ^= 1 << bit
    return sound_line(head + bytes(mended))


def _place(amount: int, length: int) -> tuple[int, int] | None:
    """The byte and the bit in it whose flip changes the checksum of so many bytes by an amount."""
    register = 1
    for shift in range(8 * length):
        register = (register >> 1) ^ (_POLYNOMIAL if register & 1 else 0)
        if register == amount:
            return length - 1 - shift // 8, 7 - shift % 8
    return None


def _bits_between(one: bytes, other: bytes) -> int:
    return sum((left ^ right).bit_count() for left, right in zip(one, other, strict=True))
