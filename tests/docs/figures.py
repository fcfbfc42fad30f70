"""Checks of printed figures against result files: the tools for it.

A check names a page (or ``page#heading`` for one section), a piece of its text with ``{}`` for each number, and the
values those numbers must show. A printed number agrees with a value if it is the value rounded to the printed digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NUMBER = r"([+−-]?\d[\d,]*(?:\.\d+)?)"

Check = tuple[str, str, Sequence[float | None]]  # None: a number that no result file holds


@cache
def document(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def results(name: str) -> Any:
    return document(name)["results"]


@cache
def text_of(page: str) -> str:
    """A page, or one section of it, with all white space as single spaces."""
    path, _, heading = page.partition("#")
    text = (ROOT / path).read_text(encoding="utf-8")
    if heading:
        (text,) = re.findall(rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join(text.split())


def problems(page: str, template: str, values: Sequence[float | None]) -> Iterator[str]:
    """What is wrong with the numbers that a page shows in the places of ``{}``."""
    pattern = NUMBER.join(re.escape(piece) for piece in " ".join(template.split()).split("{}"))
    found = re.findall(f"(?:^|(?<=[^\\d.,])){pattern}", text_of(page))
    if len(found) != 1:
        yield f"{page} says it {len(found)} times: {template}"
        return
    shown = [found[0]] if isinstance(found[0], str) else list(found[0])
    for text, value in zip(shown, values, strict=True):
        if value is not None and not agrees(text, value):
            yield f"{page}: {template} shows {text}, measured {value}"


def agrees(shown: str, value: float) -> bool:
    digits = len(shown.partition(".")[2])
    return abs(float(shown.replace(",", "").replace("−", "-")) - value) <= 0.505 / float(10**digits)


def row(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> Mapping[str, Any]:
    """The row with these values; the last one where a benchmark was repeated."""
    found = [each for each in rows if all(each.get(key) == value for key, value in wanted.items())]
    assert found, wanted
    return found[-1]


def off(one: float, other: float) -> float:
    """By how many per cent a figure differs from another."""
    return 100 * (one / other - 1)
