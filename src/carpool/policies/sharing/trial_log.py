"""Trial log: share vectors measured on each device, kept in the policy's note between plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from carpool.core.draft import Draft
from carpool.core.model import DeviceId, Job, JobId
from carpool.policies.sharing.share_search import Setting, ShareSearch, Vector

_CORRECTED = (0.2, 5.0)  # how far one measurement may move an estimate
_SPANS = (1, 2, 4)  # checks that a window may last
_REMEMBERED = 2 * _SPANS[-1] + 1  # looks
_STEADY = 0.08  # largest relative difference between two windows that agree: writing a mirror costs 5 %
_ALIKE = 0.01  # values that measuring cannot distinguish: then the earlier vector, which is simpler, counts as better
_MOST_SILENT = 6  # successive checks without a report
# checks of a vector whose rates do not settle, whose jobs cannot be measured alone, or do not all report
_MOST_LOOKS = 24
_FEWEST_STEPS = 4  # of each job in a window, if there is no estimate for it: the first few steps differ from the others
_MOST_AWAITED = 150  # successive checks at which some job has not reported, if there is no estimate for it


class Tried(NamedTuple):
    """A measured vector, its objective, and speeds relative to alone."""

    vector: Vector
    value: float
    speeds: tuple[float, ...] = ()


class Mark(NamedTuple):
    """A job's progress at a look."""

    done: float
    at: float


Marks = tuple[Mark, ...]  # of all jobs of a mix


