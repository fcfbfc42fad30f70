"""A fake executor and fake workers that follow the protocol; every guarantee of the state machine is checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from carpool.core.messages import AssignApplied, Fact, JobFailed, JobFinished, ReleaseApplied
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.runtime.job_state.actions import (
    Action,
    BatchSplit,
    DropMirror,
    Emit,
    Ended,
    Kill,
    MicroBatchLimit,
    Mirror,
    Note,
    Persist,
    ReleaseExclusive,
    RequestExclusive,
    Segment,
    Send,
    Start,
    Stopped,
)
from carpool.runtime.job_state.machine import JobMachine
from carpool.runtime.job_state.state import JobState
from carpool.runtime.job_state.types import JobOptions, Target, WorkerSlot
from carpool.runtime.job_state.update_sharding import UpdateSharding
from carpool.runtime.process.protocol import (
    Apply,
    Contributed,
    Done,
    Evaluated,
    Gather,
    Halt,
    Halted,
    Leave,
    Load,
    Loaded,
    MemoryReleased,
    Message,
    MetricsMeasured,
    Proceed,
    Publish,
    Published,
    Ready,
    ReleaseMemory,
    Save,
    Saved,
    Stepped,
    Updated,
    WorkerFailed,
)
from carpool.runtime.reduce.shards import max_micro_batch, split_micro_batches
from carpool.runtime.worker.step_grants import StepGrants

DEVICES = {
    i: LocalDevice(i, f"cpu:{i}", "cpu1" if i < 3 else "cpu2", (0,) if i < 3 else (0, 1), memory_bytes=2 << 30)
    for i in range(5)
}
TOTAL = 12  # steps of the training
SHARDS = 8
BATCH = 36
EVALUATE_EVERY = 5
State = tuple[Any, ...]  # one entry per step done: how it was cut; the evaluation due or done at the end


@dataclass
class FakeWorker:
    """A worker that follows the protocol without training."""

    harness: Harness
    id: int
    device: int
    lane: int
    state: State = ()
    due: bool = False
    at: str = "new"  # new, resting, working, waiting (for Apply), reducing, exchanging, measuring, broken, done
    proceed: Proceed | None = None
    slots: dict[tuple[int, int], State] = field(default_factory=dict)
    inbox: deque[tuple[Message, Any]] = field(default_factory=deque)
    outbox: deque[Message] = field(default_factory=deque)
    deferred: list[tuple[Message, Any]] = field(default_factory=list)
    applied: Apply | None = None
    grants: StepGrants | None = None  # across nodes
    alive: bool = True
    hung: bool = False
    short: bool = False
    short_above: int = BATCH  # samples in a pass
    reported: bool = False

    def send(self, message: Message) -> None:
        self.outbox.append(message)

    def act(self) -> None:
        """Handle one message, or make one move."""
        if not self.alive or self.hung:
            return
        if self.inbox:
            self.handle(*self.inbox.popleft())
        elif self.at == "new":
            self.at = "resting"
            self.send(Ready("initial", 64, BATCH, TOTAL, 100, sizes=(5, 5, 5, 5), can_shard_update=True))
        elif self.at == "working":
            self.work()
        elif self.at == "reducing":
            self.reduce()

    @property
    def step(self) -> int:
        return len(self.state)

    @property
    def runs_short(self) -> bool:
        """Whether it will run out of memory, or its report of that has not been delivered."""
        return self.short or any(isinstance(message, WorkerFailed) for message in self.outbox)

    def handle(self, message: Message, memory: Any) -> None:
        if self.at == "exchanging" and isinstance(message, Halt | Proceed):
            self.alive = False  # its state belongs to no step
            return
        if self.at == "exchanging" and isinstance(message, Publish | Save):
            self.deferred.append((message, memory))
            return
        match message:
            case Gather():
                if self.at == "exchanging":
                    self.gather(message)
            case Proceed():
                self.proceed, self.at = message, "working"
                across = self.harness.segments.setdefault(-message.epoch, {})  # a process group, without shared memory
                self.slots = self.harness.segments[memory.key] if memory else across
                is_across = message.size > 1 and memory is None
                self.grants = StepGrants(message.epoch, self.step) if is_across else None
            case Apply():
                if self.grants is not None:
                    self.grants.take(message)
                elif self.at == "waiting":
                    self.apply(message)
            case Halt():
                if self.at == "done":
                    return
                self.rest()
            case MetricsMeasured(step):
                if step == self.step and self.due:
                    self.measured()
            case ReleaseMemory():
                self.send(MemoryReleased())
            case Publish():
                self.harness.mirrors[memory.key] = (self.state, self.due)
                self.send(Published(self.step))
            case Save():
                assert not self.harness.state.is_remote(self.device), "only this node's disk keeps checkpoints"
                self.harness.disk = (self.state, self.due)
                self.send(Saved(self.step, "path"))
            case Load(path):
                self.state, self.due = self.harness.disk if path else self.harness.mirrors[memory.key]
                self.send(Loaded(self.step))
            case Leave():
                self.alive = False
            case _:
                raise AssertionError(message)

    def rest(self) -> None:
        self.at = "resting"
        self.send(Halted(self.step))

    def work(self) -> None:
        proceed = self.proceed
        assert proceed is not None
        if self.due:
            if proceed.rank == 0:
                self.due = False
                self.send(Evaluated(self.step, {"accuracy": 1.0}))
            else:
                self.at = "measuring"
            return
        if self.step == TOTAL:
            self.finish()
        elif self.short:
            self.short, self.at = False, "broken"
            self.send(WorkerFailed("memory", "no more", self.step, self.own_samples))
        elif self.own_pass > self.short_above:
            self.at = "broken"
            self.send(WorkerFailed("memory", "never enough", self.step, self.own_samples))
        elif proceed.size == 1:
            self.advance()
            self.send(Stepped(self.step, 0, 0.5, 1.0, 1.0))
        elif self.grants is not None:
            if self.grants.is_due(self.step):
                self.send(self.grants.ask(self.step, 9))
            self.grants.count_pass(0.1 * (1 + self.device))
            self.slots[self.step, proceed.rank] = self.state
            self.at = "reducing"
        else:
            self.slots[self.step % 2, proceed.rank] = self.state
            self.send(Contributed(proceed.epoch, self.step, 0.1 * (1 + self.device), 9))
            self.at = "waiting"

    def reduce(self) -> None:
        """Apply a step across nodes once it is granted and all ranks have begun it; one that halted since counts."""
        proceed, grants = self.proceed, self.grants
        assert proceed is not None
        assert grants is not None
        if self.step >= grants.next_step or any((self.step, rank) not in self.slots for rank in range(proceed.size)):
            return
        for rank in range(proceed.size):
            assert self.slots[self.step, rank] == self.state, "all ranks reduce this step from the same state"
        is_last = grants.halt_after == self.step
        self.advance()
        self.at = "working"
        if proceed.rank == 0:
            self.send(Stepped(self.step, 0, 0.5, 1.0, 1.0))
        if is_last:
            self.rest()

    @property
    def own_samples(self) -> int:
        assert self.proceed is not None
        return self.proceed.parts[self.proceed.rank] if self.proceed.parts else BATCH

    @property
    def own_pass(self) -> int:
        assert self.proceed is not None
        most = max_micro_batch(self.proceed.limits, self.step) or self.own_samples
        return max(end - start for start, end in split_micro_batches(0, self.own_samples, most))

    def apply(self, message: Apply) -> None:
        proceed = self.proceed
        assert proceed is not None
        assert (message.epoch, message.step) == (proceed.epoch, self.step)
        for rank in range(proceed.size):
            assert self.slots[self.step % 2, rank] == self.state, (
                "all ranks contributed to this step from the same state"
            )
        self.applied = message
        if proceed.update_ranges:
            self.slots[-1, proceed.rank] = self.state
            self.at = "exchanging"
            self.send(Updated(proceed.epoch, self.step))
        else:
            self.go_on()

    def gather(self, message: Gather) -> None:
        proceed = self.proceed
        assert proceed is not None
        assert (message.epoch, message.step) == (proceed.epoch, self.step)
        for rank in range(proceed.size):
            assert self.slots[-1, rank] == self.state, "all ranks have updated in this step"
        self.go_on()
        self.inbox.extendleft(reversed(self.deferred))
        self.deferred.clear()

    def go_on(self) -> None:
        assert self.proceed is not None
        assert self.applied is not None
        self.advance()
        self.at = "working"
        if self.proceed.rank == 0:
            self.send(Stepped(self.step, 0, 0.5, 1.0, 1.0))
        if self.applied.halt:
            self.rest()

    def advance(self) -> None:
        assert self.proceed is not None
        self.state = (*self.state, "shards" if self.harness.options.exact else self.proceed.parts)
        self.due = self.step % EVALUATE_EVERY == 0

    def measured(self) -> None:
        self.due = False
        if self.at == "measuring":
            self.at = "working"

    def finish(self) -> None:
        self.at = "done"
        self.send(Done(self.step, 1, 0.1, str(hash(self.state)), "all steps are done"))


class Harness:
    """Carries out the actions of a state machine and checks its guarantees."""

    def __init__(self, options: JobOptions, devices: Mapping[int, LocalDevice] = DEVICES, **more: Any) -> None:
        self.options = options
        self.state = JobState(JobId("a"), devices, options, **more)
        self.machine = JobMachine(self.state)
        self.at = 0.0
        self.workers: dict[int, FakeWorker] = {}
        self.mirrors: dict[int, tuple[State, bool]] = {}
        self.made: set[int] = set()  # mirrors
        self.dropped: set[int] = set()
        self.segments: dict[int, dict[tuple[int, int], State]] = {}
        self.disk: tuple[State, bool] = ((), False)
        self.facts: list[Fact] = []
        self.ended: list[Ended] = []
        self.stopped: list[Stopped] = []
        self.notes: list[str] = []
        self.records: list[BatchSplit | MicroBatchLimit] = []
        self.exclusive = 0
        self.is_requested = False
        self.epochs: dict[int, list[Proceed]] = {}
        self.ranks: dict[int, list[int]] = {}  # devices of each epoch by rank
        self.generation = 0
        self.target = Target(0)

    # -- events
    def order(self, *devices: int, **more: Any) -> None:
        self.generation += 1
        self.target = Target(self.generation, tuple(WorkerSlot(device) for device in devices), **more)
        self.run_actions(self.machine.order(self.at, self.target))

    def deliver(self, worker: FakeWorker) -> None:
        """Deliver a worker's next message, or its exit after all messages."""
        if worker.outbox:
            self.run_actions(self.machine.message(self.at, worker.id, worker.outbox.popleft()))
        elif not worker.alive and not worker.reported:
            worker.reported = True
            self.run_actions(self.machine.exited(self.at, worker.id, "signal 9"))

    def tick(self, seconds: float = 0.5) -> None:
        self.at += seconds
        self.run_actions(self.machine.tick(self.at))
        for worker in list(self.workers.values()):
            if worker.hung and not worker.reported:
                self.run_actions(self.machine.hung(self.at, worker.id))

    def run(self, rounds: int = 600) -> None:
        """Let all workers act in turn until nothing is left to do; fails if that takes too long."""
        for _ in range(rounds):
            if self.is_requested:
                self.is_requested = False
                self.run_actions(self.machine.exclusive_granted(self.at))
            for worker in list(self.workers.values()):
                worker.act()
                self.deliver(worker)
            self.tick()
            if self.state.is_over:
                return
            quiet = all(w.alive and not w.inbox and not w.outbox and w.at == "resting" for w in self.alive_workers)
            if quiet and self.acks() and self.acks()[-1].generation == self.generation:
                return
        raise AssertionError(f"stuck: {self.state.target} {self.alive_workers} {self.state.epoch}")

    @property
    def alive_workers(self) -> list[FakeWorker]:
        return [worker for worker in self.workers.values() if not worker.reported]

    def acks(self) -> list[AssignApplied | ReleaseApplied]:
        return [fact for fact in self.facts if isinstance(fact, AssignApplied | ReleaseApplied)]

    # -- actions
    def run_actions(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(worker, device, _, lane):
                    taken = [(w.device, w.lane) for w in self.alive_workers]
                    assert (device, lane) not in taken, "one worker of a job per lane of a device"
                    self.workers[worker] = FakeWorker(self, worker, device, lane)
                case Send(worker, message, memory):
                    self.send(self.workers[worker], message, memory)
                case Kill(worker):
                    assert not self.workers[worker].reported
                    self.workers[worker].alive = False
                case DropMirror(Mirror(key)):
                    self.dropped.add(key)
                case Emit(fact):
                    self.on_fact(fact)
                case Ended():
                    self.ended.append(action)
                case Stopped():
                    self.stopped.append(action)
                case RequestExclusive():
                    self.exclusive += 1
                    self.is_requested = True
                case ReleaseExclusive():
                    self.exclusive -= 1
                    self.is_requested = False
                case Note(text):
                    self.notes.append(text)
                case Persist(record):
                    assert not self.options.exact
                    self.records.append(record)
        self.check()

    def send(self, worker: FakeWorker, message: Message, memory: Any) -> None:
        assert not worker.reported, "no message to an exited worker"
        if isinstance(memory, Segment):
            assert isinstance(message, Proceed)
            self.segments.setdefault(memory.key, {})
        if isinstance(memory, Mirror):
            assert memory.key not in self.dropped
            self.made.add(memory.key)
        if isinstance(message, Proceed):
            self.epochs.setdefault(message.epoch, []).append(message)
            self.ranks.setdefault(message.epoch, []).append(worker.device)
            assert message.epoch == max(self.epochs)
        worker.inbox.append((message, memory))

    def on_fact(self, fact: Fact) -> None:
        assert not any(isinstance(known, JobFinished | JobFailed) for known in self.facts), (
            "no fact after the end of the job"
        )
        if isinstance(fact, AssignApplied | ReleaseApplied):
            assert fact.generation == self.generation
            assert fact.generation not in [known.generation for known in self.acks()], "acknowledged once"
        if isinstance(fact, ReleaseApplied | JobFinished | JobFailed):
            assert not self.alive_workers, "devices are free when the end is reported"
        if isinstance(fact, AssignApplied):
            assert {w.device for w in self.alive_workers} == {slot.device for slot in self.target.slots}
        self.facts.append(fact)

    def check(self) -> None:
        for proceeds in list(self.epochs.values())[-1:]:
            assert sorted(p.rank for p in proceeds) == list(range(proceeds[0].size))
            first = proceeds[0]
            assert all((p.owners, p.parts) == (first.owners, first.parts) for p in proceeds)
            assert all(p.update_ranges == first.update_ranges for p in proceeds)
            assert {p.update_threads for p in proceeds} == {min(p.threads for p in proceeds)}
            if first.size == 1:
                assert not first.update_ranges
                continue
            if self.options.update_sharding is UpdateSharding.EVEN and not first.time_sliced:
                assert [index for owned in first.update_ranges for index in range(*owned)] == list(range(4))
            pieces = [piece for owned in first.owners for piece in range(*owned)]
            if self.options.exact:
                assert pieces == list(range(SHARDS)), "every shard is owned exactly once"
            else:
                assert pieces == list(range(first.size))
                assert sum(first.parts) == BATCH
                assert len(first.parts) == first.size
        if self.state.is_over:
            assert not self.alive_workers
            if self.ended:
                assert self.made == self.dropped
            assert self.exclusive == 0

    def check_finish(self) -> State:
        assert isinstance(self.facts[-1], JobFinished), (self.facts, self.notes)
        assert [end.steps for end in self.ended] == [TOTAL]
        final = {w.state for w in self.workers.values() if w.at == "done"}
        assert len(final) == 1, "all ranks learned the same"
        return final.pop()
