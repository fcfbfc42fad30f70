"""Job queues: waiting and running jobs in a policy's order, and admission by dependencies and array limits."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any, TypeVar

from carpool.core.model import Job, JobId, JobSpec, Kind, Phase

Demand = tuple[int, tuple[Kind, ...], int]  # devices, types and nodes: jobs of equal demand fit alike
Entry = tuple[Any, int, JobId]  # (the policy's key, order of submission, job)

T = TypeVar("T")

_CHUNK = 512


class Sorted:
    """A sorted list of entries, in chunks so that adding and removing stay cheap at any length."""

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: list[list[Entry]] = []

    def __iter__(self) -> Iterator[Entry]:
        for chunk in self._chunks:
            yield from chunk

    def __reversed__(self) -> Iterator[Entry]:
        for chunk in reversed(self._chunks):
            yield from reversed(chunk)

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def starting_at(self, entry: Entry) -> Iterator[Entry]:
        if not self._chunks:
            return
        where = self._chunk_of(entry)
        chunk = self._chunks[where]
        yield from chunk[bisect_left(chunk, entry) :]
        for chunk in self._chunks[where + 1 :]:
            yield from chunk

    @property
    def first(self) -> Entry:
        return self._chunks[0][0]

    @property
    def last(self) -> Entry:
        return self._chunks[-1][-1]

    def add(self, entry: Entry) -> None:
        chunks = self._chunks
        if not chunks:
            chunks.append([entry])
            return
        where = len(chunks) - 1 if entry > chunks[-1][0] else self._chunk_of(entry)
        chunk = chunks[where]
        if entry > chunk[-1]:
            chunk.append(entry)
        else:
            insort(chunk, entry)
        if len(chunk) > 2 * _CHUNK:
            chunks.insert(where + 1, chunk[_CHUNK:])
            del chunk[_CHUNK:]

    def remove(self, entry: Entry) -> None:
        where = self._chunk_of(entry)
        chunk = self._chunks[where]
        place = 0 if chunk[0] == entry else bisect_left(chunk, entry)  # most entries leave at the head
        assert chunk[place] == entry, f"{entry} is not in the index"
        del chunk[place]
        if not chunk:
            del self._chunks[where]

    def _chunk_of(self, entry: Entry) -> int:
        """The last chunk that starts at or before `entry`, else the first."""
        low, high = 0, len(self._chunks)
        if high == 1:
            return 0
        while low < high:
            middle = (low + high) // 2
            if self._chunks[middle][0] <= entry:
                low = middle + 1
            else:
                high = middle
        return max(0, low - 1)


class Queue:
    """Waiting jobs in the policy's order, and from the first refusal on also by demand.

    So a demand that does not fit is skipped as a whole, however many jobs have it.
    """

    __slots__ = ("_all", "_by_demand", "_entries", "_widths")

    def __init__(self) -> None:
        self._all = Sorted()
        self._by_demand: dict[Demand, Sorted] | None = None  # made when first needed
        self._entries: dict[JobId, tuple[Demand, Entry]] = {}
        self._widths: dict[int, int] = {}  # number of devices -> jobs that request it

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job: JobId) -> bool:
        return job in self._entries

    def __iter__(self) -> Iterator[JobId]:
        return (entry[2] for entry in self._all)

    def put(self, job: Job, key: Any) -> None:
        """Queue a job under the policy's key, or move it."""
        job_id = job.spec.id
        demand = demand_of(job)
        entry = (key, job.seq, job_id)
        if job_id in self._entries:
            if self._entries[job_id] == (demand, entry):
                return
            self.discard(job_id)
        self._entries[job_id] = (demand, entry)
        self._all.add(entry)
        self._widths[demand[0]] = self._widths.get(demand[0], 0) + 1
        if self._by_demand is not None:
            self._by_demand.setdefault(demand, Sorted()).add(entry)

    def discard(self, job: JobId) -> None:
        found = self._entries.pop(job, None)
        if found is None:
            return
        demand, entry = found
        self._all.remove(entry)
        self._widths[demand[0]] -= 1
        if not self._widths[demand[0]]:
            del self._widths[demand[0]]
        if self._by_demand is not None:
            entries = self._by_demand[demand]
            entries.remove(entry)
            if not entries:
                del self._by_demand[demand]

    @property
    def head(self) -> Entry | None:
        return self._all.first if self._all else None

    @property
    def narrowest(self) -> int:
        """Fewest devices that a waiting job requests; 0 when none waits."""
        return min(self._widths, default=0)

    def demand(self, job: JobId) -> Demand:
        return self._entries[job][0]

    def entries(self, refused: Collection[Demand] = ()) -> Iterator[Entry]:
        """Entries in order, skipping demands in `refused`, which may grow during iteration."""
        for entry in self._all:
            if refused and self._entries[entry[2]][0] in refused:
                yield from self._merged(entry, refused)
                return
            yield entry

    def _apart(self) -> dict[Demand, Sorted]:
        """Entries by demand, kept up to date from the first call on."""
        if self._by_demand is None:
            self._by_demand = {}
            for entry in self._all:
                self._by_demand.setdefault(self._entries[entry[2]][0], Sorted()).add(entry)
        return self._by_demand

    def _merged(self, start: Entry, refused: Collection[Demand]) -> Iterator[Entry]:
        heap = []
        for demand, entries in self._apart().items():
            if demand not in refused:
                walk = entries.starting_at(start)
                first = next(walk, None)
                if first is not None:
                    heap.append((first, demand, walk))
        heapify(heap)
        while heap:
            entry, demand, walk = heap[0]
            if demand in refused:
                heappop(heap)
                continue
            yield entry
            after = next(walk, None)
            if after is None:
                heappop(heap)
            else:
                heapreplace(heap, (after, demand, walk))


