"""Recorded columns of a simulated run, bounded in size however long the run."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from carpool.core.model import Phase
from carpool.core.topology import Cluster

PHASES: tuple[Phase, ...] = tuple(Phase)  # the state column holds places in this tuple
CODE_OF: dict[Phase, int] = {phase: code for code, phase in enumerate(PHASES)}
NAN = math.nan

STEPS_LIMIT = 50_000  # points of a step function kept while recording
HOLDINGS_LIMIT = 200_000  # holdings kept while recording
HAZE_BINS = 2_048  # time bins for holdings too short to keep one by one
HAZE_BLOCKS = 128  # device blocks of that shade
MARKS_LIMIT = 200


def _doubles() -> array[float]:
    return array("d")


def _ints() -> array[int]:
    return array("i")


@dataclass(slots=True)
class StepFunction:
    """A step function of time that coarsens itself: its integral and its peaks stay exact.

    Before coarsening every point is a change of value. Afterwards a point may stand for several changes: ``value`` is
    then their mean over time and ``peak`` the largest of them.
    """

    limit: int = STEPS_LIMIT
    at_s: array[float] = field(default_factory=_doubles)
    value: array[float] = field(default_factory=_doubles)
    peak: array[float] = field(default_factory=_doubles)
    num_merged: int = 0  # changes that were merged into other points
    width_s: float = 0.0  # changes closer than this may have been merged

    def __len__(self) -> int:
        return len(self.at_s)

    def add(self, at: float, value: float) -> None:
        """Set the value from `at` on; the last value at one instant counts."""
        times = self.at_s
        if times:
            if value == self.value[-1]:
                return
            assert at >= times[-1], f"sample at {at} s after one at {times[-1]} s"
            if at == times[-1]:
                self.value[-1] = self.peak[-1] = value
                return
        times.append(at)
        self.value.append(value)
        self.peak.append(value)
        if len(times) > self.limit:
            self.coarsen(self.limit // 2)

    def coarsen(self, keep: int) -> None:
        """Merge close changes until at most `keep` points are left."""
        if len(self) <= max(keep, 2):
            return
        width = max(self.width_s, (self.at_s[-1] - self.at_s[0]) / (8 * max(keep, 2)))
        while len(self) > max(keep, 2):
            self._merge(width)
            self.width_s = width
            width *= 3.0 if len(self) > 3 * keep else 1.3

    def _merge(self, width_s: float) -> None:
        """Join short pieces into pieces of about `width_s`; long pieces stay."""
        pieces: list[tuple[float, float, float]] = []  # start, mean, peak
        start, area, top, grouped = self.at_s[0], 0.0, -math.inf, 0
        for index in range(len(self) - 1):
            begin, end = self.at_s[index], self.at_s[index + 1]
            if grouped and (end - start > width_s or end - begin >= width_s):
                pieces.append((start, area / (begin - start), top))
                start, area, top, grouped = begin, 0.0, -math.inf, 0
            area += self.value[index] * (end - begin)
            top = max(top, self.peak[index])
            grouped += 1
        if grouped:
            pieces.append((start, area / (self.at_s[-1] - start), top))
        pieces.append((self.at_s[-1], self.value[-1], self.peak[-1]))
        self.num_merged += len(self) - len(pieces)
        self.at_s, self.value, self.peak = (array("d", column) for column in zip(*pieces, strict=True))

    def copy(self) -> StepFunction:
        return StepFunction(self.limit, self.at_s[:], self.value[:], self.peak[:], self.num_merged, self.width_s)


@dataclass(slots=True)
class BinnedHoldings:
    """Device-seconds of holdings too short to be kept individually, by time bin and block of devices."""

    block: int  # devices in a block
    num_blocks: int
    width_s: float = 0.0  # of a bin; a power of two, so that bins fold in pairs
    cells: dict[int, float] = field(default_factory=dict)  # bin * num_blocks + block: device-seconds

    @classmethod
    def over(cls, num_devices: int) -> BinnedHoldings:
        block = max(1, math.ceil(num_devices / HAZE_BLOCKS))
        return cls(block, max(1, math.ceil(num_devices / block)))

    def widen(self, end_s: float) -> None:
        wanted = 2.0 ** math.ceil(math.log2(max(end_s, 1e-3) / HAZE_BINS))
        if self.width_s == 0.0:
            self.width_s = wanted
        while self.width_s < wanted:
            folded: dict[int, float] = {}
            for key, amount in self.cells.items():
                at, block = divmod(key, self.num_blocks)
                place = (at // 2) * self.num_blocks + block
                folded[place] = folded.get(place, 0.0) + amount
            self.cells = folded
            self.width_s *= 2

    def add(self, first: int, stop: int, start_s: float, end_s: float, fraction: float) -> None:
        cells, width, size = self.cells, self.width_s, self.block
        begin = start_s
        while begin < end_s:
            at = int(begin / width)
            until = min(end_s, (at + 1) * width)
            if until <= begin:  # rounding at a bin's edge
                until = end_s
            seconds = (until - begin) * fraction
            for block in range(first // size, (stop - 1) // size + 1):
                count = min(stop, (block + 1) * size) - max(first, block * size)
                key = at * self.num_blocks + block
                cells[key] = cells.get(key, 0.0) + seconds * count
            begin = until

    def copy(self) -> BinnedHoldings:
        return BinnedHoldings(self.block, self.num_blocks, self.width_s, dict(self.cells))


@dataclass(slots=True)
class Holdings:
    """Which jobs held which devices when; past a limit the shortest holdings are binned, keeping their area."""

    num_devices: int
    limit: int = HOLDINGS_LIMIT
    job: array[int] = field(default_factory=lambda: array("l"))
    first: array[int] = field(default_factory=_ints)
    stop: array[int] = field(default_factory=_ints)
    start_s: array[float] = field(default_factory=_doubles)
    end_s: array[float] = field(default_factory=_doubles)
    fraction: array[float] = field(default_factory=_doubles)
    num_dissolved: int = 0
    longest_dissolved_s: float = 0.0
    haze: BinnedHoldings = field(init=False)
    _latest: dict[int, dict[int, int]] = field(default_factory=dict, repr=False)  # job: {first device: place}

    def __post_init__(self) -> None:
        self.haze = BinnedHoldings.over(self.num_devices)

    def __len__(self) -> int:
        return len(self.job)

    def add(self, job: int, first: int, stop: int, start_s: float, end_s: float, fraction: float) -> None:
        """Record one holding; one that continues the job's last one extends it."""
        latest = self._latest.setdefault(job, {})
        place = latest.get(first)
        if (
            place is not None
            and self.end_s[place] == start_s
            and self.stop[place] == stop
            and self.fraction[place] == fraction
        ):
            self.end_s[place] = end_s
            return
        latest[first] = len(self.job)
        self.job.append(job)
        self.first.append(first)
        self.stop.append(stop)
        self.start_s.append(start_s)
        self.end_s.append(end_s)
        self.fraction.append(fraction)
        if len(self.job) > self.limit:
            self.coarsen(self.limit // 2)

    def forget(self, job: int) -> None:
        self._latest.pop(job, None)

    def coarsen(self, keep: int) -> None:
        """Bin the shortest holdings, earliest first, until at most `keep` are left."""
        surplus = len(self) - keep
        if surplus <= 0:
            return
        lengths = [end - start for start, end in zip(self.start_s, self.end_s, strict=True)]
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        going = order[:surplus]
        self.haze.widen(max(self.end_s))
        for place in going:
            self.haze.add(
                self.first[place], self.stop[place], self.start_s[place], self.end_s[place], self.fraction[place]
            )
        self.num_dissolved += surplus
        self.longest_dissolved_s = max(self.longest_dissolved_s, lengths[going[-1]])
        self._take(sorted(order[surplus:]))

    def _take(self, places: Sequence[int]) -> None:
        self.job = array("l", [self.job[place] for place in places])
        self.first = array("i", [self.first[place] for place in places])
        self.stop = array("i", [self.stop[place] for place in places])
        self.start_s = array("d", [self.start_s[place] for place in places])
        self.end_s = array("d", [self.end_s[place] for place in places])
        self.fraction = array("d", [self.fraction[place] for place in places])
        self._latest = {}

    def copy(self) -> Holdings:
        twin = Holdings(
            num_devices=self.num_devices,
            limit=self.limit,
            job=self.job[:],
            first=self.first[:],
            stop=self.stop[:],
            start_s=self.start_s[:],
            end_s=self.end_s[:],
            fraction=self.fraction[:],
            num_dissolved=self.num_dissolved,
            longest_dissolved_s=self.longest_dissolved_s,
        )
        twin.haze = self.haze.copy()
        return twin


@dataclass(slots=True)
class Recording:
    """Columns filled by the simulator; jobs are numbered in order of submission."""

    num_devices: int
    job_ids: list[str] = field(default_factory=list)
    submit_s: array[float] = field(default_factory=_doubles)
    start_s: array[float] = field(default_factory=_doubles)  # first time it held a device; NaN: never
    end_s: array[float] = field(default_factory=_doubles)  # NaN: not over
    held_s: array[float] = field(default_factory=_doubles)  # time holding at least one device; NaN: not over
    devices: array[int] = field(default_factory=_ints)  # asked for
    weight: array[float] = field(default_factory=_doubles)
    state: array[int] = field(default_factory=lambda: array("b"))  # place in `PHASES`
    holdings: Holdings = field(init=False)
    queue: StepFunction = field(default_factory=StepFunction)  # jobs waiting
    busy: StepFunction = field(default_factory=StepFunction)  # devices held
    marks: list[tuple[float, str]] = field(default_factory=list)  # other events, such as the loss of a node
    num_marks_dropped: int = 0

    def __post_init__(self) -> None:
        self.holdings = Holdings(self.num_devices)

    def __len__(self) -> int:
        return len(self.job_ids)

    def submitted(self, job_id: str, at: float, devices: int, weight: float = 1.0) -> int:
        self.job_ids.append(job_id)
        self.submit_s.append(at)
        self.start_s.append(NAN)
        self.end_s.append(NAN)
        self.held_s.append(NAN)
        self.devices.append(devices)
        self.weight.append(weight)
        self.state.append(CODE_OF[Phase.WAITING])
        return len(self.job_ids) - 1

    def held(self, job: int, first: int, stop: int, start_s: float, end_s: float, fraction: float = 1.0) -> None:
        """A job held a fraction of the devices from `first` to before `stop`; called when the holding ends."""
        begun = self.start_s[job]
        if not begun <= start_s:  # also true for NaN
            self.start_s[job] = start_s
            if self.state[job] == CODE_OF[Phase.WAITING]:
                self.state[job] = CODE_OF[Phase.RUNNING]
        self.holdings.add(job, first, stop, start_s, end_s, fraction)

    def ended(self, job: int, at: float, held_s: float, state: Phase = Phase.FINISHED) -> None:
        self.end_s[job] = at
        self.held_s[job] = held_s
        self.state[job] = CODE_OF[state]
        self.holdings.forget(job)

    def sample(self, at: float, waiting: int, busy: float) -> None:
        self.queue.add(at, waiting)
        self.busy.add(at, busy)

    def mark(self, at: float, text: str) -> None:
        if len(self.marks) < MARKS_LIMIT:
            self.marks.append((at, text))
        else:
            self.num_marks_dropped += 1

    def finished(self) -> list[int]:
        code = CODE_OF[Phase.FINISHED]
        return [job for job, state in enumerate(self.state) if state == code]

    def span_s(self) -> tuple[float, float]:
        """From the first submission to the last record; (0, 0) for an empty run."""
        first = min(self.submit_s, default=0.0)
        lasts = [at for at in self.end_s if at == at]
        lasts += self.holdings.end_s[:]
        lasts += [column.at_s[-1] for column in (self.queue, self.busy) if len(column)]
        return first, max([first, *lasts])


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """Consecutive devices of one type in one node."""

    name: str
    first: int
    stop: int
    kind: str = ""


def node_spans(cluster: Cluster) -> tuple[NodeSpan, ...]:
    """The device axis of a cluster: one span per bank."""
    return tuple(
        NodeSpan(node.name, bank.devices.start, bank.devices.stop, bank.kind)
        for node in cluster.nodes
        for bank in node.banks
    )


@dataclass(frozen=True, slots=True)
class ReportHead:
    """What all runs of a report share."""

    trace: str
    cluster: str  # as given, such as ``64x8xV100``
    num_devices: int
    nodes: tuple[NodeSpan, ...] = ()
    seed: int | None = None
    version: str = ""
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason: rows
    extra: Mapping[str, str] = field(default_factory=dict)  # further facts for the header, such as world or rounds
    command: str = ""  # how to make this page again


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One policy's run: the figures of ``simulate --json`` and the recording."""

    policy: str
    summary: Mapping[str, float | int | str | None]
    recording: Recording
