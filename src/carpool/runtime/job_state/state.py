"""State of one job: workers, process group epoch, acknowledged orders, retry budget, exclusive requests; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from carpool.core.messages import AssignApplied, ReleaseApplied
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.runtime.job_state.actions import (
    Action,
    BatchSplit,
    Emit,
    Kill,
    MicroBatchLimit,
    Mirror,
    ReleaseExclusive,
    RequestExclusive,
    Segment,
    Send,
    Start,
    Tell,
)
from carpool.runtime.job_state.batch_split import BatchSplitter, MicroBatching
from carpool.runtime.job_state.state_copies import StateCopies
from carpool.runtime.job_state.types import (
    AT_REST,
    AT_WORK,
    JobOptions,
    ProcessGroupEpoch,
    SlotKey,
    StateCopy,
    Target,
    WorkerMode,
    WorkerSlot,
    WorkerState,
)
from carpool.runtime.job_state.update_sharding import Ranges
from carpool.runtime.process.protocol import (
    Done,
    Halt,
    Leave,
    Message,
    MetricsMeasured,
    Ready,
)
from carpool.runtime.sharing.lanes import WHOLE, percent


class Acks:
    """Says once of each order that it is in force."""

    def __init__(self, job: JobId) -> None:
        self._job = job
        self.generation = 0  # newest that was answered
        self._is_release = True  # whether that answer was a release

    @property
    def is_assigned(self) -> bool:
        """Whether the scheduler believes that the job runs."""
        return bool(self.generation) and not self._is_release

    def is_open(self, wish: Target) -> bool:
        """Whether an order waits for its answer."""
        return self.generation < wish.generation

    def assigned(self, generation: int, step: int) -> Emit:
        """The job runs as ordered, from this step on."""
        self.generation, self._is_release = generation, False
        return Emit(AssignApplied(self._job, generation, float(step)))

    def released(self, generation: int, step: int) -> Emit:
        """The job holds nothing any more, and has done so many steps."""
        self.generation, self._is_release = generation, True
        return Emit(ReleaseApplied(self._job, generation, float(step)))

    def last_generation(self, wish: Target) -> int:
        """The generation that the end of a job belongs to."""
        return wish.generation if self._is_release else self.generation


class RetryBudget:
    """Counts workers lost in the same step until that step is completed, and workers lost before they could join.

    After a loss steps are made again from the last mirror, so that a later loss may hit an earlier step: that is bad
    luck, and counts for that step. A step that kills its worker each time does so at the same place.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self.high = 0  # most steps ever seen done
        self._lost: dict[int, int] = {}  # by steps done before the one that was being made
        self._stillborn: dict[int, int] = {}  # by device

    def progressed(self, step: int) -> None:
        """So many steps are done."""
        self.high = max(self.high, step)
        for earlier in [known for known in self._lost if known < step]:
            del self._lost[earlier]

    def lost(self, step: int) -> str:
        """A formation lost a worker when so many steps were done; why that is the end, or nothing."""
        self._lost[step] = self._lost.get(step, 0) + 1
        if self._lost[step] < self._retries:
            return ""
        return f"workers were lost {self._lost[step]} times without completing step {step + 1}"

    def lost_before_joining(self, device: int) -> str:
        """A newcomer was lost; why that is the end, or nothing."""
        self._stillborn[device] = self._stillborn.get(device, 0) + 1
        if self._stillborn[device] < self._retries:
            return ""
        return f"its worker was lost {self._stillborn[device]} times before it could join"

    def joined(self, device: int) -> None:
        """A worker takes part."""
        self._stillborn.pop(device, None)


class ExclusiveRequest:
    """What one team asks of its neighbours, who then stand still until it lets them go on."""

    def __init__(self) -> None:
        self.is_awaited = False  # the neighbours have not come to a standstill yet
        self._short_at: int | None = None  # the step that ran out of memory and is tried again
        self._probing = 0  # generation for whose probe the neighbours were asked to stand still; 0: for none
        self._probed = 0  # newest generation whose probe was measured

    @property
    def is_second_try(self) -> bool:
        """Whether the present step has run out of memory before."""
        return self._short_at is not None

    def probe_of(self, wish: Target) -> int:
        """Steps that are still to be measured for a wish."""
        return wish.probe if self._probed < wish.generation else 0

    def is_probing(self, generation: int) -> bool:
        """Whether the neighbours stand still so that a measurement for this generation can be made."""
        return bool(self._probing) and self._probing == generation

    def ask_for_probe(self, wish: Target) -> list[Action]:
        """Before a probe: ask for quiet, once. What spans devices is not measured alone."""
        if self._probing or self.is_awaited or not self.probe_of(wish) or len(wish.seats) != 1:
            return []
        self._probing, self.is_awaited = wish.generation, True
        return [RequestExclusive(wish.seats[0].device, clears=False)]

    def ask_for_memory(self, step: int, device: int) -> list[Action]:
        """A step ran out of memory for the first time: ask for room."""
        self._short_at, self.is_awaited = step, True
        return [RequestExclusive(device)]

    def granted(self) -> None:
        """The neighbours stand still."""
        self.is_awaited = False

    def progressed(self, step: int) -> list[Action]:
        """So many steps are done: where one of them had run short, the neighbours may go on."""
        if self._short_at is None or step <= self._short_at or self.is_awaited:
            return []
        self._short_at = None
        return [ReleaseExclusive()]

    def measured(self, generation: int) -> list[Action]:
        """The probe of a generation has been made."""
        self._probed = generation
        return self.end_probe()

    def end_probe(self) -> list[Action]:
        """Let neighbours go on that stood still for a probe."""
        if not self._probing:
            return []
        self._probing, self.is_awaited = 0, False
        return [ReleaseExclusive()]

    def end(self) -> list[Action]:
        """Nothing is asked for any more."""
        actions = self.end_probe()
        if self._short_at is not None:
            self._short_at, self.is_awaited = None, False
            actions.append(ReleaseExclusive())
        return actions


