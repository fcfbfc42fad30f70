"""A team against pretended workers that keep to the protocol: any order of events, any faults, and it goes on."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.messages import AssignApplied, Fact, JobFailed, JobFinished, ProgressReported, ReleaseApplied
from carpool.core.model import JobId
from carpool.runtime.actions import (
    Action,
    BeAlone,
    Cut,
    Drop,
    Emit,
    Ended,
    Kill,
    MicroSteps,
    Mirror,
    Rejoin,
    Segment,
    Send,
    Start,
    Stopped,
    Tell,
    Write,
)
from carpool.runtime.crew import KeptState, Rules, Seat, Wish
from carpool.runtime.devices import LocalDevice
from carpool.runtime.division import Division
from carpool.runtime.protocol import (
    Apply,
    Broke,
    Contributed,
    Done,
    Evaluated,
    Gather,
    Halt,
    Halted,
    Leave,
    Load,
    Loaded,
    Measured,
    Message,
    Proceed,
    Publish,
    Published,
    Ready,
    Save,
    Saved,
    Spare,
    Spared,
    Stepped,
    Updated,
)
from carpool.runtime.shards import cut_into_passes, most_samples
from carpool.runtime.team import Team
from carpool.runtime.team_state import TeamState

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
        return self.short or any(isinstance(message, Broke) for message in self.outbox)

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
            case Measured(step):
                if step == self.step and self.due:
                    self.measured()
            case Spare():
                self.say(Spared())
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
            self.say(Broke("memory", "no more", self.step, self.own_samples))
        elif self.own_pass > self.short_above:
            self.at = "broken"
            self.say(Broke("memory", "never enough", self.step, self.own_samples))
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
        most = most_samples(self.formation.limits, self.step) or self.own_samples
        return max(end - start for start, end in cut_into_passes(0, self.own_samples, most))

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

    def __init__(self, rules: Rules, devices: Mapping[int, LocalDevice] = DEVICES, **options: Any) -> None:
        self.rules = rules
        self.team = Team(TeamState(JobId("a"), devices, rules, **options))
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
        self.written: list[Cut | MicroSteps] = []
        self.alone = 0
        self.asking = False
        self.formations: dict[int, list[Proceed]] = {}
        self.generation = 0
        self.wish = Wish(0)

    # -- events
    def order(self, *devices: int, **more: Any) -> None:
        self.generation += 1
        self.wish = Wish(self.generation, tuple(Seat(device) for device in devices), **more)
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
                case BeAlone():
                    self.alone += 1
                    self.asking = True
                case Rejoin():
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
            if self.rules.division is Division.EVEN and not first.by_token:
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


def patient(exact: bool, **more: Any) -> Rules:
    return Rules(exact=exact, shards=SHARDS, retries=1000, mirror_s=1.5, checkpoint_s=4.0, **more)


def started(exact: bool, *devices: int, **more: Any) -> World:
    world = World(patient(exact, **more))
    world.order(*devices)
    return world


# ------------------------------------------------------------------------------------------------------ any sequence

SEATS = st.lists(st.sampled_from(sorted(DEVICES)), max_size=4, unique=True)
EVENTS = st.one_of(
    st.tuples(st.just("act"), st.integers(0, 5)),
    st.tuples(st.just("act"), st.integers(0, 5)),
    st.tuples(st.just("hear"), st.integers(0, 5)),
    st.tuples(st.just("hear"), st.integers(0, 5)),
    st.tuples(st.just("rounds"), st.integers(1, 8)),
    st.tuples(st.just("rounds"), st.integers(1, 8)),
    st.tuples(st.just("rounds"), st.integers(1, 8)),
    st.tuples(st.just("order"), SEATS),
    st.tuples(st.just("kill"), st.integers(0, 5)),
    st.tuples(st.just("hang"), st.integers(0, 5)),
    st.tuples(st.just("short"), st.integers(0, 5)),
    st.tuples(st.just("tick"), st.just(0)),
    st.tuples(st.just("alone"), st.just(0)),
    st.tuples(st.just("hold"), st.booleans()),
    st.tuples(st.just("wait"), st.booleans()),
    st.tuples(st.just("turns"), st.booleans()),
)


def happen(world: World, kind: str, what: Any) -> None:
    living = world.living
    picked = living[what % len(living)] if living and isinstance(what, int) else None
    match kind:
        case "act" if picked:
            picked.act()
        case "hear" if picked:
            world.hear(picked)
        case "rounds":
            for worker in [worker for _ in range(what) for worker in living]:
                worker.act()
                world.hear(worker)
        case "both":
            for worker in itertools.islice(itertools.cycle(living), what if living else 0):
                worker.act()
                world.hear(worker)
        case "order":
            world.order(*what)
        case "kill" if picked:
            picked.alive = False
        case "hang" if picked:
            picked.hung = True
        case "short" if picked and world.alone == 0 and not any(w.runs_short for w in living):
            picked.short = True
        case "tick":
            world.tick()
        case "alone" if world.asking:
            world.asking = False
            world.do(world.team.left_alone(world.at))
        case "hold":
            world.do(world.team.hold(world.at, what))
        case "wait":
            world.do(world.team.wait(world.at, what))
        case "turns":
            world.do(world.team.take_turns(world.at, what))


DIVISIONS = st.sampled_from([Division.ALL, Division.EVEN])


@given(st.booleans(), DIVISIONS, st.lists(EVENTS, max_size=60), SEATS.filter(bool))
def test_whatever_happens_the_job_ends_with_every_step_made_once(
    exact: bool, division: Division, events: list[tuple[str, Any]], last: list[int]
) -> None:
    world = World(patient(exact, division=division))
    for kind, what in events:
        happen(world, kind, what)
    world.do(world.team.hold(world.at, False))
    world.do(world.team.wait(world.at, False))
    if not world.team.is_over:
        world.order(*last)
        world.run()
    state = world.check_finish()
    assert len(state) == TOTAL


@given(st.booleans(), DIVISIONS, st.lists(EVENTS, max_size=60), st.booleans())
def test_whatever_happens_a_stop_leaves_nothing_and_a_new_team_goes_on(
    exact: bool, division: Division, events: list[tuple[str, Any]], checkpoint: bool
) -> None:
    world = World(patient(exact, division=division))
    for kind, what in events:
        happen(world, kind, what)
    done = world.team.done
    world.do(world.team.stop(world.at, checkpoint=checkpoint))
    if not world.team.is_over:
        world.run()
    if world.ended:
        world.check_finish()
        return
    assert [stop.steps for stop in world.stopped] == [len(world.disk[0])] or not checkpoint
    if checkpoint and exact and not any(kind in {"kill", "hang"} for kind, _ in events):
        assert len(world.disk[0]) >= done
    again = World(patient(exact), checkpoints=[KeptState(len(world.disk[0]), path="x")] if world.disk[0] else [])
    again.disk = world.disk
    again.order(0, 1)
    again.run()
    again.check_finish()


FAULTS = ["kill", "hang", "short"]


@given(
    st.booleans(),
    DIVISIONS,
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from(FAULTS), st.integers(0, 5)), max_size=8),
)
def test_faults_on_unchanged_devices_change_nothing_of_what_is_learned(
    exact: bool, division: Division, faults: list[tuple[int, str, int]]
) -> None:
    """In default mode on like devices: between unlike ones, when parts are dealt anew depends on what was measured."""
    devices = (0, 1, 3) if exact else (0, 1, 2)
    rough = started(exact, *devices, division=division)
    for pause, kind, which in faults:
        for worker in itertools.islice(itertools.cycle(rough.living or [None]), pause):
            if worker is not None:
                worker.act()
                rough.hear(worker)
        happen(rough, kind, which)
    if not rough.team.is_over:
        rough.run()
    assert rough.check_finish() == ("shards" if exact else (12, 12, 12),) * TOTAL


# ------------------------------------------------------------------------------------------------------------ by hand


def test_a_job_starts_works_and_finishes() -> None:
    world = started(True, 0, 1, 2)
    world.run()
    world.check_finish()
    assert world.facts[0] == AssignApplied(JobId("a"), 1, 0.0)
    assert [p.owners for p in world.formations[max(world.formations)]] == [((0, 3), (3, 6), (6, 8))] * 3


def test_like_devices_get_like_parts_and_unlike_ones_what_their_speed_says() -> None:
    like, unlike = started(False, 0, 1, 2), started(False, 0, 3)
    like.run()
    unlike.run()
    assert {p.parts for made in like.formations.values() for p in made} == {(12, 12, 12)}
    assert next(iter(unlike.formations.values()))[0].parts == (12, 24)
    # Measured: the second takes four times as long per sample.
    assert list(unlike.formations.values())[-1][0].parts == (29, 7)


def test_shards_of_unlike_devices_follow_their_speed_too() -> None:
    world = started(True, 0, 3)
    world.run()
    owners = [made[0].owners for made in world.formations.values()]
    assert owners[0] == ((0, 3), (3, 8))  # by their cores
    assert owners[-1] == ((0, 7), (7, 8))  # measured: the second takes four times as long per sample
    assert [words for words in world.stories if "shards" in words] == [
        "shards of a step on each device: cpu:0 3, cpu:3 5",
        "shards of a step on each device: cpu:0 7, cpu:3 1",
    ]


def test_equal_parts_of_an_exact_job_can_be_ordered() -> None:
    world = World(patient(True))
    world.order(0, 3, parts=(4, 4))
    world.run()
    assert {made[0].owners for made in world.formations.values()} == {((0, 4), (4, 8))}


def test_an_order_given_twice_or_late_is_ignored() -> None:
    world = started(True, 0)
    assert world.team.order(0.0, Wish(1, (Seat(1),))) == []
    assert [worker.device for worker in world.living] == [0]


def test_release_keeps_the_state_and_a_new_order_goes_on_from_it() -> None:
    world = started(False, 0)
    for _ in range(8):
        happen(world, "both", 1)
    world.order()
    world.run()
    kept = world.facts[-1]
    assert isinstance(kept, ReleaseApplied)
    assert kept.done > 0
    world.order(1)
    world.run()
    assert AssignApplied(JobId("a"), 3, kept.done) in world.facts
    world.check_finish()


def test_release_of_what_never_ran_is_answered_at_once() -> None:
    world = started(False)
    assert world.facts == [ReleaseApplied(JobId("a"), 1, 0.0)]


def test_newcomers_warm_up_aside() -> None:
    world = started(True, 0)
    happen(world, "both", 4)
    world.order(0, 1)
    solo = world.workers[1]
    for _ in range(3):
        solo.act()
        world.hear(solo)
    assert solo.at == "working"
    assert solo.step > 0
    assert world.answers()[-1].generation == 1
    world.run()
    assert [fact.generation for fact in world.answers()] == [1, 2]


def on_gpu() -> World:
    """A job on a GPU with lanes that has reported, and of which there is a mirror."""
    gpu = LocalDevice(0, "cuda:0", "gpu", (0,), memory_bytes=2 << 30, cuda=0)
    world = World(Rules(has_lanes=True, mirror_s=0.5), {0: gpu})
    take_lane(world, 1.0)
    (solo,) = world.living
    while not world.mirrors:
        solo.act()
        while solo.outbox:
            message = solo.outbox.popleft()
            said = replace(message, memory_bytes=7) if isinstance(message, Stepped) else message
            world.do(world.team.said(world.at, solo.id, said))
        world.tick()
    return world


def take_lane(world: World, fraction: float) -> None:
    """Order another share of the GPU."""
    world.generation += 1
    world.wish = Wish(world.generation, (Seat(0, fraction),))
    world.do(world.team.order(world.at, world.wish))


def change_lane(world: World, fraction: float) -> None:
    """Have another share of the GPU, in so few steps that the training is not over yet."""
    take_lane(world, fraction)
    for _ in range(40):
        if world.answers()[-1].generation == world.generation and not any(worker.inbox for worker in world.living):
            return
        for worker in world.living:
            if worker.at != "working" or worker.inbox:
                worker.act()
            world.hear(worker)
    raise AssertionError("stuck")


def rehearsing() -> tuple[World, Load]:
    """A job on a GPU that moves to another lane of it, and what its newcomer is told first."""
    world = on_gpu()
    take_lane(world, 0.5)
    newcomer = world.living[-1]
    newcomer.act()
    world.hear(newcomer)
    message = newcomer.inbox[0][0]
    assert isinstance(message, Load)
    return world, message


def test_who_left_a_lane_stands_by_until_the_next_one_does() -> None:
    world = on_gpu()
    lanes = []
    for fraction in (0.5, 1.0, 0.5, 0.4, 0.5):
        change_lane(world, fraction)
        lanes.append(sorted((w.lane, w.at) for w in world.living if w.alive))
    assert lanes[0] == lanes[2] == [(50, "working"), (100, "resting")]
    assert lanes[1] == [(50, "resting"), (100, "working")]
    assert lanes[3] == [(40, "working"), (50, "resting")]
    assert lanes[4] == [(40, "resting"), (50, "working")]
    assert len(world.workers) == 3, "none was started twice"
    world.run()
    world.check_finish()


def test_nobody_stands_by_for_long() -> None:
    world = on_gpu()
    change_lane(world, 0.5)
    first, second = world.living
    world.tick(29.0)
    assert not first.inbox
    world.tick(2.0)
    assert first.inbox[0][0] == Leave()
    first.act()
    world.hear(first)
    assert world.living == [second]


def test_newcomers_on_a_gpu_rehearse_with_a_mirror_while_the_others_work() -> None:
    world, told = rehearsing()
    assert told.rehearses == 7
    assert [worker.at for worker in world.living] == ["working", "resting"]
    world.run()
    world.check_finish()


def test_who_rehearses_is_sent_away_politely() -> None:
    """It has work on the device, and who is killed then may take its neighbours along."""
    world, _ = rehearsing()
    newcomer = world.living[-1]
    world.order(0)
    assert newcomer.alive
    assert newcomer.inbox[-1][0] == Leave()
    world.run()
    world.check_finish()


def test_in_exact_mode_survivors_go_on_before_the_replacement_is_there() -> None:
    world = started(True, 0, 1, 2)
    happen(world, "both", 12)
    world.workers[2].alive = False
    for _ in range(10):
        for worker in [world.workers[i] for i in (1, 2, 3)]:
            worker.act()
            world.hear(worker)
    assert {w.device for w in world.living} == {0, 1, 2}
    assert [p.size for p in world.formations[max(world.formations)]] == [2, 2]
    world.run()
    world.check_finish()


def test_in_default_mode_a_lost_worker_is_replaced_and_the_parts_stay() -> None:
    world = started(False, 0, 1, 2)
    happen(world, "both", 12)
    world.workers[2].alive = False
    world.run()
    assert set(world.check_finish()) == {(12, 12, 12)}


def test_steps_made_again_are_cut_as_the_first_time_between_unlike_devices_too() -> None:
    """The second worker is slower than its cores promise, so that parts are dealt anew on the way."""
    world = started(False, 0, 3)
    while world.team.done < TOTAL - 1:
        happen(world, "rounds", 1)
    before = max((worker.state for worker in world.living), key=len)
    assert len(set(before)) == 2, "parts have been dealt anew"
    for worker in world.living:
        worker.alive = False
    world.run()
    assert world.check_finish()[: len(before)] == before


def test_three_losses_without_a_step_fail_the_job() -> None:
    world = World(Rules(retries=3))
    world.order(0)
    for _ in range(3):
        while not world.formations or world.living[0].formation is None:
            happen(world, "both", 1)
        world.living[0].alive = False
        world.living[0].outbox.clear()
        happen(world, "both", 1)
    assert isinstance(world.facts[-1], JobFailed)
    assert "3 times" in world.facts[-1].error


def test_three_deaths_before_joining_fail_the_job() -> None:
    world = World(Rules(retries=3))
    world.order(0, 1)
    for _ in range(3):
        newcomer = next(worker for worker in world.living if worker.device == 0)
        newcomer.alive = False
        world.hear(newcomer)
    world.run()
    assert isinstance(world.facts[-1], JobFailed)


def test_unlike_initial_weights_fail_the_job() -> None:
    world = started(False, 0, 1)
    world.do(world.team.said(0.0, 1, Ready("one", 64, BATCH, TOTAL, 100)))
    world.do(world.team.said(0.0, 2, Ready("two", 64, BATCH, TOTAL, 100)))
    world.run()
    assert isinstance(world.facts[-1], JobFailed)
    assert "not deterministic" in world.facts[-1].error


def test_out_of_memory_is_tried_again_while_the_neighbours_stand_still() -> None:
    world = started(False, 0)
    happen(world, "both", 4)
    world.living[0].short = True
    while not world.alone:
        happen(world, "both", 1)
    assert world.alone == 1
    world.run()
    world.check_finish()
    assert not any("micro-steps" in words for words in world.stories)


def test_what_runs_out_of_memory_even_alone_is_split_until_it_fits() -> None:
    world = started(False, 0)
    happen(world, "both", 6)
    step = world.living[0].step
    world.living[0].short_above = 10
    world.run()
    world.check_finish()
    assert [words.partition("alone: ")[2] for words in world.stories if "micro" in words] == [
        "split into 2 micro-steps of 18 samples; rounding differs",
        "split into 4 micro-steps of 9 samples; rounding differs",
    ]
    splits = [what for what in world.written if isinstance(what, MicroSteps)]
    assert splits == [MicroSteps(step, 18), MicroSteps(step, 9)]
    assert world.formations[max(world.formations)][0].limits == ((step, 18), (step, 9))


def test_after_a_resume_it_stays_split() -> None:
    world = World(patient(False), splits=[MicroSteps(3, 9)])
    world.order(0)
    while not world.living or world.living[0].formation is None:
        happen(world, "both", 1)
    world.run()
    assert world.formations[min(world.formations)][0].limits == ((3, 9),)
    assert not world.stories


@pytest.mark.parametrize(
    ("exact", "batch_norm", "fits", "words"),
    [
        (
            True,
            False,
            10,
            "exact job is not split into micro-steps, which would change its bits: lower batch_size (36)",
        ),
        (False, True, 10, "A batch-normalised job is not split"),
        (False, False, 0, "Not even a single sample fits"),
    ],
)
def test_what_may_not_be_split_fails_with_memory_value_and_way_out(
    exact: bool, batch_norm: bool, fits: int, words: str
) -> None:
    world = started(exact, 0)
    world.do(world.team.said(0.0, 1, Ready("initial", 64, BATCH, TOTAL, 100, has_batch_norm=batch_norm)))
    world.living[0].at = "resting"
    world.living[0].short_above = fits
    world.run()
    assert isinstance(world.facts[-1], JobFailed)
    assert "step 1 of 36 samples needs more memory than cpu:0 has (2.0 GiB), even alone: never enough" in (
        world.facts[-1].error
    )
    assert words in world.facts[-1].error


def test_a_probe_is_not_measured_again_after_a_loss() -> None:
    world = World(patient(False))
    world.order(0, probe=4)
    happen(world, "both", 4)
    happen(world, "alone", 0)
    happen(world, "both", 4)
    world.living[0].alive = False
    happen(world, "both", 4)
    happen(world, "both", 4)
    world.do(world.team.said(world.at, world.living[0].id, Stepped(8, 0, 0.5, 1.0, 1.0, probed=True)))
    world.living[0].alive = False
    world.run()
    assert [proceeds[0].probe for _, proceeds in sorted(world.formations.items())] == [4, 4, 0]
    world.check_finish()


def test_neighbours_stand_still_while_a_probe_is_measured() -> None:
    world = World(patient(False))
    world.order(0)
    happen(world, "both", 12)
    world.order(0, probe=4)
    happen(world, "both", 4)
    assert (world.alone, world.team.is_still) == (1, True)  # it waits for them
    happen(world, "alone", 0)
    happen(world, "both", 2)
    assert (world.alone, world.team.is_still) == (1, False)
    world.do(world.team.said(world.at, world.living[0].id, Stepped(20, 0, 0.5, 1.0, 3.0, probed=True)))
    assert world.alone == 0
    (told,) = [fact for fact in world.facts if isinstance(fact, ProgressReported) and fact.alone]
    assert told.rate == 3.0
    world.run()
    world.check_finish()


@pytest.mark.parametrize("instead", [(), (0,), (1,)])
def test_a_probe_that_is_no_longer_wished_lets_the_neighbours_go_on(instead: tuple[int, ...]) -> None:
    world = World(patient(False))
    world.order(0, probe=4)
    happen(world, "both", 4)
    assert world.alone == 1
    world.order(*instead)
    happen(world, "both", 30)
    assert world.alone == 0


def test_who_stands_still_for_a_measurement_keeps_its_memory() -> None:
    world = started(False, 0)
    happen(world, "both", 12)
    world.do(world.team.hold(world.at, True, clears=False))
    for _ in range(12):
        happen(world, "rounds", 1)
    assert (world.team.is_still, world.team.has_made_room) == (True, False)


def test_who_stands_still_for_a_neighbour_gives_its_memory_back_first() -> None:
    world = started(False, 0, 1)
    happen(world, "both", 12)
    world.do(world.team.hold(world.at, True))
    seen: list[tuple[bool, bool]] = []  # stands still, has made room
    for _ in range(12):
        happen(world, "rounds", 1)
        seen.append((world.team.is_still, world.team.has_made_room))
    assert list(dict.fromkeys(seen)) == [(False, False), (True, False), (True, True)]
    world.do(world.team.hold(world.at, False))
    world.run()
    world.check_finish()


@pytest.mark.parametrize("devices", [(0,), (0, 1)])
@pytest.mark.parametrize("exact", [False, True])
def test_with_nobody_to_decide_it_stands_still_with_its_state_on_disk_and_then_goes_on(
    exact: bool, devices: tuple[int, ...]
) -> None:
    world = started(exact, *devices)
    happen(world, "both", 12)
    world.do(world.team.wait(world.at, True))
    happen(world, "rounds", 12)
    assert world.team.is_still
    stood = world.team.done
    assert 0 < stood < TOTAL
    assert len(world.disk[0]) == stood
    happen(world, "rounds", 12)
    world.tick(100.0)
    assert (world.team.done, len(world.disk[0])) == (stood, stood), "no step is made, and nothing is written twice"
    before = list(world.answers())
    world.do(world.team.wait(world.at, False))
    world.run()
    assert len(world.check_finish()) == TOTAL
    assert world.answers() == before, "the scheduler need not hear of it"


def test_a_full_disk_is_told_once_while_it_waits() -> None:
    world = started(False, 0)
    happen(world, "both", 4)
    world.do(world.team.wait(world.at, True))
    happen(world, "rounds", 2)
    world.do(world.team.said(0.0, 1, Broke("disk", "the disk is full", 2)))
    happen(world, "rounds", 6)
    assert sum("disk is full" in words for words in world.stories) == 1
    world.do(world.team.wait(world.at, False))
    world.run()
    world.check_finish()


def test_a_full_disk_is_told_and_training_goes_on() -> None:
    world = started(False, 0)
    happen(world, "both", 4)
    world.do(world.team.said(0.0, 1, Broke("disk", "the disk is full", 2)))
    world.run()
    world.check_finish()
    assert any("disk is full" in words for words in world.stories)


def test_an_error_of_the_users_fails_the_job_under_the_generation_it_ran_in() -> None:
    world = started(False, 0)
    happen(world, "both", 4)
    world.do(world.team.said(0.0, 1, Broke("user", "ZeroDivisionError: division by zero", 2)))
    world.run()
    assert world.facts[-1] == JobFailed(JobId("a"), 1, "ZeroDivisionError: division by zero (on cpu:0, step 2)")


def test_a_time_limit_ends_the_job() -> None:
    world = started(False, 0, time_limit_s=3.0)
    happen(world, "both", 4)
    world.tick(2.0)
    world.tick(2.0)
    world.run()
    assert isinstance(world.facts[-1], JobFailed)
    assert "3 s" in world.facts[-1].error


def test_a_damaged_checkpoint_gives_way_to_an_older_one() -> None:
    world = World(patient(True), checkpoints=[KeptState(3, path="old"), KeptState(6, path="new")])
    world.disk = (("shards",) * 3, False)
    world.order(0)
    world.workers[1].act()
    world.hear(world.workers[1])
    assert world.workers[1].inbox.popleft()[0] == Load("new")
    world.do(world.team.said(0.0, 1, Broke("input", "damaged")))
    assert world.workers[1].inbox[0][0] == Load("old")
    world.run()
    world.check_finish()


def test_a_newcomer_enters_with_one_change_of_formation() -> None:
    world = started(True, 0)
    happen(world, "rounds", 4)
    world.order(0, 1)
    solo, newcomer = world.living
    for worker in (newcomer, solo, solo):  # it is ready, the other halts and publishes
        worker.act()
        while worker.outbox:
            world.hear(worker)
    assert [type(message) for message, _ in newcomer.inbox] == [Load]
    world.tick(0.0)
    assert world.team.formation is None, "the others wait for it"
    world.run()
    world.check_finish()
    assert [proceeds[0].size for proceeds in world.formations.values()] == [1, 2]


def test_a_state_from_before_its_evaluation_is_handed_on_with_what_was_measured() -> None:
    world = World(patient(False), checkpoints=[KeptState(EVALUATE_EVERY, path="x")])
    world.disk = (((18, 18),) * EVALUATE_EVERY, True)
    world.order(0, 1)
    first, second = world.workers[1], world.workers[2]
    while first.due or not first.state:
        happen(world, "both", 2)
    assert first.step == EVALUATE_EVERY
    second.alive = False
    world.run()
    world.check_finish()
