"""IADeep: co-locates jobs where predicted completion grows least, and tunes all batch sizes there."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite
from typing import ClassVar, NamedTuple

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.model import Allocation, DeviceId, Job, JobId, Kind
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.queue import twin_key
from carpool.core.topology import Placement
from carpool.policies.estimator_queries import memory_of, worth_of_step
from carpool.policies.iadeep.batch_tuning import BatchTuning, best_alone, is_tunable
from carpool.policies.registry import register
from carpool.policies.sharing.share_search import Setting, Vector
from carpool.policies.sharing.shareable_devices import (
    Likeness,
    ShareableDevices,
    admit,
    describe_starts,
    likeness,
    residents_of,
    start_alone,
)
from carpool.policies.sharing.trial_log import Trials, Tried

_LEAST = 1e-9
_UNKNOWN_S = 60.0  # remaining time of a job of unknown length, or as much as it has run if that is more

Pattern = tuple[tuple[Likeness, Setting], ...]


class ColocatedJob(NamedTuple):
    """A job with its actual or planned setting on a device."""

    job: Job
    setting: Setting


class CompletionForecast:
    """Predicted completion times for one snapshot, cached."""

    def __init__(self, view: Snapshot, *, tuned: bool = True, virtual: float = inf) -> None:
        self._view = view
        self._tuned = tuned  # whether batch sizes are
        self._virtual = virtual  # the sum of the equal caps of a device
        self._alone: dict[tuple[JobId, Kind], float] = {}
        self._starts: dict[tuple[Kind, Likeness, object], int] = {}
        self._speeds: dict[tuple[Kind, Pattern], list[float]] = {}
        self._costs: dict[tuple[Kind, tuple[JobId, ...]], float] = {}
        self._uses: dict[tuple[Kind, Likeness], float] = {}

    def left_s(self, job: Job, kind: Kind) -> float:
        """Seconds the job needs alone on a device of the type at its own batch size."""
        left = self._view.estimates.remaining(job, self._view.at).mean / self._rate(job, kind)
        return left if isfinite(left) else max(_UNKNOWN_S, self._view.attained_s(job))

    def colocated(self, device: DeviceId, jobs: Sequence[Job]) -> list[ColocatedJob]:
        """Jobs with their settings on a device, at the batch sizes from which tuning starts."""
        share = min(1.0, self._virtual / max(1, len(jobs)))
        return [
            ColocatedJob(job, Setting(job.lane[0] if job.lane else share, self._start(job, device))) for job in jobs
        ]

    def use(self, device: DeviceId, job: Job) -> float:
        """Mean of the job's known SM and memory shares of a device."""
        bank, estimates = self._view.cluster.bank_of(device), self._view.estimates
        key = (bank.kind, likeness(job))
        if key not in self._uses:
            use = estimates.use(job.spec, bank.kind)
            uses = [] if use is None else [use.sm]
            if bank.memory_bytes:
                uses.append(memory_of(estimates, job.spec) / bank.memory_bytes)
            self._uses[key] = sum(uses) / max(1, len(uses))
        return self._uses[key]

    def speeds(self, kind: Kind, colocated: Sequence[ColocatedJob]) -> list[float]:
        """Progress of each job beside the others, relative to alone at its own batch size: 1/PD."""
        order = sorted(range(len(colocated)), key=lambda place: _like(colocated[place]))
        pattern = tuple([_like(colocated[place]) for place in order])
        known = self._speeds.get((kind, pattern))
        if known is None:
            known = self._speeds[kind, pattern] = self._predicted(kind, [colocated[place] for place in order])
        found = [0.0] * len(colocated)
        for place, speed in zip(order, known, strict=True):
            found[place] = speed
        return found

    def ends(self, kind: Kind, colocated: Sequence[ColocatedJob]) -> list[float]:
        """Seconds until each job ends without arrivals; remaining jobs speed up as others end."""
        left = [self.left_s(guest.job, kind) for guest in colocated]
        ends = [inf] * len(colocated)
        there, now = list(range(len(colocated))), 0.0
        while there:
            pace = [max(speed, _LEAST) for speed in self.speeds(kind, [colocated[place] for place in there])]
            step, first = min((left[place] / speed, place) for place, speed in zip(there, pace, strict=True))
            now += step
            for place, speed in zip(there, pace, strict=True):
                left[place] = max(0.0, left[place] - step * speed)
            ends[first] = now
            there.remove(first)
        return ends

    def cost(self, kind: Kind, colocated: Sequence[ColocatedJob]) -> float:
        """Weighted sum of the seconds until each job ends."""
        key = (kind, tuple([guest.job.id for guest in colocated]))
        if key not in self._costs:
            ends = self.ends(kind, colocated)
            self._costs[key] = sum([g.job.spec.weight * end for g, end in zip(colocated, ends, strict=True)])
        return self._costs[key]

    def _rate(self, job: Job, kind: Kind) -> float:
        key = (job.id, kind)
        if key not in self._alone:
            self._alone[key] = max(self._view.estimates.rate(job.spec, Placement(((kind, 1),))).mean, _LEAST)
        return self._alone[key]

    def _start(self, job: Job, device: DeviceId) -> int:
        if not self._tuned or job.spec.batch_range is None:
            return 0
        bank = self._view.cluster.bank_of(device)
        key = (bank.kind, likeness(job), job.spec.batch_range)
        if key not in self._starts:
            self._starts[key] = best_alone(self._view.estimates, job, bank.kind, bank.memory_bytes)
        return self._starts[key]

    def _predicted(self, kind: Kind, colocated: Sequence[ColocatedJob]) -> list[float]:
        estimates = self._view.estimates
        mix = [(guest.job.spec, *guest.setting) for guest in colocated]
        rates = estimates.mixed(kind, [mix])[0]
        return [
            rate.mean * worth_of_step(estimates, spec, batch_size) / self._rate(guest.job, kind)
            for rate, guest, (spec, _, batch_size) in zip(rates, colocated, mix, strict=True)
        ]


