"""What a policy remembers from plan to plan: widths tried, lengths of ended jobs by model, what kinds cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from carpool.core.draft import Draft
from carpool.core.model import Job, JobId
from carpool.core.policy import Snapshot
from carpool.policies.outlook import Outlook

_NEWEST = 0.3  # weight of the last ended job of a model, once there are some
_NEARLY = 0.1  # of a length is left at least, until it is clear that the job is longer than its like


@dataclass(slots=True)
class Experience:
    """Comes out of a plan's note and goes back into the next one."""

    tried: dict[JobId, int] = field(default_factory=dict)  # most devices that a job has had
    done: dict[JobId, tuple[str, float]] = field(default_factory=dict)  # model and work done when it was last seen
    lengths: dict[str, tuple[int, float]] = field(default_factory=dict)  # by model: ended jobs, and their mean work
    outlook: Outlook | None = None

    @classmethod
    def of(cls, view: Snapshot) -> Experience:
        """What the last plan noted; of jobs that are gone, how long they were."""
        note = cast(Mapping[str, Any], view.note or {})
        experience = cls(
            {JobId(job): int(count) for job, count in note.get("tried", {}).items() if job in view.jobs},
            {},
            {model: (int(count), float(mean)) for model, (count, mean) in note.get("lengths", {}).items()},
            Outlook.of_note(note.get("outlook")),
        )
        for job, (model, done) in note.get("done", {}).items():
            if job not in view.jobs and done > 0.0:
                experience._end(str(model), float(done))
        return experience

    def see(self, jobs: Sequence[Job], draft: Draft) -> None:
        """What jobs have once a draft is carried out, they have tried."""
        changes = draft.changes
        for job in jobs:
            if job.desired is None and job.spec.id not in changes:
                continue
            held = draft.holding(job)
            if held is not None:
                self.tried[job.id] = max(self.tried.get(job.id, 0), held.num_devices)

    def note(self, view: Snapshot, *, lengths: bool) -> dict[str, object]:
        """For the next plan; without lengths where those are declared anyway."""
        told: dict[str, object] = {"tried": self.tried}
        if self.outlook is not None:
            told["outlook"] = self.outlook.as_note()
        if lengths:
            told["done"] = {job.id: [job.spec.model, job.done_at(view.at)] for job in view.active()}
            told["lengths"] = {model: list(known) for model, known in self.lengths.items()}
        return told

    def left(self, job: Job, at: float) -> float | None:
        """Work left if the job is as long as its like were; None where nothing tells."""
        _, mean = self.lengths.get(job.spec.model, (0, 0.0))
        done = job.done_at(at)
        return max(mean - done, _NEARLY * mean) if done < (1.0 + _NEARLY) * mean else None

    def _end(self, model: str, done: float) -> None:
        count, mean = self.lengths.get(model, (0, 0.0))
        self.lengths[model] = (count + 1, mean + max(_NEWEST, 1.0 / (count + 1)) * (done - mean))
