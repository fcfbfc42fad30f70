"""Web page of a running federation: a file in its folder that is rewritten as cycles close."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from carpool.federated.federation import Federation
from carpool.federated.messages import CloseCycle, Record

_EVERY_S = 1.0


class FederationPage:
    """Observer that writes the page after a cycle, at most once a second."""

    def __init__(self, path: Path, federation: Federation) -> None:
        self._path = path
        self._federation = federation
        self._records: list[Record] = []
        self._written_at = float("-inf")

    def __call__(self, record: Record) -> None:
        self._records.append(record)
        is_due = time.monotonic() >= self._written_at + _EVERY_S
        if is_due and any(isinstance(order, CloseCycle) for order in record.orders):
            self.write()

    def write(self) -> None:
        from carpool.dashboard.federation import draw_federation, federation_page

        view = draw_federation(self._path.parent.name, self._federation, self._records)
        part = self._path.with_suffix(".part")
        part.write_text(federation_page(view), encoding="utf-8")
        part.replace(self._path)
        self._written_at = time.monotonic()


@contextmanager
def live_page(folder: Path, federation: Federation) -> Iterator[list[FederationPage]]:
    """The observer that keeps ``federation.html`` of a run up to date; none without the extra ``serve``."""
    if importlib.util.find_spec("jinja2") is None or importlib.util.find_spec("fastapi") is None:
        yield []
        return
    page = FederationPage(folder / "federation.html", federation)
    try:
        yield [page]
    finally:
        page.write()
