"""Dependencies between jobs: every one exists, and there is no cycle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from carpool.core.errors import InputError, UnknownName
from carpool.core.model import JobId


def check_dependencies(after: Mapping[JobId, Sequence[JobId]], where: str) -> None:
    """InputError where a job waits for one that does not exist, or where jobs wait for each other."""
    for name, needed in after.items():
        for other in needed:
            if other not in after:
                raise UnknownName("job", other, after, where=f"{where}: job {name!r}: after")
    settled: set[JobId] = set()
    left = dict(after)
    while ready := [name for name, needed in left.items() if settled.issuperset(needed)]:
        settled.update(ready)
        for name in ready:
            del left[name]
    if left:
        raise InputError(
            f"jobs depend on each other in a cycle: {_cycle(left)}", where=where, way_out="Remove one 'after'."
        )


def _cycle(after: Mapping[JobId, Sequence[JobId]]) -> str:
    walked = [next(iter(after))]
    while True:
        following = next(name for name in after[walked[-1]] if name in after)
        if following in walked:
            return " after ".join([*walked[walked.index(following) :], following])
        walked.append(following)
