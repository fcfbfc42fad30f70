"""An executor and workers that are pretended, and keep to the protocol; every promise of a team is checked."""

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
    Drop,
    Emit,
    Ended,
    Kill,
    MicroBatchLimit,
    Mirror,
    ReleaseExclusive,
    RequestExclusive,
    Segment,
    Send,
    Start,
    Stopped,
    Tell,
    Write,
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
class Pretended:
    """A worker as protocol.py describes it, without the training."""

    world: World
    id: int
    device: int
    lane: int
    state: State = ()
    due: bool = False
    at: str = "new"  # new, resting, working, waiting (for Apply), exchanging, measuring, broken, done
    formation: Proceed | None = None
    slots: dict[tuple[int, int], State] = field(default_factory=dict)
    inbox: deque[tuple[Message, Any]] = field(default_factory=deque)
    outbox: deque[Message] = field(default_factory=deque)
    deferred: list[tuple[Message, Any]] = field(default_factory=list)
    applied: Apply | None = None
    alive: bool = True
    hung: bool = False
    short: bool = False
    short_above: int = BATCH  # samples in a pass
    reported: bool = False

    def say(self, message: Message) -> None:
        self.outbox.append(message)

    def act(self) -> None:
        """Hear one message, or do one piece of work."""
        if not self.alive or self.hung:
            return
        if self.inbox:
            self.hear(*self.inbox.popleft())
        elif self.at == "new":
            self.at = "resting"
            self.say(Ready("initial", 64, BATCH, TOTAL, 100, sizes=(5, 5, 5, 5), may_split=True))
        elif self.at == "working":
            self.work()

    @property
    def step(self) -> int:
        return len(self.state)

    @property
    def runs_short(self) -> bool:
        """Whether it will run out of memory, or has said so and not been heard: once more would be even alone."""
        return self.short or any(isinstance(message, WorkerFailed) for message in self.outbox)

    def hear(self, message: Message, beside: Any) -> None:
        if self.at == "exchanging" and isinstance(message, Halt | Proceed):
            self.alive = False  # it has nothing to go on with
            return
        if self.at == "exchanging" and isinstance(message, Publish | Save):
            self.deferred.append((message, beside))
            return
        match message:
            case Gather():
                if self.at == "exchanging":
                    self.gather(message)
            case Proceed():
                self.formation, self.at = message, "working"
                self.slots = self.world.segments[beside.key] if beside else {}
            case Apply():
                if self.at == "waiting":
                    self.apply(message)
            case Halt():
                if self.at == "done":
                    return
                self.rest()
            case MetricsMeasured(step):
                if step == self.step and self.due:
                    self.measured()
            case ReleaseMemory():
                self.say(MemoryReleased())
            case Publish():
                self.world.mirrors[beside.key] = (self.state, self.due)
                self.say(Published(self.step))
            case Save():
                self.world.disk = (self.state, self.due)
                self.say(Saved(self.step, "path"))
            case Load(path):
                self.state, self.due = self.world.disk if path else self.world.mirrors[beside.key]
                self.say(Loaded(self.step))
            case Leave():
                self.alive = False
            case _:
                raise AssertionError(message)

    def rest(self) -> None:
        self.at = "resting"
        self.say(Halted(self.step))

    def work(self) -> None:
        formation = self.formation
        assert formation is not None
        if self.due:
            if formation.rank == 0:
                self.due = False
                self.say(Evaluated(self.step, {"accuracy": 1.0}))
            else:
                self.at = "measuring"
            return
        if self.step == TOTAL:
            self.finish()
        elif self.short:
            self.short, self.at = False, "broken"
            self.say(WorkerFailed("memory", "no more", self.step, self.own_samples))
        elif self.own_pass > self.short_above:
            self.at = "broken"
            self.say(WorkerFailed("memory", "never enough", self.step, self.own_samples))
        elif formation.size == 1:
            self.advance()
            self.say(Stepped(self.step, 0, 0.5, 1.0, 1.0))
        else:
            self.slots[self.step % 2, formation.rank] = self.state
            self.say(Contributed(formation.formation, self.step, 0.1 * (1 + self.device), 9))
            self.at = "waiting"

    @property
    def own_samples(self) -> int:
        assert self.formation is not None
        return self.formation.parts[self.formation.rank] if self.formation.parts else BATCH

    @property
    def own_pass(self) -> int:
        assert self.formation is not None
        most = max_micro_batch(self.formation.limits, self.step) or self.own_samples
        return max(end - start for start, end in split_micro_batches(0, self.own_samples, most))

    def apply(self, message: Apply) -> None:
        formation = self.formation
        assert formation is not None
        assert (message.formation, message.step) == (formation.formation, self.step)
        for rank in range(formation.size):
            assert self.slots[self.step % 2, rank] == self.state, (
                "everybody contributed to this very step, from one state"
            )
        self.applied = message
        if formation.updates:
            self.slots[-1, formation.rank] = self.state
            self.at = "exchanging"
            self.say(Updated(formation.formation, self.step))
        else:
            self.go_on()

    def gather(self, message: Gather) -> None:
        formation = self.formation
        assert formation is not None
        assert (message.formation, message.step) == (formation.formation, self.step)
        for rank in range(formation.size):
            assert self.slots[-1, rank] == self.state, "everybody has updated in this very step"
        self.go_on()
        self.inbox.extendleft(reversed(self.deferred))
        self.deferred.clear()

    def go_on(self) -> None:
        assert self.formation is not None
        assert self.applied is not None
        self.advance()
        self.at = "working"
        if self.formation.rank == 0:
            self.say(Stepped(self.step, 0, 0.5, 1.0, 1.0))
        if self.applied.halt:
            self.rest()

    def advance(self) -> None:
        assert self.formation is not None
        self.state = (*self.state, "shards" if self.world.rules.exact else self.formation.parts)
        self.due = self.step % EVALUATE_EVERY == 0

    def measured(self) -> None:
        self.due = False
        if self.at == "measuring":
            self.at = "working"

    def finish(self) -> None:
        self.at = "done"
        self.say(Done(self.step, 1, 0.1, str(hash(self.state)), "all steps are done"))


