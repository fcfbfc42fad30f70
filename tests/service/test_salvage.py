"""Rows that SQLite no longer shows are found in its bytes, by the chain of their checksums, and nothing else is."""

from pathlib import Path

import pytest

from carpool.service.accept_log import LogLine
from carpool.service.database import Database
from carpool.service.salvage import salvage

NUM_LINES = 30


@pytest.fixture(scope="module")
def lines() -> dict[int, LogLine]:
    chain: dict[int, LogLine] = {}
    for number in range(NUM_LINES):
        body = f'{{"record":{{"at":{number}.5,"facts":["{"x" * (number % 7)}"]}}}}'
        chain[number] = LogLine.after(chain[number - 1].crc if number else 0, number, body)
    return chain


@pytest.fixture
def ruin(tmp_path: Path, lines: dict[int, LogLine]) -> bytes:
    """The bytes of a database."""
    database = Database(tmp_path / "journal.sqlite")
    database.add(lines.values())
    database.close()
    return (tmp_path / "journal.sqlite").read_bytes()


@pytest.mark.parametrize("lost", [[3], [0], [5, 6, 7], [NUM_LINES - 1], list(range(1, NUM_LINES))])
def test_what_is_lost_is_found_from_its_neighbours_on(ruin: bytes, lines: dict[int, LogLine], lost: list[int]) -> None:
    known = {number: line for number, line in lines.items() if number not in lost}
    assert salvage([b"", ruin], lost, known) == {number: lines[number] for number in lost}


def test_a_row_that_was_altered_is_not_taken_for_one(ruin: bytes, lines: dict[int, LogLine]) -> None:
    harmed = ruin.replace(b'"at":6.5', b'"at":7.5')
    assert harmed != ruin
    known = {number: line for number, line in lines.items() if number not in (5, 6)}
    assert salvage([harmed], [5, 6], known) == {5: lines[5]}
