"""How far the trainings of many jobs have come, from the losses they report: what remains to a target, and how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from carpool.core.errors import InputError
from carpool.core.estimates import Estimate
from carpool.core.model import JobId
from carpool.predictors.curve import LossCurve

_SCHEMA = 1


class Aim(NamedTuple):
    """A job ends when the mean loss of its last `window` steps is at most `loss`."""

    loss: float
    window: int = 10


class LossCurves:
    """One loss curve for every job that reports losses, and the aims of those that end at one.

    No estimator by itself: it knows nothing of rates. Estimators own one, feed it, and ask it first.
    """

    def __init__(self) -> None:
        self.version = 0
        self._curves: dict[JobId, LossCurve] = {}
        self._aims: dict[JobId, Aim] = {}

    def aim(self, job: JobId, aim: Aim) -> None:
        """The loss at which a job ends has become known."""
        if self._aims.get(job) != aim:
            self._aims[job] = aim
            self.version += 1

    def learn(self, job: JobId, step: float, loss: float | None) -> None:
        """Take in what a job says of its loss after so many steps."""
        if loss is not None:
            self._curves.setdefault(job, LossCurve()).partial_fit(step, loss)
            self.version += 1

    def forget(self, job: JobId) -> None:
        """A job is over, and nobody will ask for it any more."""
        self._curves.pop(job, None)
        self._aims.pop(job, None)

    def remaining(self, job: JobId, done: float) -> Estimate | None:
        """Steps from `done` to the job's aim; None where there is none, or too little was heard."""
        curve, aim = self._curves.get(job), self._aims.get(job)
        if curve is None or aim is None or not curve.is_known:
            return None
        left = curve.remaining_to(aim.loss, aim.window)
        return Estimate(max(0.0, left.mean - max(0.0, done - curve.last_step)), left.std)

    def learning(self, job: JobId, steps: float) -> tuple[float, float] | None:
        """How far the loss fell in the last `steps` steps, and its mean in a tenth of them; None before there are."""
        curve = self._curves.get(job)
        fall = None if curve is None else curve.decline(steps)
        return None if curve is None or fall is None else (fall, curve.lately(0.1 * steps))

    def totals(self) -> list[float]:
        """The whole lengths of the jobs of which they are known by now, in steps."""
        totals: list[float] = []
        for job, curve in self._curves.items():
            left = self.remaining(job, curve.last_step)
            if left is not None:
                totals.append(curve.last_step + left.mean)
        return totals

    # -------------------------------------------------------------------------------------------------------- keeping
    def save(self, path: Path) -> None:
        """Write everything learned to a file."""
        curves = {job: curve.state() for job, curve in self._curves.items()}
        document = {"schema": _SCHEMA, "curves": curves, "aims": self._aims}
        path.write_text(json.dumps(document) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> LossCurves:
        """Go on from what a file kept."""
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("schema", 0) > _SCHEMA:
            raise InputError(
                f"has schema {document['schema']}; this version reads up to {_SCHEMA}",
                where=str(path),
                way_out="Read it with the version that wrote it.",
            )
        found = cls()
        found._curves = {JobId(job): LossCurve.restored(state) for job, state in document["curves"].items()}
        found._aims = {JobId(job): Aim(*aim) for job, aim in document["aims"].items()}
        return found
