"""A ground: settings in which policies are compared, an objective, and known results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One policy in one setting; less is better."""

    setting: str
    policy: str
    figure: float
    cpu_s: float
    more: dict[str, float] = {}  # noqa: RUF012  # never changed


class Limit(NamedTuple):
    """What the default must reach in a setting: a figure, or a part of another policy's figure."""

    setting: str
    policy: str
    most: float
    of: str = ""  # empty: `most` is the figure itself


@dataclass(frozen=True, slots=True)
class Ground:
    """Runs its settings one after another and yields rows as they come."""

    name: str
    objective: str  # of the figures, in words
    run: Callable[[Path, bool], Iterator[Row]]  # (folder of the data, whether to be quick)
    needs: str = ""  # folder below the data that must be there
    limits: Sequence[Limit] = ()
