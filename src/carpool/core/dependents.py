"""Which jobs wait for which others to finish."""

from __future__ import annotations

from collections.abc import Mapping

from carpool.core.model import JobId, JobSpec, Phase


class Dependents:
    """Jobs by those they wait for."""

    def __init__(self) -> None:
        self._by_needed: dict[JobId, list[JobId]] = {}

    def add(self, spec: JobSpec, ended: Mapping[JobId, Phase]) -> bool:
        """Have a job told when those it waits for are over; whether there are any."""
        if not spec.after:
            return False
        needed = [name for name in spec.after if ended.get(name) is not Phase.FINISHED]
        for name in needed:
            self._by_needed.setdefault(name, []).append(spec.id)
        return bool(needed)

    def of(self, job: JobId) -> list[JobId]:
        """Those that waited for a job that is over, once."""
        return self._by_needed.pop(job, [])