class RunningJobs:
    """Running jobs, in the policy's running order where it keeps one, else in order of their start."""

    __slots__ = ("_entries", "_sorted", "is_ordered")

    def __init__(self, *, ordered: bool) -> None:
        self.is_ordered = ordered
        self._entries: dict[JobId, Entry] = {}
        self._sorted = Sorted() if ordered else None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job: JobId) -> bool:
        return job in self._entries

    def __iter__(self) -> Iterator[JobId]:
        if self._sorted is None:
            return iter(self._entries)
        return (entry[2] for entry in self._sorted)

    def __reversed__(self) -> Iterator[JobId]:
        if self._sorted is None:
            return reversed(self._entries)
        return (entry[2] for entry in reversed(self._sorted))

    @property
    def tail(self) -> Entry | None:
        """The entry that comes last in the running order; None without an order or without jobs."""
        return self._sorted.last if self._sorted else None

    def entries(self) -> Iterator[Entry]:
        return iter(self._entries.values() if self._sorted is None else self._sorted)

    def by_start(self) -> list[JobId]:
        return list(self._entries)

    def put(self, job: Job, key: Any) -> None:
        job_id = job.spec.id
        entry = (key, job.seq, job_id)
        if self._sorted is not None:
            old = self._entries.get(job_id)
            if old is not None:
                if old == entry:
                    return
                self._sorted.remove(old)
            self._sorted.add(entry)
        self._entries[job_id] = entry

    def discard(self, job: JobId) -> None:
        entry = self._entries.pop(job, None)
        if entry is not None and self._sorted is not None:
            self._sorted.remove(entry)


def demand_of(job: Job) -> Demand:
    """What must be free for the job to start with the devices it requests."""
    spec = job.spec
    return (spec.devices, spec.kinds, spec.max_nodes)