def _like(guest: ColocatedJob) -> tuple[Likeness, Setting]:
    return likeness(guest.job), guest.setting


@register("iadeep")
@dataclass(frozen=True, slots=True)
class IADeep(Policy):
    """Each waiting job goes where the sum of completion times grows least, or waits.

    PD_i = IF·DT/EFF is job i's time beside its neighbours over its time alone. A device is charged Σ w·(time until
    completion) as predicted from its jobs; a job's cost there is what it adds. It waits if an empty device,
    expected for its position in the queue, is cheaper. Costs are weighted by how far SM and memory use exceed the
    mean. Jobs on a device have equal caps, and batch sizes that may change are tuned by GP-LCB, measuring every
    proposal for `settle_s`. After Chen et al., "Interference-aware Multiplexing for Deep Learning in GPU Clusters",
    SC 2023; EFF, caps, completion times, queue order and moves to free devices are ours.
    """

    shares_devices: ClassVar[bool] = True
    max_virtual: ClassVar[float] = 16.0

    tuner: bool = True  # False: every job keeps its own batch size
    predictor: bool = True  # False: the emptiest device with room, without waiting for a better one
    most: int = 4  # residents of one device
    evaluations: int = 15  # settings measured per mix
    settle_s: float = 6.0  # how long each is measured
    balance: float = 0.1  # weight of use above the mean
    virtual: float = 1.5  # sum of the equal caps on a shared device; 16: no caps
    patience: float = 4.0  # shorter jobs may pass one up to this many times its length after it was submitted
    window: int = 32  # waiting jobs considered
    move_s: float = 10.0  # least saving of a move to a free device

    def __post_init__(self) -> None:
        if not 1 <= self.most <= self.max_virtual:
            raise InputError(f"most is {self.most}", way_out=f"Give a number from 1 to {self.max_virtual:.0f}.")
        for name in ("evaluations", "settle_s", "window"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} is {getattr(self, name)}", way_out="Give a number above 0.")

    def plan(self, view: Snapshot) -> Plan:
        draft, flow, trials = (
            Draft(view),
            CompletionForecast(view, tuned=self.tuner, virtual=self.virtual),
            Trials.of(view.note),
        )
        words: list[str] = []
        for device in list(draft.occupancy.shared_devices()):
            words += self._review(draft, trials, device)
        if not isinstance(view.note, dict) or view.note.get("seen") != _signature(draft):
            words += self._admit(draft, flow)
            words += self._spread(draft, flow)
        for device in list(draft.occupancy.shared_devices()):
            words += self._retune(draft, flow, trials, device)
        trials.forget(draft)
        note = {**trials.note(), "seen": _signature(draft)}
        look_at = trials.next_look(view.at)
        if not words and look_at is None and note == view.note:
            return Plan.NOTHING
        return draft.finish("; ".join(words) or "shares and batch sizes stay unchanged", wake_at=look_at, note=note)

    def _admit(self, draft: Draft, flow: CompletionForecast) -> Iterator[str]:
        if not draft.view.waiting:
            return
        rooms, queue = ShareableDevices(draft, self.most), ExpectedEnds(draft, flow)
        jobs = self._in_turn(draft, flow)[: self.window]
        starts, refused = [], set[Hashable]()

        def join(job: Job) -> Allocation | None:
            """Like `_join`, but no job overtakes a twin that was refused."""
            twins = twin_key(job)
            found = None if twins in refused else self._join(draft, flow, rooms, queue, job)
            if found is None:
                refused.add(twins)
            return found

        for start in admit(draft, rooms, jobs, join):
            queue.refresh(*start.allocation.devices())
            starts.append(start)
        yield from describe_starts(starts)

    def _in_turn(self, draft: Draft, flow: CompletionForecast) -> list[Job]:
        """Waiting jobs by submission and length: short jobs first, but no job starves."""
        kind = draft.view.cluster.kinds[0]
        return sorted(
            draft.waiting(), key=lambda job: (job.submitted_at + self.patience * flow.left_s(job, kind), job.seq)
        )

    def _join(
        self, draft: Draft, flow: CompletionForecast, rooms: ShareableDevices, queue: ExpectedEnds, job: Job
    ) -> Allocation | None:
        """Join the device where the job costs least, unless waiting is estimated to cost less."""
        fraction = job.lane[0] if job.lane else min(1.0, self.virtual / self.most)
        offers = [d for d in rooms.open_to(job, fraction) if all(r.spec.devices == 1 for r in residents_of(draft, d))]
        if not offers:
            return None
        if not self.predictor:
            device = offers[0]  # the fewest residents
        else:
            held = list(draft.occupancy.shared_devices())
            usual = sum([device_use(draft, flow, device) for device in held]) / len(held)
            costs = [self._cost(draft, flow, job, device, usual) for device in offers]
            cost, device = min(zip(costs, offers, strict=True))
            if queue.is_cheaper(job, cost):
                return None
        allocation = Allocation.of(device, fraction=fraction)
        draft.assign(job, allocation)
        return allocation

    def _cost(self, draft: Draft, flow: CompletionForecast, job: Job, device: DeviceId, usual: float) -> float:
        """What the job adds to the completion times there, including its own, weighted by the device's use."""
        kind = draft.view.cluster.kind_of(device)
        residents = residents_of(draft, device)
        added = flow.cost(kind, flow.colocated(device, [*residents, job])) - flow.cost(
            kind, flow.colocated(device, residents)
        )
        return added * (1.0 + self.balance * (device_use(draft, flow, device) + flow.use(device, job) - usual))

    def _spread(self, draft: Draft, flow: CompletionForecast) -> Iterator[str]:
        """Move the jobs that save most to free devices that no waiting job took."""
        moved: set[DeviceId] = set()
        while draft.num_free and draft.occupancy.is_shared:
            moves = [
                move
                for device in draft.occupancy.shared_devices()
                if device not in moved
                for move in _moves_away(draft, flow, device)
            ]
            saved, job = max(moves, key=lambda move: move[0], default=(0.0, None))
            if job is None or saved <= self.move_s:
                return
            held = draft.holding(job)
            if held is None or start_alone(draft, job) is None:
                return
            moved.update(held.devices())
            yield f"{job.id} moves to a free device and saves {saved:.0f} s"

    def _retune(self, draft: Draft, flow: CompletionForecast, trials: Trials, device: DeviceId) -> Iterator[str]:
        residents = residents_of(draft, device)
        if trials.knows(device, residents) or any(job.spec.devices > 1 for job in residents):
            return
        trials.drop(device)
        vector = None
        if self.tuner and any(is_tunable(draft.view.estimates, job) for job in residents):
            tuning = self._tuning(draft, device, residents)
            vector = tuning.propose(None, self.evaluations) if tuning.is_open else None
        if vector is None:
            settings = [guest.setting for guest in flow.colocated(device, residents)]
            if self._apply(draft, device, residents, settings):
                name = draft.view.cluster.device_name(device)
                yield f"{len(residents)} jobs on {name} at {settings[-1].fraction:.0%} each"
            return
        self._apply(draft, device, residents, vector)
        trials.begin(device, residents, vector, self._next_look(draft.view.at))
        yield f"starts from batch sizes {_words(vector)} on {draft.view.cluster.device_name(device)}"

    def _review(self, draft: Draft, trials: Trials, device: DeviceId) -> Iterator[str]:
        trial, at = trials.get(device), draft.view.at
        residents = residents_of(draft, device)
        if trial is None or trial.look_at is None or at < trial.look_at or not trials.knows(device, residents):
            return
        if any(job.is_starting or job.rate <= 0.0 for job in residents):
            trials.put_off(device, self._next_look(at))
            return
        tuning = self._tuning(draft, device, residents)
        tried = (*trial.tried, Tried(trial.now, -tuning.degradation(trial.now)))
        trial = replace(trial, tried=tried, corrections=trial.corrections or tuning.interference(trial.now))
        vector = tuning.propose(trial, self.evaluations)
        name = draft.view.cluster.device_name(device)
        if vector is not None:
            trials.go_on(device, trial, vector, self._next_look(at))
            self._apply(draft, device, residents, vector)
            yield f"tries batch sizes {_words(vector)} on {name}"
            return
        best = tuning.best(trial)
        trials.settle(device, trial, best)
        self._apply(draft, device, residents, best)
        yield f"keeps batch sizes {_words(best)} on {name} after {len(tried)} measurements"

    def _tuning(self, draft: Draft, device: DeviceId, residents: Sequence[Job]) -> BatchTuning:
        bank, share = draft.view.cluster.bank_of(device), min(1.0, self.virtual / len(residents))
        return BatchTuning(draft.view.estimates, bank.kind, residents, share, bank.memory_bytes)

    def _next_look(self, at: float) -> float:
        """When a setting that starts now is measured: common instants for all devices, to plan less often."""
        return ceil(at / self.settle_s + 1.0 - 1e-9) * self.settle_s

    def _apply(self, draft: Draft, device: DeviceId, residents: Sequence[Job], vector: Sequence[Setting]) -> bool:
        """Apply settings to the jobs of a device. Returns whether anything changed."""
        changed = False
        for job, setting in zip(residents, vector, strict=True):
            allocation = Allocation.of(device, fraction=setting.fraction, batch_size=setting.batch_size)
            changed |= allocation != draft.holding(job)
            draft.assign(job, allocation)
        return changed


