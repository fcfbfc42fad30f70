"""Who works for a job and what is known of it: the state of a team, and what happens when a worker is lost; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from carpool.core.model import JobId
from carpool.runtime.actions import (
    Action,
    Cut,
    Kill,
    MicroSteps,
    Mirror,
    Segment,
    Send,
    Start,
    Tell,
)
from carpool.runtime.answers import Answers
from carpool.runtime.crew import (
    AT_REST,
    AT_WORK,
    Berth,
    Formation,
    KeptState,
    Mode,
    Rules,
    Seat,
    Wish,
    WorkerState,
)
from carpool.runtime.cutting import Cutter
from carpool.runtime.devices import LocalDevice
from carpool.runtime.division import Ranges
from carpool.runtime.lanes import WHOLE, percent
from carpool.runtime.losses import Losses
from carpool.runtime.protocol import (
    Done,
    Halt,
    Leave,
    Measured,
    Message,
    Ready,
)
from carpool.runtime.safe import Safe
from carpool.runtime.seclusion import Seclusion
from carpool.runtime.splitting import Splits


class TeamState:
    """The workers of one job, their formation, and the actions that have been decided but not handed out yet.

    `hearing.py` changes it by what workers say, `settling.py` brings it closer to the wish, and `parting.py` to an end.
    """

    def __init__(
        self,
        job: JobId,
        devices: Mapping[int, LocalDevice],
        rules: Rules,
        *,
        checkpoints: Sequence[KeptState] = (),  # to go on from, oldest first
        cuts: Sequence[Cut] = (),  # that held when the job ran before
        splits: Sequence[MicroSteps] = (),
    ) -> None:
        self.job = job
        self.devices = devices
        self.rules = rules
        self.wish = Wish(0)
        self.workers: dict[int, WorkerState] = {}
        self.formation: Formation | None = None
        self.actions: list[Action] = []
        self.safe = Safe(rules, checkpoints)
        self.losses = Losses(rules.retries)
        self.cutter = Cutter(devices, rules, cuts)
        self.splits = Splits(splits)
        self.seclusion = Seclusion()
        self.answers = Answers(job)
        self.number = 0  # the last of workers and formations
        self.sparing: dict[int, bool] = {}  # workers asked to give memory back; whether they have
        self.segment: Segment | None = None  # of the last formation, for the next one: its pages are there already
        self.divided: Ranges = ()  # updates, in the last formation
        self.dealt: tuple[int, ...] = ()  # shards of unlike devices, as last told
        self.measured: Measured | None = None  # the last evaluation
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
        standing = [w.id for w in self.workers.values() if w.mode is Mode.STANDING]
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
    def wished(self) -> set[Berth]:
        """Where workers are wanted."""
        return {self.berth(seat) for seat in self.wish.seats}

    def seated(self) -> list[int]:
        """Workers on the wished seats that are there, by seat."""
        able = AT_REST | AT_WORK
        found = {w.berth: w.id for w in self.workers.values() if w.mode in able}
        return [found[berth] for berth in map(self.berth, self.wish.seats) if berth in found]

    def berth(self, seat: Seat) -> Berth:
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

    def start(self, seat: Seat, *, writes: bool = False) -> None:
        """Have a worker on a seat, or one there that only writes a state to disk."""
        self.number += 1
        device, lane = self.berth(seat)
        self.workers[self.number] = WorkerState(self.number, device, lane, writes=writes)
        self.actions.append(Start(self.number, device, self.cutter.threads(seat), lane))

    def load(self, worker: WorkerState, rehearses: int = 0) -> None:
        """Hand the newest state to a worker, which rehearses with it where so many bytes are free."""
        newest = self.safe.newest
        worker.mode, worker.loads, worker.rehearses = Mode.LOADING, newest.path if newest else "", rehearses > 0
        self.actions.append(self.safe.load(worker.id, rehearses))
        if self.measured is not None and self.measured.step == self.safe.step:
            self.send(worker.id, self.measured)  # the state may have been taken before its evaluation

    def dismiss(self, at: float, worker: WorkerState) -> None:
        """Send a worker away: politely where it listens, by force where it has nothing to lose."""
        if worker.mode is Mode.WARMING or (worker.mode is Mode.LOADING and not worker.rehearses):
            self.actions.append(Kill(worker.id))
        else:
            self.send(worker.id, Leave())
        worker.mode, worker.left_at, worker.reserve_until = Mode.LEAVING, at, 0.0

    def kill(self, at: float, who: WorkerState, how: str, *, counts: bool = True) -> None:
        """End a worker by force; it counts as dead at once, though its device is free only when it has ended."""
        self.actions.append(Kill(who.id))
        if who.mode is not Mode.LEAVING:
            who.mode, who.left_at = Mode.LEAVING, at
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
            if worker is not None and worker.mode is Mode.WORKING:
                self.send(member, Halt())
                worker.mode = Mode.HALTING
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
