"""All jobs of a sweep at once: what can be wished of them, and of which of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from carpool.core.messages import Fact, JobCancelled, JobPaused, JobResumed
from carpool.core.model import Job, JobId, Phase

ArrayWish = Literal["cancel", "pause", "resume"]

_WISHES: dict[ArrayWish, tuple[Callable[[JobId], Fact], tuple[Phase, ...]]] = {
    "cancel": (JobCancelled, (Phase.BLOCKED, Phase.WAITING, Phase.RUNNING, Phase.PAUSED)),
    "pause": (JobPaused, (Phase.WAITING, Phase.RUNNING)),
    "resume": (JobResumed, (Phase.PAUSED,)),
}


def wishes_for(members: Sequence[JobId], jobs: Mapping[JobId, Job], word: ArrayWish) -> dict[JobId, Fact]:
    """The wish for each member that it can be granted for, the last first: cancelling one lets no other in."""
    make, phases = _WISHES[word]
    able = [name for name in members if name in jobs and jobs[name].phase in phases]
    return {name: make(name) for name in reversed(able)}
