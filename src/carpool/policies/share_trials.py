"""What has been tried on each device, carried from plan to plan in the policy's note."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from carpool.core.draft import Draft
from carpool.core.model import DeviceId, Job, JobId
from carpool.policies.share_search import Setting, ShareSearch, Vector

_CORRECTED = (0.2, 5.0)  # how far one measurement may move what is believed


@dataclass(frozen=True, slots=True)
class Trial:
    """One mix on one device: the vectors measured so far with their values, and when the present one is judged."""

    mix: tuple[JobId, ...]
    now: Vector
    look_at: float | None  # None: settled
    tried: tuple[tuple[Vector, float], ...] = ()
    corrections: Mapping[JobId, float] = field(default_factory=dict)

    @property
    def best(self) -> Vector:
        """The best vector measured; the present one while none is."""
        return max(self.tried, key=lambda pair: pair[1])[0] if self.tried else self.now

    @property
    def value(self) -> float:
        """What the best one reached."""
        return max((value for _, value in self.tried), default=0.0)

    def is_last(self, tries: int) -> bool:
        """Whether no further vector is to be measured."""
        return len(self.tried) >= tries

    def judged(self, search: ShareSearch, measured: Sequence[float]) -> Trial:
        """With the present vector's value, and beliefs corrected by what it showed."""
        believed = search.believed([self.now])[0]
        low, high = _CORRECTED
        corrections = {
            job: min(high, max(low, real / thought)) if thought > 0.0 else 1.0
            for job, real, thought in zip(self.mix, measured, believed, strict=True)
        }
        return replace(self, tried=(*self.tried, (self.now, search.value(measured))), corrections=corrections)


class Trials:
    """The trials of all devices; read from a note and written to one."""

    def __init__(self, trials: dict[DeviceId, Trial], refused: dict[DeviceId, list[tuple[JobId, ...]]]) -> None:
        self._trials = trials
        self._refused = refused  # mixes that were slower than taking turns

    @classmethod
    def of(cls, note: object) -> Trials:
        """From what `note` gave."""
        if not isinstance(note, Mapping):
            return cls({}, {})
        trials = {DeviceId(int(device)): _trial(entry) for device, entry in note["trials"].items()}
        refused = {
            DeviceId(int(device)): [tuple(map(JobId, mix)) for mix in mixes]
            for device, mixes in note["refused"].items()
        }
        return cls(trials, refused)

    def note(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "trials": {str(device): _entry(trial) for device, trial in sorted(self._trials.items())},
            "refused": {str(d): [list(mix) for mix in mixes] for d, mixes in sorted(self._refused.items())},
        }

    def next_look(self, at: float) -> float | None:
        """When the next vector is to be judged."""
        due = [trial.look_at for trial in self._trials.values() if trial.look_at is not None]
        return min((look_at for look_at in due if look_at > at), default=None)

    def get(self, device: DeviceId) -> Trial | None:
        """The trial of a device."""
        return self._trials.get(device)

    def knows(self, device: DeviceId, residents: Sequence[Job]) -> bool:
        """Whether the device's trial is of these very jobs."""
        trial = self._trials.get(device)
        return trial is not None and trial.mix == _mix(residents)

    def is_refused(self, device: DeviceId, residents: Sequence[Job], newcomer: Job) -> bool:
        """Whether the newcomer beside these was slower than taking turns."""
        return tuple(sorted((*_mix(residents), newcomer.id))) in self._refused.get(device, ())

    # -------------------------------------------------------------------------------------------------------- changing
    def begin(self, device: DeviceId, residents: Sequence[Job], vector: Vector, look_at: float) -> None:
        """A new mix runs under its first vector."""
        self._trials[device] = Trial(_mix(residents), vector, look_at)

    def go_on(self, device: DeviceId, trial: Trial, vector: Vector, look_at: float) -> None:
        """The next vector is tried."""
        self._trials[device] = replace(trial, now=vector, look_at=look_at)

    def put_off(self, device: DeviceId, look_at: float) -> None:
        """Not all jobs run yet: judge later."""
        self._trials[device] = replace(self._trials[device], look_at=look_at)

    def settle(self, device: DeviceId, trial: Trial, vector: Vector | None = None) -> None:
        """A vector, the best measured one unless given, stays until the mix changes."""
        self._trials[device] = replace(trial, now=vector or trial.best, look_at=None)

    def refuse(self, device: DeviceId, residents: Sequence[Job]) -> None:
        """Remember a mix that does not pay; the rest of it is tuned anew."""
        self._refused.setdefault(device, []).append(tuple(sorted(_mix(residents))))
        self._trials.pop(device, None)

    def drop(self, device: DeviceId) -> None:
        """Nobody shares the device any more."""
        self._trials.pop(device, None)

    def forget(self, draft: Draft) -> None:
        """Leave out devices that nobody holds, and mixes with jobs that are over."""
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
        "tried": [[[list(setting) for setting in vector], value] for vector, value in trial.tried],
        "corrections": dict(trial.corrections),
    }


def _trial(entry: Mapping[str, Any]) -> Trial:
    return Trial(
        tuple(map(JobId, entry["mix"])),
        _vector(entry["now"]),
        entry["look_at"],
        tuple((_vector(vector), value) for vector, value in entry["tried"]),
        {JobId(job): factor for job, factor in entry["corrections"].items()},
    )


def _vector(settings: Sequence[Sequence[Any]]) -> Vector:
    return tuple(Setting(float(fraction), int(batch)) for fraction, batch in settings)