class ExpectedEnds:
    """When devices are expected to be empty, each assigned to one waiting job after another."""

    def __init__(self, draft: Draft, flow: CompletionForecast) -> None:
        self._draft, self._flow = draft, flow
        self._empty: dict[DeviceId, float] = {}
        self.refresh(*draft.occupancy.shared_devices())

    def refresh(self, *devices: DeviceId) -> None:
        for device in devices:
            kind = self._draft.view.cluster.kind_of(device)
            colocated = self._flow.colocated(device, residents_of(self._draft, device))
            narrow = all(guest.job.spec.devices == 1 for guest in colocated)
            self._empty[device] = max(self._flow.ends(kind, colocated)) if narrow else inf

    def is_cheaper(self, job: Job, cost: float) -> bool:
        """Whether waiting for an empty device costs less; then the job takes its position in line for it."""
        cluster = self._draft.view.cluster
        ends = [
            (empty_s + self._flow.left_s(job, cluster.kind_of(device)), device)
            for device, empty_s in self._empty.items()
            if not job.spec.kinds or cluster.kind_of(device) in job.spec.kinds
        ]
        end_s, device = min(ends)
        if job.spec.weight * end_s >= cost:
            return False
        self._empty[device] = end_s
        return True


def _signature(draft: Draft) -> list[int]:
    """Changes when jobs or devices come or go: only then placing again is worthwhile."""
    view = draft.view
    waiting = sum(draft.holding(view.jobs[job]) is None for job in view.waiting)
    return [len(view.jobs), max((job.seq for job in view.jobs.values()), default=0), waiting, draft.num_free]


def _moves_away(draft: Draft, flow: CompletionForecast, device: DeviceId) -> list[tuple[float, Job]]:
    """Saving and job for each job that may move from a shared device to one of its own."""
    colocated = flow.colocated(device, residents_of(draft, device))
    if len(colocated) < 2:
        return []
    kind = draft.view.cluster.kind_of(device)
    whole = flow.cost(kind, colocated)
    moves = []
    for guest in colocated:
        if not (guest.job.lane or guest.job.spec.devices > 1 or guest.job.is_starting):
            rest = [other for other in colocated if other is not guest]
            moves.append((whole - flow.cost(kind, rest) - flow.cost(kind, [guest]), guest.job))
    return moves


def device_use(draft: Draft, flow: CompletionForecast, device: DeviceId) -> float:
    """Mean SM and memory use of all jobs on a device."""
    return sum([flow.use(device, job) for job in residents_of(draft, device)])


def _words(vector: Vector) -> str:
    return "/".join(str(setting.batch_size or "own") for setting in vector)