def twin_key(job: Job) -> Hashable:
    """Equal for jobs that differ in nothing but their names, owners and order of submission."""
    spec = job.spec
    devices = (spec.devices, spec.min_devices, spec.max_devices, spec.kinds, spec.exact)
    program = (spec.model, spec.work, spec.batch_size, spec.batch_range, spec.memory_bytes, spec.resumable)
    resources = (spec.cpus, spec.ram_bytes, spec.disk_bytes, spec.max_nodes)
    importance = (spec.weight, spec.priority, spec.deadline_s)
    return devices, program, resources, importance, job.desired, job.done, job.service, job.lane


def in_submission_order(jobs: Sequence[Job], results: Sequence[T], key: Callable[[T], Any]) -> list[T]:
    """Results of a plan, exchanged among twins so that the twin submitted first has the result of least key."""
    twins: dict[Hashable, list[int]] = {}
    for place, job in enumerate(jobs):
        twins.setdefault(twin_key(job), []).append(place)
    found = list(results)
    for places in twins.values():
        places.sort(key=lambda place: jobs[place].seq)
        for place, result in zip(places, sorted([results[place] for place in places], key=key), strict=True):
            found[place] = result
    return found


_Array = tuple[str, str]  # user and name


class Admission:
    """Admits jobs to the queue once their dependencies have finished and their array has room.

    Of an array with `at_most`, that many jobs are in the queue or running; the next follows in order of submission
    when one of them is over. `ended` maps jobs to their outcome.
    """

    def __init__(self, ended: Mapping[JobId, Phase]) -> None:
        self._ended = ended
        self._by_needed: dict[JobId, list[JobId]] = {}
        self._inside: dict[_Array, set[JobId]] = {}
        self._outside: dict[_Array, deque[JobId]] = {}

    def enter(self, spec: JobSpec) -> bool:
        """Register a submitted job. Returns whether it is admitted at once; if not, `next_after` returns it later."""
        for name in spec.after:
            if self._ended.get(name) is not Phase.FINISHED:
                self._by_needed.setdefault(name, []).append(spec.id)
        return self.admits(spec)

    def restore(self, spec: JobSpec, phase: Phase) -> None:
        """Register a job of a restored state; jobs that are not blocked must come first."""
        if phase is Phase.BLOCKED:
            self.enter(spec)
        elif spec.at_most and (phase is not Phase.PAUSED or spec.halving is None):
            self._inside.setdefault(_array(spec), set()).add(spec.id)

    def admits(self, spec: JobSpec) -> bool:
        """Whether a job is admitted now; if its array is full, it is put in line."""
        if any(self._ended.get(name) is not Phase.FINISHED for name in spec.after):
            return False
        if not spec.at_most:
            return True
        inside = self._inside.setdefault(_array(spec), set())
        if len(inside) >= spec.at_most:
            self._outside.setdefault(_array(spec), deque()).append(spec.id)
            return False
        inside.add(spec.id)
        return True

    def leave(self, spec: JobSpec) -> Iterator[JobId]:
        """Give up a paused job's place in its array. Returns the jobs to reconsider."""
        yield from self._next_of_array(spec)

    def reenter(self, spec: JobSpec) -> bool:
        """Whether a job that is resumed is admitted; if its array is full, it is first in line."""
        if spec.id in self._inside.get(_array(spec), ()) or self.admits(spec):
            return True
        line = self._outside[_array(spec)]
        line.appendleft(line.pop())
        return False

    def dependents(self, job: JobId) -> list[JobId]:
        """Jobs that waited for a job that is over; returned once."""
        return self._by_needed.pop(job, [])

    def next_after(self, spec: JobSpec) -> Iterator[JobId]:
        """Jobs to reconsider when a job is over: its dependents, and the next of its array."""
        yield from self.dependents(spec.id)
        yield from self._next_of_array(spec)

    def _next_of_array(self, spec: JobSpec) -> Iterator[JobId]:
        if not spec.at_most:
            return
        inside, outside = self._inside.get(_array(spec), set()), self._outside.get(_array(spec), deque())
        inside.discard(spec.id)
        while outside and len(inside) < spec.at_most:
            yield outside.popleft()


def _array(spec: JobSpec) -> _Array:
    return spec.user, spec.array
