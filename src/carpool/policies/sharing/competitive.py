"""Competitive sharing: virtual shares of a device, searched, measured and kept if better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from carpool.core.draft import Draft
from carpool.core.errors import InputError, UnknownName
from carpool.core.messages import AssignApplied, Probe
from carpool.core.model import Allocation, DeviceId, Job, JobId
from carpool.core.policy import ARRIVALS_AND_ENDINGS, Cadence, Plan, Policy, Snapshot
from carpool.policies.registry import register
from carpool.policies.sharing.share_search import OBJECTIVES, Setting, ShareSearch, Tenant, Vector
from carpool.policies.sharing.shareable_devices import (
    Likeness,
    ShareableDevices,
    admit,
    describe_starts,
    likeness,
    residents_of,
    start_alone,
)
from carpool.policies.sharing.trial_log import Trial, Trials
from carpool.policies.sharing.trial_model import TrialModel, sm_sensitivity

_LEAST = 1e-9
_PATIENCE_S = 5.0  # between checks while orders are not applied yet; once they are, the policy plans
_PROBE_S = 0.3  # length of a probe, in steps at the shared rate
_FEWEST_STEPS, _MOST_STEPS = 4, 400  # of a probe
_MATTERS = 0.2  # least SM sensitivity or slowdown that counts
_STANDS_OUT, _LOSES = 1.5, 2.0  # factors over the other jobs' sensitivity and slowdown
_ISOLATED = 3  # least number of jobs among which isolated shares divide a device
_PROBED = 2  # vectors of a mix under which unknown jobs are also measured alone


@register("competitive")
@dataclass(frozen=True, slots=True)
class Competitive(Policy):
    """Start jobs on free devices; otherwise co-locate them where that adds most throughput, if it adds any.

    Whenever the jobs of a device change, their shares (and batch sizes, where allowed) are searched by estimated
    rates (`ShareSearch`). The winner is applied and measured in windows of `settle_s` until two agree; the
    measurement corrects the estimates of this mix. Up to `tries` vectors are measured, and the best one stays.
    Where rates are only guessed, whole shares are measured first and each job alone (probes), then moderate equal
    shares, then what `Slowdown` predicts from them. A job joins only if Σ P / P(alone) is estimated to grow by
    `min_gain`, or is unknown, and is released again if the measured sum stays below 1: then running one after
    another is better. After "Powering Multi-Task Federated Learning with Competitive GPU Resource Sharing" (MLSys
    poster); search and verification are ours.
    """

    cadence: ClassVar[Cadence] = Cadence(ARRIVALS_AND_ENDINGS | {AssignApplied})  # windows begin when shares hold
    shares_devices: ClassVar[bool] = True
    max_virtual: ClassVar[float] = 16.0

    objective: str = "fair"  # "fair": geometric mean of P / P(alone); "raw": their weighted sum
    most: int = 4  # residents of one device
    levels: tuple[float, ...] = (0.1, 0.15, 0.2, 0.25, 0.33, 0.4, 0.5, 0.6, 0.8, 1.0)
    tries: int = 5  # vectors measured per mix
    settle_s: float = 0.4  # shortest window; a vector is measured in two or more
    min_gain: float = 0.02

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise UnknownName("objective", self.objective, OBJECTIVES)
        if not 1 <= self.most <= self.max_virtual:
            raise InputError(f"most is {self.most}", way_out=f"Give a number from 1 to {self.max_virtual:.0f}.")
        if (
            not self.levels
            or sorted(self.levels) != list(self.levels)
            or not 0 < self.levels[0] <= self.levels[-1] <= 1
        ):
            raise InputError(f"levels are {self.levels}", way_out="Give ascending shares above 0 and up to 1.")
        if self.tries < 1 or self.settle_s <= 0.0:
            raise InputError(f"tries is {self.tries}, settle_s {self.settle_s}", way_out="Give positive numbers.")

    def plan(self, view: Snapshot) -> Plan:
        draft = Draft(view)
        trials = Trials.of(view.note)
        words: list[str] = []
        for device in list(draft.occupancy.shared_devices()):
            words += self._review(draft, trials, device)
        words += self._admit(draft, trials)
        words += self._spread(draft)
        for device in list(draft.occupancy.shared_devices()):
            words += self._retune(draft, trials, device)
        trials.forget(draft)
        note, look_at = trials.note(), trials.next_look(view.at)
        if not words and look_at is None and note == (view.note or Trials.of(None).note()):
            return Plan.NOTHING
        return draft.finish("; ".join(words) or "measuring shares", wake_at=look_at, note=note)

    def _admit(self, draft: Draft, trials: Trials) -> Iterator[str]:
        rooms = ShareableDevices(draft, self.most)
        gains: dict[tuple[object, ...], float] = {}  # of a job like this beside jobs like those
        refused: set[Likeness] = set()

        def join(job: Job) -> Allocation | None:
            allocation = self._join(draft, trials, rooms, job, gains)
            if allocation is None:
                refused.add(likeness(job))
            return allocation

        jobs = (job for job in draft.waiting() if likeness(job) not in refused)
        yield from describe_starts(list(admit(draft, rooms, jobs, join)))

    def _join(
        self, draft: Draft, trials: Trials, rooms: ShareableDevices, job: Job, gains: dict[tuple[object, ...], float]
    ) -> Allocation | None:
        """Co-locate a job where it adds most to Σ P / P(alone), if it adds enough."""
        best: tuple[float, DeviceId] | None = None
        for device in rooms.open_to(job, self.levels[0]):
            residents = residents_of(draft, device)
            if any(resident.spec.devices > 1 for resident in residents) or trials.is_refused(device, residents, job):
                continue
            mix = sorted(likeness(resident) for resident in residents)
            key = (draft.view.cluster.kind_of(device), likeness(job), *mix)
            if key not in gains:
                gains[key] = self._gain(draft, device, residents, job)
            if gains[key] >= self.min_gain and (best is None or gains[key] > best[0] + _LEAST):
                best = (gains[key], device)
        if best is None:
            return None
        allocation = Allocation.of(best[1], fraction=job.lane[0] if job.lane else self.levels[0])
        draft.assign(job, allocation)
        return allocation

    def _gain(self, draft: Draft, device: DeviceId, residents: Sequence[Job], job: Job) -> float:
        """Growth of Σ P / P(alone) with the job there, at the shares that would be chosen.

        Unknown mixes are worth a try: those that turn out worse are given up.
        """
        after = self._search(draft, device, [*residents, job])
        if after.is_guess:
            return self.min_gain
        return sum(after.best()[1]) / sum(self._search(draft, device, residents).best()[1]) - 1.0

    def _spread(self, draft: Draft) -> Iterator[str]:
        """Move jobs from shared devices, fullest first, to devices that no waiting job can use; longest jobs first."""
        if not draft.num_free or not draft.occupancy.is_shared:
            return
        at = draft.view.at
        for device in sorted(draft.occupancy.shared_devices(), key=lambda d: (-len(draft.occupancy.residents(d)), d)):
            residents = [job for job in residents_of(draft, device) if job.spec.devices == 1 and not job.lane]
            longest = sorted(residents, key=lambda job: (-job.remaining_at(at), job.seq, job.id))
            for job in longest[: len(draft.occupancy.residents(device)) - 1]:
                if start_alone(draft, job) is not None:
                    yield f"{job.id} moves to a free device"
                    break
            if not draft.num_free:
                return

    def _retune(self, draft: Draft, trials: Trials, device: DeviceId) -> Iterator[str]:
        residents = residents_of(draft, device)
        if any(resident.spec.devices > 1 for resident in residents) or trials.knows(device, residents):
            return
        if len(residents) == 1:
            trials.drop(device)
            held = draft.holding(residents[0])
            whole = _fixed(residents[0]) or Setting(1.0)
            if held is not None and held.shares[0].fraction != whole.fraction:
                self._apply(draft, device, residents, (whole,))
                yield f"{residents[0].id} is alone on {draft.view.cluster.device_name(device)}"
            return
        search = self._search(draft, device, residents)
        vector = _first_guess(search, residents) if search.is_guess else search.best()[0]
        self._apply(draft, device, residents, vector)
        trials.begin(device, residents, vector, draft.view.at + self.settle_s)
        yield f"shares {_words(vector)} on {draft.view.cluster.device_name(device)}"

    def _review(self, draft: Draft, trials: Trials, device: DeviceId) -> Iterator[str]:
        trial = trials.get(device)
        residents = residents_of(draft, device)
        if trial is None or trial.look_at is None or not trials.knows(device, residents):
            return
        at = draft.view.at
        if any(resident.is_starting for resident in residents):
            trials.put_off(device, at + _PATIENCE_S)
            return
        if at < trial.look_at and trial.marks:
            return
        search = self._search(draft, device, residents)
        trial = trial.seen(residents, is_guess=search.is_guess)
        is_first = trial.is_measured and not trial.is_overdue and len(trial.tried) < _PROBED
        unknown = search.unknown(trial.now) if is_first else []
        if unknown and not trial.has_probed:
            trial = replace(trial, has_probed=True)
            yield from self._probe(draft, trial, residents, unknown)
        if not trial.is_measured or unknown:
            trials.keep(device, trial, at + self.settle_s)
            return
        trial = trial.judged(search, search.relative(trial.rates, trial.now))
        vector = self._next(search, trial)
        is_slower = trial.most < 1.0 - self.min_gain and not search.unknown(search.equal(1.0))
        if vector is None and is_slower:
            yield from self._fall_back(draft, trials, device, residents, trial.most)
        elif vector is None:
            trials.settle(device, trial)
            self._apply(draft, device, residents, trial.best)
            yield f"keeps {_words(trial.best)} on {draft.view.cluster.device_name(device)}, measured {trial.value:.2f}"
        else:
            trials.go_on(device, trial, vector, at + self.settle_s)
            self._apply(draft, device, residents, vector)
            yield f"tries {_words(vector)} on {draft.view.cluster.device_name(device)}"

    def _probe(self, draft: Draft, trial: Trial, residents: Sequence[Job], unknown: Sequence[JobId]) -> Iterator[str]:
        """Measure jobs alone under their caps for some tenths of a second, after as long to warm up."""
        for job, rate in zip(residents, trial.rates, strict=True):
            held = draft.holding(job)
            if job.id in unknown and held is not None:
                draft.assign(job, held, Probe(max(_FEWEST_STEPS, min(_MOST_STEPS, round(rate * _PROBE_S)))))
        yield f"measures {', '.join(unknown)} alone"

    def _next(self, search: ShareSearch, trial: Trial) -> Vector | None:
        if trial.is_last(self.tries):
            return None
        tried = [each.vector for each in trial.tried]
        moderate = search.moderate()
        if search.is_guess:
            if moderate not in tried:
                return moderate
            solos = search.solos(tried)
            known = {each.vector: each.speeds for each in trial.tried}
            contrast = contrasted(search, [sm_sensitivity(own) for own in solos], known)
            if contrast is not None and contrast not in tried and len(tried) == _PROBED:
                return contrast
            specs = [tenant.spec for tenant in search.tenants]
            search = replace(search, estimates=TrialModel(search.estimates, specs, known, solos))
        else:
            search.corrections = trial.corrections
        vector, values = search.best(trial.best, tabu=tried)
        if vector not in tried and search.value(values) > trial.value * (1.0 + self.min_gain):
            return vector
        # without mixes the search only knows that a larger share is faster
        return None if search.estimates.predicts_mixes or moderate in tried else moderate

    def _fall_back(
        self, draft: Draft, trials: Trials, device: DeviceId, residents: Sequence[Job], total: float
    ) -> Iterator[str]:
        """Release the last job of a mix that is slower than running one after another."""
        last = max(residents, key=lambda job: (job.seq, job.id))
        draft.release(last)
        trials.refuse(device, residents)
        name = draft.view.cluster.device_name(device)
        yield f"{last.id} waits: sharing {name} reached only {total:.2f} of the throughput of one job alone"

    def _search(self, draft: Draft, device: DeviceId, jobs: Sequence[Job]) -> ShareSearch:
        bank = draft.view.cluster.bank_of(device)
        tenants = [Tenant(job.spec, _fixed(job)) for job in jobs]
        return ShareSearch(
            draft.view.estimates, bank.kind, tenants, self.levels, self.objective, memory_bytes=bank.memory_bytes
        )

    def _apply(self, draft: Draft, device: DeviceId, residents: Sequence[Job], vector: Vector) -> None:
        for job, setting in zip(residents, vector, strict=True):
            draft.assign(job, Allocation.of(device, fraction=setting.fraction, batch_size=setting.batch_size))


def _fixed(job: Job) -> Setting | None:
    """The setting an exact job keeps for life."""
    return Setting(job.lane[0]) if job.lane else None


def contrasted(
    search: ShareSearch, sensitivities: Sequence[float], tried: Mapping[Vector, Sequence[float]]
) -> Vector | None:
    """A vector with more share for the one job that equal shares hurt most, and isolated shares for the others.

    That job is far more SM-sensitive, or loses far more at moderate shares, to a neighbour that occupies
    multiprocessors without needing them. Equal shares cannot tell which job takes from which; this vector can. None
    if no job stands out.
    """
    losses = [1.0 / max(speed, _LEAST) - 1.0 for speed in tried[search.moderate()]]
    hurt = _standing_out(sensitivities, _STANDS_OUT)
    hurt = _standing_out(losses, _LOSES) if hurt is None else hurt
    if hurt is None:
        return None
    best = max(tried, key=lambda vector: search.value(tried[vector]))
    isolated, level = search.moderate(1.0, _ISOLATED), best[hurt].fraction
    more = min((above for above in search.levels if above > level), default=level)
    own = search.tenants[hurt].fixed or Setting(more)
    return (*isolated[:hurt], own, *isolated[hurt + 1 :])


def _standing_out(values: Sequence[float], times: float) -> int | None:
    """The index of the value that matters and exceeds the mean of the others by a factor, if there is one."""
    most = max(range(len(values)), key=lambda place: values[place])
    others = [value for place, value in enumerate(values) if place != most]
    return most if values[most] >= max(_MATTERS, times * sum(others) / len(others)) else None


def _first_guess(search: ShareSearch, residents: Sequence[Job]) -> Vector:
    """Whole shares for jobs still to be measured alone; others keep their share, or start with a moderate one."""
    unknown = search.unknown(search.equal(1.0))
    settings = []
    for job, tenant, moderate in zip(residents, search.tenants, search.moderate(), strict=True):
        held = None if job.observed is None else Setting(job.observed.shares[0].fraction, job.observed.batch_size)
        guess = Setting(1.0) if job.id in unknown else held or moderate
        settings.append(tenant.fixed or guess)
    return tuple(settings)


def _words(vector: Vector) -> str:
    return "/".join(f"{s.fraction:.0%}" + (f" with batch size {s.batch_size}" if s.batch_size else "") for s in vector)
