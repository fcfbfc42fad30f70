"""Amounts with units: what is accepted, and what an error says."""

import pytest

from carpool.core.errors import InputError
from carpool.core.units import parse_bytes


def test_decimal_and_binary_units() -> None:
    assert [parse_bytes(text, "disk") for text in ("1TB", "2 TiB", "1.5GiB", "7")] == [10**12, 2 << 40, 3 << 29, 7]


@pytest.mark.parametrize(
    ("text", "words"), [("9000TiB", "at most 8192 TiB"), ("-1GiB", "not an amount"), ("1GIB", "not")]
)
def test_amounts_that_are_too_large_are_told_apart_from_others(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_bytes(text, "disk")