class World:
    """What an executor does, with every promise of the team checked on the way."""

    def __init__(self, rules: JobOptions, devices: Mapping[int, LocalDevice] = DEVICES, **options: Any) -> None:
        self.rules = rules
        self.team = JobMachine(JobState(JobId("a"), devices, rules, **options))
        self.at = 0.0
        self.workers: dict[int, Pretended] = {}
        self.mirrors: dict[int, tuple[State, bool]] = {}
        self.made: set[int] = set()  # mirrors
        self.dropped: set[int] = set()
        self.segments: dict[int, dict[tuple[int, int], State]] = {}
        self.disk: tuple[State, bool] = ((), False)
        self.facts: list[Fact] = []
        self.ended: list[Ended] = []
        self.stopped: list[Stopped] = []
        self.stories: list[str] = []
        self.written: list[BatchSplit | MicroBatchLimit] = []
        self.alone = 0
        self.asking = False
        self.formations: dict[int, list[Proceed]] = {}
        self.generation = 0
        self.wish = Target(0)

    # -- events
    def order(self, *devices: int, **more: Any) -> None:
        self.generation += 1
        self.wish = Target(self.generation, tuple(WorkerSlot(device) for device in devices), **more)
        self.do(self.team.order(self.at, self.wish))

    def hear(self, worker: Pretended) -> None:
        """Deliver what a worker said, or its end once everything was heard."""
        if worker.outbox:
            self.do(self.team.said(self.at, worker.id, worker.outbox.popleft()))
        elif not worker.alive and not worker.reported:
            worker.reported = True
            self.do(self.team.died(self.at, worker.id, "signal 9"))

    def tick(self, seconds: float = 0.5) -> None:
        self.at += seconds
        self.do(self.team.tick(self.at))
        for worker in list(self.workers.values()):
            if worker.hung and not worker.reported:
                self.do(self.team.silent(self.at, worker.id))

    def run(self, rounds: int = 600) -> None:
        """Let everybody act in turn until nothing is left to do; fails if that takes too long."""
        for _ in range(rounds):
            if self.asking:
                self.asking = False
                self.do(self.team.left_alone(self.at))
            for worker in list(self.workers.values()):
                worker.act()
                self.hear(worker)
            self.tick()
            if self.team.is_over:
                return
            quiet = all(w.alive and not w.inbox and not w.outbox and w.at == "resting" for w in self.living)
            if quiet and self.answers() and self.answers()[-1].generation == self.generation:
                return
        raise AssertionError(f"stuck: {self.team.wish} {self.living} {self.team.formation}")

    @property
    def living(self) -> list[Pretended]:
        return [worker for worker in self.workers.values() if not worker.reported]

    def answers(self) -> list[AssignApplied | ReleaseApplied]:
        return [fact for fact in self.facts if isinstance(fact, AssignApplied | ReleaseApplied)]

    # -- actions
    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(worker, device, _, lane):
                    taken = [(w.device, w.lane) for w in self.living]
                    assert (device, lane) not in taken, "one worker of a job on a lane of a device"
                    self.workers[worker] = Pretended(self, worker, device, lane)
                case Send(worker, message, beside):
                    self.send(self.workers[worker], message, beside)
                case Kill(worker):
                    assert not self.workers[worker].reported
                    self.workers[worker].alive = False
                case Drop(Mirror(key)):
                    self.dropped.add(key)
                case Emit(fact):
                    self.take(fact)
                case Ended():
                    self.ended.append(action)
                case Stopped():
                    self.stopped.append(action)
                case RequestExclusive():
                    self.alone += 1
                    self.asking = True
                case ReleaseExclusive():
                    self.alone -= 1
                    self.asking = False
                case Tell(words):
                    self.stories.append(words)
                case Write(what):
                    assert not self.rules.exact
                    self.written.append(what)
        self.check()

    def send(self, worker: Pretended, message: Message, beside: Any) -> None:
        assert not worker.reported, "nothing is said to the dead"
        if isinstance(beside, Segment):
            assert isinstance(message, Proceed)
            self.segments.setdefault(beside.key, {})
        if isinstance(beside, Mirror):
            assert beside.key not in self.dropped
            self.made.add(beside.key)
        if isinstance(message, Proceed):
            self.formations.setdefault(message.formation, []).append(message)
            assert message.formation == max(self.formations)
        worker.inbox.append((message, beside))

    def take(self, fact: Fact) -> None:
        assert not any(isinstance(known, JobFinished | JobFailed) for known in self.facts), "nothing follows the end"
        if isinstance(fact, AssignApplied | ReleaseApplied):
            assert fact.generation == self.generation
            assert fact.generation not in [known.generation for known in self.answers()], "answered once"
        if isinstance(fact, ReleaseApplied | JobFinished | JobFailed):
            assert not self.living, "devices are free when it is said"
        if isinstance(fact, AssignApplied):
            assert {w.device for w in self.living} == {seat.device for seat in self.wish.seats}
        self.facts.append(fact)

    def check(self) -> None:
        for proceeds in list(self.formations.values())[-1:]:
            assert sorted(p.rank for p in proceeds) == list(range(proceeds[0].size))
            first = proceeds[0]
            assert all((p.owners, p.parts) == (first.owners, first.parts) for p in proceeds)
            assert all(p.updates == first.updates for p in proceeds)
            assert {p.update_threads for p in proceeds} == {min(p.threads for p in proceeds)}
            if first.size == 1:
                assert not first.updates
                continue
            if self.rules.division is UpdateSharding.EVEN and not first.by_token:
                assert [index for owned in first.updates for index in range(*owned)] == list(range(4))
            pieces = [piece for owned in first.owners for piece in range(*owned)]
            if self.rules.exact:
                assert pieces == list(range(SHARDS)), "every shard is owned exactly once"
            else:
                assert pieces == list(range(first.size))
                assert sum(first.parts) == BATCH
                assert len(first.parts) == first.size
        if self.team.is_over:
            assert not self.living
            if self.ended:
                assert self.made == self.dropped
            assert self.alone == 0

    def check_finish(self) -> State:
        assert isinstance(self.facts[-1], JobFinished), (self.facts, self.stories)
        assert [end.steps for end in self.ended] == [TOTAL]
        final = {w.state for w in self.workers.values() if w.at == "done"}
        assert len(final) == 1, "all learned the same"
        return final.pop()