class JobState:
    """The workers of one job, their formation, and the actions that have been decided but not handed out yet.

    `hearing.py` changes it by what workers say, `settling.py` brings it closer to the wish, and `parting.py` to an end.
    """

    def __init__(
        self,
        job: JobId,
        devices: Mapping[int, LocalDevice],
        rules: JobOptions,
        *,
        checkpoints: Sequence[StateCopy] = (),  # to go on from, oldest first
        cuts: Sequence[BatchSplit] = (),  # that held when the job ran before
        splits: Sequence[MicroBatchLimit] = (),
    ) -> None:
        self.job = job
        self.devices = devices
        self.rules = rules
        self.wish = Target(0)
        self.workers: dict[int, WorkerState] = {}
        self.formation: ProcessGroupEpoch | None = None
        self.actions: list[Action] = []
        self.safe = StateCopies(rules, checkpoints)
        self.losses = RetryBudget(rules.retries)
        self.cutter = BatchSplitter(devices, rules, cuts)
        self.splits = MicroBatching(splits)
        self.seclusion = ExclusiveRequest()
        self.answers = Acks(job)
        self.number = 0  # the last of workers and formations
        self.sparing: dict[int, bool] = {}  # workers asked to give memory back; whether they have
        self.segment: Segment | None = None  # of the last formation, for the next one: its pages are there already
        self.divided: Ranges = ()  # updates, in the last formation
        self.dealt: tuple[int, ...] = ()  # shards of unlike devices, as last told
        self.measured: MetricsMeasured | None = None  # the last evaluation
        # What others ask of it.
        self.by_token = False
        self.is_held = False  # stands still for a neighbour
        self.clears = True  # and makes room for it
        self.waits = False  # stands still because nobody is there who could decide anything
        self.was_waiting_saved = False  # its state was to be written to disk since
        self.stopping: bool | None = None  # asked to stop; whether with a checkpoint
        self.was_asked_to_save = False  # at the stop
        # How it ends.
        self.is_over = False  # the job has ended, or the team was stopped, and no process is left
        self.result: Done | None = None  # what rank 0 said at the end
        self.failure = ""
        self.first_step: int | None = None
        self.ran_s = 0.0  # time in formations before the present one
        self.memory_bytes = 0  # that a worker held at most

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> Ready | None:
        """What the first worker said of the training."""
        return self.cutter.ready

    @property
    def is_at_work(self) -> bool:
        """Whether any worker of it computes."""
        return any(worker.mode in AT_WORK for worker in self.workers.values())

    @property
    def is_still(self) -> bool:
        """Whether none does, and none is about to."""
        return self.formation is None and not self.is_at_work

    @property
    def has_made_room(self) -> bool:
        """Whether it stands still and holds no memory but what its state needs."""
        standing = [w.id for w in self.workers.values() if w.mode is WorkerMode.STANDING]
        return self.is_still and all(self.sparing.get(worker) for worker in standing)

    @property
    def done(self) -> int:
        """Steps done, as far as is known."""
        steps = [worker.step for worker in self.holders]
        if self.formation is not None:
            steps.append(self.formation.step)
        return max(steps, default=self.safe.step)

    @property
    def holders(self) -> list[WorkerState]:
        """Workers at rest with a state that is worth something."""
        return [worker for worker in self.workers.values() if worker.holds and worker.mode in AT_REST]

    @property
    def newest_step(self) -> int:
        """Steps done in the newest state there is, in a worker at rest or outside of them."""
        return max([self.safe.step, *(worker.step for worker in self.holders)])

    @property
    def wants_nothing(self) -> bool:
        """Whether all workers are to go, although the job is not over."""
        return self.stopping is not None or not self.wish.seats

    @property
    def wished(self) -> set[SlotKey]:
        """Where workers are wanted."""
        return {self.berth(seat) for seat in self.wish.seats}

    def seated(self) -> list[int]:
        """Workers on the wished seats that are there, by seat."""
        able = AT_REST | AT_WORK
        found = {w.berth: w.id for w in self.workers.values() if w.mode in able}
        return [found[berth] for berth in map(self.berth, self.wish.seats) if berth in found]

    def berth(self, seat: WorkerSlot) -> SlotKey:
        """What a worker on this seat must have been started with.

        A lane changes the bits, because libraries choose kernels by the multiprocessors they see; a whole one does not.
        So an exact job always has a whole one, and learns the same whatever its share is and whoever it shares with.
        """
        is_lane = self.rules.has_lanes and not self.rules.exact and self.devices[seat.device].cuda is not None
        return seat.device, percent(seat.fraction) if is_lane else WHOLE

    def name(self, device: int) -> str:
        """What people call a device."""
        return self.devices[device].name

    # -- what becomes of workers --------------------------------------------------------------------------------------

    def start(self, seat: WorkerSlot, *, writes: bool = False) -> None:
        """Have a worker on a seat, or one there that only writes a state to disk."""
        self.number += 1
        device, lane = self.berth(seat)
        self.workers[self.number] = WorkerState(self.number, device, lane, writes=writes)
        self.actions.append(Start(self.number, device, self.cutter.threads(seat), lane))

    def load(self, worker: WorkerState, rehearses: int = 0) -> None:
        """Hand the newest state to a worker, which rehearses with it where so many bytes are free."""
        newest = self.safe.newest
        worker.mode, worker.loads, worker.rehearses = WorkerMode.LOADING, newest.path if newest else "", rehearses > 0
        self.actions.append(self.safe.load(worker.id, rehearses))
        if self.measured is not None and self.measured.step == self.safe.step:
            self.send(worker.id, self.measured)  # the state may have been taken before its evaluation

    def dismiss(self, at: float, worker: WorkerState) -> None:
        """Send a worker away: politely where it listens, by force where it has nothing to lose."""
        if worker.mode is WorkerMode.WARMING or (worker.mode is WorkerMode.LOADING and not worker.rehearses):
            self.actions.append(Kill(worker.id))
        else:
            self.send(worker.id, Leave())
        worker.mode, worker.left_at, worker.reserve_until = WorkerMode.LEAVING, at, 0.0

    def kill(self, at: float, who: WorkerState, how: str, *, counts: bool = True) -> None:
        """End a worker by force; it counts as dead at once, though its device is free only when it has ended."""
        self.actions.append(Kill(who.id))
        if who.mode is not WorkerMode.LEAVING:
            who.mode, who.left_at = WorkerMode.LEAVING, at
            self.lose(at, who, how, counts=counts)

    def lose(self, at: float, who: WorkerState, how: str, *, counts: bool = True) -> None:
        """A worker is dead or as good as dead; where it `counts`, often enough is the end of the job."""
        where = self.name(who.device)
        self.actions += self.safe.given_up(who.id)
        formation, enough = self.formation, ""
        if formation is not None and who.id in formation.members:
            self.tell(f"the worker on {where} {how} at step {formation.step} and is replaced")
            enough = self.losses.lost(formation.step) if counts else ""
            self.segment = None  # a worker that was killed may still be writing into it
            self.dissolve(at)
        elif not who.has_joined:
            self.tell(f"the worker on {where} {how} before it could join and is replaced")
            enough = self.losses.lost_before_joining(who.device) if counts else ""
        else:
            self.tell(f"the worker on {where} {how} and is replaced")
        if enough and self.result is None:
            self.fail(f"{enough}; the last one, on {where}, {how}")

    def dissolve(self, at: float) -> None:
        """End the formation now; whoever still works in it stops at its boundary."""
        assert self.formation is not None
        self.ran_s += at - self.formation.since
        for member in self.formation.members:
            worker = self.workers.get(member)
            if worker is not None and worker.mode is WorkerMode.WORKING:
                self.send(member, Halt())
                worker.mode = WorkerMode.HALTING
        self.formation = None

    def counted(self, who: WorkerState, steps: int) -> None:
        """A worker that is lost had done so many steps; alone it says so a few times a second only."""
        formation = self.formation
        if formation is not None and formation.is_solo and who.id in formation.members and steps > formation.step:
            formation.step = steps
            self.progressed(steps)

    def progressed(self, step: int) -> None:
        """So many steps are done."""
        self.losses.progressed(step)
        self.actions += self.seclusion.progressed(step)

    # -- what is said -------------------------------------------------------------------------------------------------

    def fail(self, words: str) -> None:
        """The job cannot go on; the first reason is the one that is told."""
        self.failure = self.failure or words

    def tell(self, words: str) -> None:
        """Add to the job's story."""
        self.actions.append(Tell(words))

    def send(self, worker: int, message: Message, beside: Segment | Mirror | None = None) -> None:
        """Say something to a worker."""
        self.actions.append(Send(worker, message, beside))
