"""Making many job specs at once."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain, repeat

from carpool.core.model import JobSpec

# A frozen dataclass sets its fields one by one through `object.__setattr__`: 1.5 us for one spec, of 3 us that a row
# of a trace may take. Setting field by field for a whole block through the slots themselves takes half of that.
_SETTERS = tuple([(getattr(JobSpec, entry.name).__set__, entry.default) for entry in fields(JobSpec)])


def make_specs(ids: Sequence[str], *columns: Iterable[object]) -> list[JobSpec]:
    """Specs from columns in the order of `JobSpec`'s fields; the fields after the last column have their defaults."""
    specs = list(map(object.__new__, repeat(JobSpec, len(ids))))
    given = chain([ids], columns)
    for set_field, default in _SETTERS:
        deque(map(set_field, specs, next(given, repeat(default))), maxlen=0)
    return specs


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection: a million new objects, none of them in a cycle, would make it double the time.

    Afterwards they count as old, so that the next collection of young objects does not walk over all of them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_freeze_count() == 0:  # else someone froze objects on purpose, and they shall stay so
                gc.freeze()
                gc.unfreeze()
            gc.enable()
