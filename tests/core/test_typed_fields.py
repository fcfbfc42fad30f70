"""Texts of jobs become printable when they are decoded, whatever a job puts into them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from carpool.core.typed_fields import MAX_TEXT, decode_fields


@dataclass(frozen=True, slots=True)
class Said:
    text: str


@given(st.text(st.characters(exclude_categories=())))
@example("\ud800 \x00 \x1b[2J \u202e")
@example("x" * (2 * MAX_TEXT))
@example("\x00" * MAX_TEXT)
def test_a_text_can_be_printed_and_encoded(text: str) -> None:
    read = decode_fields(Said, {"text": text}).text
    assert all(
        line.replace("\t", "").replace("\u3000", "").isprintable() for line in read.split("\n") if line.isascii()
    )
    assert not set(read) & set("\x00\x1b\x7f\u202e\ud800")
    read.encode()
    assert decode_fields(Said, {"text": read}).text == read, "a replayed journal has the same text"


def test_a_long_text_is_cut_and_says_so() -> None:
    text = decode_fields(Said, {"text": "x" * (3 * MAX_TEXT)}).text
    assert len(text) <= MAX_TEXT
    assert text.endswith(f"(cut: {3 * MAX_TEXT} characters)")


def test_ordinary_texts_stay_as_they_are() -> None:
    text = "line\n\tnaïve café\u00a0… 学"
    assert decode_fields(Said, {"text": text}).text == text
