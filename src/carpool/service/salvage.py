"""Records out of the ruins of a database: rows that SQLite does not show any more, found by their checksums.

One damaged frame makes SQLite drop all that follows it in its write-ahead log, and one damaged page all rows on it,
though their bytes are still there. A row is laid down as its checksum, the one before it, and its text, behind each
other (https://www.sqlite.org/fileformat2.html#record_format): where these three fit together and continue the chain,
the record is what was accepted. Rows longer than a page are not found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

from carpool.service.accept_log import LogLine

_BODY = re.compile(rb'\{"(?:before|record|header)"[\x20-\x7e]+')
_SIZES = (4, 6, 3, 0)  # bytes of a checksum: most often, with its highest bit set, where it is small, where it is 0


def salvage(ruins: Iterable[bytes], lost: Sequence[int], lines: Mapping[int, LogLine]) -> dict[int, LogLine]:
    """Those of the lost records that can be found in the bytes of a database; `lines` are those that are known.

    A record is tried where its neighbour is known: the line before it, or the one behind it, holds its place.
    """
    by_before: dict[int, list[tuple[int, str]]] = {}
    by_crc: dict[int, list[tuple[int, str]]] = {}
    for crc, before, body in (found for bytes_ in ruins for found in _rows(bytes_)):
        by_before.setdefault(before, []).append((crc, body))
        by_crc.setdefault(crc, []).append((before, body))
    known, saved = dict(lines), dict[int, LogLine]()
    for number in (*sorted(lost), *sorted(lost, reverse=True)):  # forwards from what is known, then backwards
        tries = []
        if number - 1 in known:
            before = known[number - 1].crc
            tries += [LogLine(number, body, crc, before) for crc, body in by_before.get(before, ())]
        if number + 1 in known:
            crc = known[number + 1].before
            tries += [LogLine(number, body, crc, before) for before, body in by_crc.get(crc, ())]
        sound = next((line for line in tries if line.is_sound), None)
        if sound is not None and number not in known:
            known[number] = saved[number] = sound
    return saved


def _rows(ruin: bytes) -> Iterator[tuple[int, int, str]]:
    """Everything that may be a row: a text that is JSON, and the two numbers before it in every size they may have."""
    decoder = json.JSONDecoder()
    for found in _BODY.finditer(ruin):
        text = found[0].decode("ascii")
        try:
            _, end = decoder.raw_decode(text)
        except ValueError:
            continue
        for first, second in product(_SIZES, _SIZES):
            place = found.start() - second
            if place >= first:
                crc, before = ruin[place - first : place], ruin[place : place + second]
                yield int.from_bytes(crc), int.from_bytes(before), text[:end]