@dataclass(frozen=True, slots=True)
class Trial:
    """One mix on one device: measured vectors, and the state of the current measurement."""

    mix: tuple[JobId, ...]
    now: Vector
    look_at: float | None  # None: settled
    tried: tuple[Tried, ...] = ()
    corrections: Mapping[JobId, float] = field(default_factory=dict)
    marks: tuple[Marks, ...] = ()  # at the last looks
    rates: tuple[float, ...] = ()  # of the vector, once it is measured
    looks: int = 0  # that ended a window, or since it was measured
    waits: int = 0  # looks since then at which a job had not reported
    is_measured: bool = False  # `rates` are those of the vector
    has_probed: bool = False  # jobs of it were sent to be measured alone

    @property
    def best(self) -> Vector:
        """The best measured vector, preferring an earlier one within noise; the current one while none is measured."""
        return next((each.vector for each in self.tried if each.value >= self.value * (1.0 - _ALIKE)), self.now)

    @property
    def value(self) -> float:
        return max((each.value for each in self.tried), default=0.0)

    @property
    def most(self) -> float:
        """The largest Σ P / P(alone) of a vector."""
        return max((sum(each.speeds) for each in self.tried), default=0.0)

    def is_last(self, tries: int) -> bool:
        return len(self.tried) >= tries

    def seen(self, residents: Sequence[Job], *, is_guess: bool = False) -> Trial:
        """Record a look at the jobs; two consecutive windows that agree make a measurement.

        Windows span one, two or four looks, since report times jitter. None ends before every job has reported:
        slow steps and loading kernels take longer. Where jobs do not report between orders, estimated rates are
        used after a while, unless they are a guess.
        """
        looked = replace(self, looks=self.looks + 1, waits=0)
        if self.is_measured:
            return looked
        now = tuple(Mark(job.done, job.as_of) for job in residents)
        fewest = _FEWEST_STEPS if is_guess else 0
        last = self.marks[-1] if self.marks else ()
        has_moved = [new.at > old.at and new.done >= old.done + fewest for new, old in zip(now, last, strict=False)]
        most = _MOST_AWAITED if is_guess else _MOST_LOOKS if any(has_moved) else _MOST_SILENT
        if not all(has_moved) and self.waits < most:
            return replace(self, waits=self.waits + 1)
        marks = (*self.marks, now)[-_REMEMBERED:]
        for span in _SPANS:
            if len(marks) > 2 * span:
                before = _rates(marks[-1 - 2 * span], marks[-1 - span], residents)
                after = _rates(marks[-1 - span], now, residents)
                both = list(zip(before, after, strict=True))
                if all(abs(new - old) <= _STEADY * max(new, old) for old, new in both):
                    return looked._measured(marks, tuple((old + new) / 2.0 for old, new in both))
        if looked.is_overdue:
            return looked._measured(marks, _rates(marks[len(marks) // 2 - 1], now, residents))
        return replace(looked, marks=marks)

    def _measured(self, marks: tuple[Marks, ...], rates: tuple[float, ...]) -> Trial:
        return replace(self, marks=marks, rates=rates, is_measured=True, looks=0)

    @property
    def is_overdue(self) -> bool:
        return self.looks >= _MOST_LOOKS

    def judged(self, search: ShareSearch, measured: Sequence[float]) -> Trial:
        believed = search.believed([self.now])[0]
        low, high = _CORRECTED
        corrections = {
            job: min(high, max(low, real / thought)) if thought > 0.0 else 1.0
            for job, real, thought in zip(self.mix, measured, believed, strict=True)
        }
        tried = Tried(self.now, search.value(measured), tuple(measured))
        return replace(self, tried=(*self.tried, tried), corrections=corrections)


class Trials:
    """The trials of all devices, read from and written to a plan's note."""

    def __init__(self, trials: dict[DeviceId, Trial], refused: dict[DeviceId, list[tuple[JobId, ...]]]) -> None:
        self._trials = trials
        self._refused = refused  # mixes that were slower than taking turns

    @classmethod
    def of(cls, note: object) -> Trials:
        if not isinstance(note, Mapping):
            return cls({}, {})
        trials = {DeviceId(int(device)): _trial(entry) for device, entry in note["trials"].items()}
        refused = {
            DeviceId(int(device)): [tuple(map(JobId, mix)) for mix in mixes]
            for device, mixes in note["refused"].items()
        }
        return cls(trials, refused)

    def note(self) -> dict[str, Any]:
        return {
            "trials": {str(device): _entry(trial) for device, trial in sorted(self._trials.items())},
            "refused": {str(d): [list(mix) for mix in mixes] for d, mixes in sorted(self._refused.items())},
        }

    def next_look(self, at: float) -> float | None:
        due = [trial.look_at for trial in self._trials.values() if trial.look_at is not None]
        return min((look_at for look_at in due if look_at > at), default=None)

    def get(self, device: DeviceId) -> Trial | None:
        return self._trials.get(device)

    def knows(self, device: DeviceId, residents: Sequence[Job]) -> bool:
        trial = self._trials.get(device)
        return trial is not None and trial.mix == _mix(residents)

    def is_refused(self, device: DeviceId, residents: Sequence[Job], newcomer: Job) -> bool:
        """Whether the newcomer beside these jobs was slower than running one after another."""
        return tuple(sorted((*_mix(residents), newcomer.id))) in self._refused.get(device, ())

    def begin(self, device: DeviceId, residents: Sequence[Job], vector: Vector, look_at: float) -> None:
        self._trials[device] = Trial(_mix(residents), vector, look_at)

    def go_on(self, device: DeviceId, trial: Trial, vector: Vector, look_at: float) -> None:
        fresh = replace(trial, marks=(), rates=(), looks=0, waits=0, is_measured=False, has_probed=False)
        self._trials[device] = replace(fresh, now=vector, look_at=look_at)

    def keep(self, device: DeviceId, trial: Trial, look_at: float) -> None:
        self._trials[device] = replace(trial, look_at=look_at)

    def put_off(self, device: DeviceId, look_at: float) -> None:
        """Restart the measurement later, since some jobs do not run as ordered yet."""
        self._trials[device] = replace(self._trials[device], look_at=look_at, marks=())

    def settle(self, device: DeviceId, trial: Trial, vector: Vector | None = None) -> None:
        """Keep a vector, by default the best measured one, until the mix changes."""
        self._trials[device] = replace(trial, now=vector or trial.best, look_at=None)

    def refuse(self, device: DeviceId, residents: Sequence[Job]) -> None:
        self._refused.setdefault(device, []).append(tuple(sorted(_mix(residents))))
        self._trials.pop(device, None)

    def drop(self, device: DeviceId) -> None:
        self._trials.pop(device, None)

    def forget(self, draft: Draft) -> None:
        held = set(draft.occupancy.shared_devices())
        jobs = draft.view.jobs
        self._trials = {device: trial for device, trial in self._trials.items() if device in held}
        kept = {
            device: [mix for mix in mixes if all(job in jobs for job in mix)]
            for device, mixes in self._refused.items()
            if device in held
        }
        self._refused = {device: mixes for device, mixes in kept.items() if mixes}


def _mix(residents: Sequence[Job]) -> tuple[JobId, ...]:
    return tuple(job.id for job in residents)


def _entry(trial: Trial) -> dict[str, Any]:
    return {
        "mix": list(trial.mix),
        "now": [list(setting) for setting in trial.now],
        "look_at": trial.look_at,
        "tried": [[[list(s) for s in each.vector], each.value, list(each.speeds)] for each in trial.tried],
        "corrections": dict(trial.corrections),
        "marks": [[list(mark) for mark in marks] for marks in trial.marks],
        "rates": list(trial.rates),
        "looks": trial.looks,
        "waits": trial.waits,
        "is_measured": trial.is_measured,
        "has_probed": trial.has_probed,
    }


def _trial(entry: Mapping[str, Any]) -> Trial:
    return Trial(
        mix=tuple(map(JobId, entry["mix"])),
        now=_vector(entry["now"]),
        look_at=entry["look_at"],
        tried=tuple(Tried(_vector(vector), value, tuple(*speeds)) for vector, value, *speeds in entry["tried"]),
        corrections={JobId(job): factor for job, factor in entry["corrections"].items()},
        marks=_marks(entry.get("marks", ())),
        rates=tuple(entry.get("rates", ())),
        looks=entry.get("looks", 0),
        waits=entry.get("waits", 0),
        is_measured=entry.get("is_measured", False),
        has_probed=entry.get("has_probed", False),
    )


def _marks(looks: Sequence[Any]) -> tuple[Marks, ...]:
    """Marks of older versions with a single look are dropped: the vector is measured again."""
    is_old = any(not isinstance(mark, Sequence) for marks in looks for mark in marks)
    return () if is_old else tuple(tuple(Mark(*mark) for mark in marks) for marks in looks)


def _rates(then: Marks, now: Marks, residents: Sequence[Job]) -> tuple[float, ...]:
    """Work per second between two looks; the estimate if nothing was reported."""
    return tuple(
        (new.done - old.done) / (new.at - old.at) if new.at > old.at else job.rate
        for old, new, job in zip(then, now, residents, strict=True)
    )


def _vector(settings: Sequence[Sequence[Any]]) -> Vector:
    return tuple(Setting(float(fraction), int(batch)) for fraction, batch in settings)
