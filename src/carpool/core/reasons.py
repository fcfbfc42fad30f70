"""Reasons: why a job waits or holds what it holds, since when, and what would change it, under every policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import nlargest
from math import inf
from typing import NamedTuple

from carpool.core.constraints.priorities import expected_s, is_urgent, priority_name
from carpool.core.lifecycle import PAUSED, assigned_widths
from carpool.core.model import DeviceId, Job, JobId, NodeId, Phase
from carpool.core.policy import Snapshot
from carpool.core.units import format_bytes

_NAMED = 3  # jobs, nodes or devices that a sentence names
_MOST_AHEAD = 500  # waiting jobs whose ends a forecast includes


class Slot(NamedTuple):
    """A device, when it is expected to be free, and the job that uses it until then."""

    free_in_s: float
    device: DeviceId
    holder: Job | None


class Start(NamedTuple):
    """When a waiting job is expected to start, on which devices, and the job whose end it waits for."""

    in_s: float  # infinite: unknown
    devices: tuple[DeviceId, ...]
    behind: Job | None  # None: enough devices are free


class Explainer:
    """Explains the jobs of a snapshot; `order` lists the waiting jobs as the policy would start them."""

    def __init__(
        self,
        view: Snapshot,
        order: Sequence[JobId],
        device_name: Callable[[DeviceId], str],
        drained: Collection[NodeId] = (),
    ) -> None:
        self._view = view
        ranks = {name: rank_of(view, view.jobs[name]) for name in order}
        self._order = sorted(order, key=lambda name: -ranks[name])
        self._device_name = device_name
        self._drained = drained

    def explain(self, job: Job, obstacles: Sequence[str] = ()) -> str:
        """A job's state in clauses separated by semicolons; `obstacles` say what else keeps it from starting."""
        match job.phase:
            case Phase.BLOCKED:
                words = [self._block(job)]
            case Phase.PAUSED:
                words = [self._pause(job)]
            case Phase.WAITING:
                words = [self._interruption(job), *self._wait(job, obstacles)]
            case _:
                words = [self._holding(job), self._width(job), self._time_left(job)]
        return "; ".join(filter(None, words))

    def forecast(self, job: Job) -> Start | None:
        """The expected start of a waiting job if those ahead start first; None if there are too few devices."""
        slots = self._slots()
        for name in self._ahead(job)[:_MOST_AHEAD]:
            other = self._view.jobs[name]
            start = self._first_fit(other, slots)
            if start is not None:
                until = start.in_s + (self._length_s(other) or inf)
                slots |= {device: Slot(until, device, other) for device in start.devices}
        return self._first_fit(job, slots)

    def _slots(self) -> dict[DeviceId, Slot]:
        """Every usable device; a shared one counts as free at the first end of a job on it."""
        view = self._view
        lost, occupancy = view.occupancy.lost, view.occupancy
        nodes = [node for node in view.cluster.nodes if node.id not in lost]
        free = [DeviceId(device) for node in nodes for device in node.devices]
        slots = {device: Slot(0.0, device, None) for device in free if not occupancy.is_foreign(device)}
        for other in view.running():
            left_s = self._left_s(other)
            slot_s = inf if left_s is None else left_s
            for device in other.desired.devices() if other.desired is not None else ():
                known = slots.get(device)
                if known is not None and (known.holder is None or slot_s < known.free_in_s):
                    slots[device] = Slot(slot_s, device, other)
        return slots

    def _first_fit(self, job: Job, slots: dict[DeviceId, Slot]) -> Start | None:
        kinds, cluster = self._view.kinds_for(job), self._view.cluster
        usable = sorted([slot for slot in slots.values() if cluster.kind_of(slot.device) in kinds], key=_by_time)
        chosen = self._on_few_nodes(usable, job.spec.narrowest, cluster.nodes_for(job.spec))
        if len(chosen) < job.spec.narrowest:
            return None
        last = chosen[-1]
        return Start(last.free_in_s, tuple(sorted([slot.device for slot in chosen])), last.holder)

    def _on_few_nodes(self, slots: Sequence[Slot], count: int, max_nodes: int) -> Sequence[Slot]:
        """The first `count` slots on at most `max_nodes` nodes (0: any number); fewer if there are not enough."""
        if not max_nodes:
            return slots[:count]
        found: dict[NodeId, list[Slot]] = {}
        for number, slot in enumerate(slots, 1):
            there = found.setdefault(self._view.cluster.node_of(slot.device).id, [])
            there.append(slot)
            if number >= count and (max_nodes > 1 or len(there) == count):
                most = nlargest(max_nodes, found.values(), key=len)
                if sum(map(len, most)) >= count:
                    return sorted([each for node in most for each in node], key=_by_time)[-count:]
        return ()

    def _ahead(self, job: Job) -> list[JobId]:
        return self._order[: self._order.index(job.id)] if job.id in self._order else []

    def _wait(self, job: Job, obstacles: Sequence[str]) -> Iterator[str]:
        start = self.forecast(job)
        if start is None:
            yield self._too_few(job)
        elif start.behind is None:
            yield "waits" if obstacles else "waits for the next plan: enough devices are free"
        else:
            yield self._turn(start, start.behind)
        yield self._jobs_ahead(job, named=start.behind if start is not None else None)
        yield from obstacles
        yield self._remedy(job) if start is not None else ""

    def _turn(self, start: Start, behind: Job) -> str:
        """Such as ``waits behind s8 (finishes in about 40 s), then gets cpu:0``."""
        device = self._listed(map(self._device_name, start.devices))
        if behind.desired is None:
            when = "ahead of it in the queue"
        else:
            when = "time left unknown" if start.in_s == inf else f"finishes in about {seconds(start.in_s)}"
        due = f" in about {seconds(start.in_s)}" if behind.desired is None and start.in_s < inf else ""
        return f"waits behind {behind.id} ({when}), then gets {device}{due}"

    def _jobs_ahead(self, job: Job, named: Job | None) -> str:
        """The waiting jobs ahead, and the priorities that put them there; empty if `named` is the only one."""
        ahead = [self._view.jobs[name] for name in self._ahead(job)]
        own = rank_of(self._view, job)
        if not ahead or (ahead == [named] and rank_of(self._view, ahead[0]) == own):
            return ""
        names = [
            f"{other.id} ({self._rank_words(other) or 'priority normal'})"
            if rank_of(self._view, other) > own
            else other.id
            for other in ahead[:_NAMED]
        ]
        more = f" and {len(ahead) - _NAMED} more" if len(ahead) > _NAMED else ""
        verb = "waiting job is" if len(ahead) == 1 else "waiting jobs are"
        return f"{len(ahead)} {verb} ahead of it: {', '.join(names)}{more}"

    def _rank_words(self, job: Job) -> str:
        urgent = ["its deadline is near"] if is_urgent(self._view, job) else []
        named = [f"priority {priority_name(job.spec.priority)}"] if job.spec.priority else []
        return ", ".join([*named, *urgent])

    def _remedy(self, job: Job) -> str:
        """What its user can change: fewer devices where some are free, else a priority above the jobs ahead."""
        kinds, cluster = self._view.kinds_for(job), self._view.cluster
        slots = self._slots().values()
        free = sum(slot.holder is None and cluster.kind_of(slot.device) in kinds for slot in slots)
        if 0 < free < job.spec.narrowest and not self._ahead(job):
            verb = "is" if free == 1 else "are"
            return f"{free} of the {job.spec.narrowest} devices it needs {verb} free: with fewer it could start now"
        own = rank_of(self._view, job)
        equals = [name for name in self._ahead(job) if rank_of(self._view, self._view.jobs[name]) == own]
        return "a higher priority or weight would let it start earlier" if equals else ""

    def _too_few(self, job: Job) -> str:
        """Why the existing devices cannot run a job: too few of its types, too little memory, or nodes out of use."""
        view, spec = self._view, job.spec
        kinds = view.kinds_for(job)
        usable = sum(view.cluster.kind_of(device) in kinds for device in self._slots())
        of = f" of type {' or '.join(spec.kinds)}" if spec.kinds else ""
        memory = f" with {format_bytes(spec.memory_bytes)}" if spec.memory_bytes else ""
        needed = f"{_counted(spec.narrowest, 'device')}{of}{memory}"
        needs = f"cannot start: it needs {needed}, and {usable or 'none'} can be used"
        return "; ".join([needs, *self._nodes_out(), self._fewer(spec.narrowest, usable)])

    def _nodes_out(self) -> list[str]:
        """Nodes that no job can use, and what brings them back."""
        view = self._view
        out = [node for node in view.cluster.nodes if node.id in view.occupancy.lost]
        words = [
            f"node {node.name} is drained (carpool undrain {node.name})"
            if node.id in self._drained
            else f"node {node.name} is lost"
            for node in out[:_NAMED]
        ]
        return words + ([f"{len(out) - _NAMED} more nodes are out of use"] if len(out) > _NAMED else [])

    def _fewer(self, needed: int, usable: int) -> str:
        return (
            f"it could start with min_devices = {usable}" if 0 < usable < needed else "it starts when more can be used"
        )

    def _block(self, job: Job) -> str:
        view, spec = self._view, job.spec
        needed = [view.jobs[name] for name in spec.after if name in view.jobs]
        if needed:
            listed = " and ".join([self._dependency(other) for other in needed[:_NAMED]])
            more = f" and {len(needed) - _NAMED} more" if len(needed) > _NAMED else ""
            return f"is blocked until {listed}{more} {'has' if len(needed) == 1 else 'have'} finished"
        if not spec.at_most:
            return "is blocked"
        admitted = [
            other
            for other in view.jobs.values()
            if other.spec.array == spec.array and other.phase in (Phase.WAITING, Phase.RUNNING)
        ]
        ends = [(left_s, other) for other in admitted if (left_s := self._left_s(other)) is not None]
        first = min(ends, key=lambda end: (end[0], end[1].seq), default=None)
        then = f"; {first[1].id} finishes first, in about {seconds(first[0])}" if first is not None else ""
        limit = f"at most {spec.at_most} jobs of {spec.array or 'its array'} may wait or run at once (at_most)"
        return f"is blocked: {limit}, and {self._listed([other.id for other in admitted])} do{then}"

    def _dependency(self, job: Job) -> str:
        """A job that another depends on, its phase, and when it ends or what it needs."""
        left_s = self._left_s(job)
        if left_s is not None:
            return f"{job.id} ({job.phase}, finishes in about {seconds(left_s)})"
        paused = f": carpool resume {job.id}" if job.phase is Phase.PAUSED else ""
        return f"{job.id} ({job.phase}{paused})"

    def _pause(self, job: Job) -> str:
        since = seconds(self._view.at - job.since)
        if job.past is not None and job.past.words != PAUSED:  # not by its user
            return job.past.words if job.spec.halving is not None else f"{job.past.words}: carpool resume {job.id}"
        return f"has been paused for {since}; carpool resume {job.id} puts it back into the queue"

    def _interruption(self, job: Job) -> str:
        """How a job that ran before lost its devices."""
        if not job.service or job.past is None:
            return ""
        since = f"{seconds(self._view.at - job.since)} ago"
        words = job.past.words
        if words != "was released":
            return f"{words} ({since})"
        takers = [other for other in self._view.running() if other.since == job.since]
        cause = f" when {self._listed([self._with_rank(other) for other in takers])} started" if takers else ""
        return f"was preempted {since}{cause}"

    def _with_rank(self, job: Job) -> str:
        words = self._rank_words(job)
        return f"{job.id} ({words})" if words else job.id

    def _holding(self, job: Job) -> str:
        held = job.desired
        if held is None:
            return f"is {job.phase}"
        names = self._listed(map(self._device_name, held.devices()))
        part = "" if held.is_whole else f" at {'/'.join(f'{fraction:.0%}' for fraction in held.fractions)}"
        others = {r.job: None for device in held.devices() for r in self._view.occupancy.residents(device)}
        beside = [name for name in others if name != job.id]
        verb = "is starting on" if job.is_starting and job.observed is None else "holds"
        return f"{verb} {names}{part}" + (f" beside {self._listed(beside)}" if beside else "")

    def _width(self, job: Job) -> str:
        """How many devices it has of the number it accepts, since when, and when it gets more."""
        held, spec = job.desired, job.spec
        if held is None or spec.narrowest == spec.widest:
            return ""
        width, before = held.num_devices, assigned_widths(job)[1:2]
        if width == spec.widest:
            return "all that it accepts"
        words = f"{width} of at most {spec.widest} devices"
        if before and before[0] > width and job.past is not None:
            started = [other for other in self._view.running() if other.since == job.past.at and other.id != job.id]
            cause = f" when {self._listed([self._with_rank(other) for other in started])} started" if started else ""
            words = f"shrunk from {before[0]} devices {seconds(self._view.at - job.past.at)} ago{cause}; {words}"
        others = self._view.waiting
        return f"{words}; it can grow when {'no job waits' if len(others) else 'the policy expects a gain from more'}"

    def _time_left(self, job: Job) -> str:
        left_s = self._left_s(job)
        return "time left unknown" if left_s is None else f"finishes in about {seconds(left_s)}"

    def _left_s(self, job: Job) -> float | None:
        """Seconds to the end of a running job; None: unknown."""
        estimates, rate = self._view.estimates, job.rate or job.believed
        if job.desired is None or rate <= 0.0 or not estimates.knows_length(job):
            return None
        left_s = estimates.remaining(job, self._view.at).mean / rate
        return left_s if left_s < inf else None

    def _length_s(self, job: Job) -> float | None:
        """Seconds that a waiting job will run; None: unknown."""
        return expected_s(self._view, job) if self._view.estimates.knows_length(job) else None

    @staticmethod
    def _listed(names: Iterable[str]) -> str:
        named = list(names)
        if len(named) > _NAMED:
            return f"{', '.join(named[:_NAMED])} and {len(named) - _NAMED} more"
        return " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]]))


def rank_of(view: Snapshot, job: Job) -> int:
    """Jobs of higher rank start first: the priority, plus one while a deadline is urgent."""
    return job.spec.priority + is_urgent(view, job)


def seconds(amount: float) -> str:
    """A duration as text, such as ``40 s``, ``12 min`` or ``3.5 h``."""
    if amount < 120.0:
        return f"{amount:.0f} s"
    return f"{amount / 60.0:.0f} min" if amount < 7200.0 else f"{amount / 3600.0:.1f} h"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _by_time(slot: Slot) -> tuple[float, DeviceId]:
    return slot.free_in_s, slot.device
