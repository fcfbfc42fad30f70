"""A node's hands: devices, worker processes, mirrors and logs; carries out what others decide.

What a training's workers do next is decided by `team.Team`, what a command does by `errand.Errand`, who computes on a
shared device by `turns.Turns`: all of them pure. This file carries their wishes out.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from carpool.core.messages import Fact, JobFailed, Order
from carpool.core.model import JobId
from carpool.runtime.actions import (
    Action,
    Drop,
    Emit,
    Ended,
    Kill,
    Mirror,
    Park,
    Segment,
    Send,
    Start,
    Stopped,
    Tell,
    Unpark,
    Write,
)
from carpool.runtime.command import Command
from carpool.runtime.crew import Rules, Seat, as_wish
from carpool.runtime.devices import LocalDevice
from carpool.runtime.division import Division
from carpool.runtime.holding import Training
from carpool.runtime.jobfolder import JobFolder
from carpool.runtime.program import Program
from carpool.runtime.protocol import (
    Alive,
    Asked,
    Begin,
    Broke,
    Contributed,
    Done,
    Evaluated,
    Grant,
    Halted,
    Joined,
    Message,
    Proceed,
    Ready,
)
from carpool.runtime.reports import Evaluation, Facts, Outcome, Report, Sized, Told
from carpool.runtime.staff import Key, Staff
from carpool.runtime.team import Team
from carpool.runtime.turns import Turns, who_take_turns
from carpool.runtime.wire import ExecutorOptions

_NEEDS_NO_TOKEN = (Halted, Done, Broke)  # nor the one it may still be waiting for


class Executor:
    """All jobs on the devices of one node."""

    def __init__(
        self,
        devices: Sequence[LocalDevice],
        state: Path,
        options: ExecutorOptions,
        report: Callable[[Report], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._devices = {device.id: device for device in devices}
        self._state = state.absolute()
        self._options = options
        self._report = report
        self._clock = clock
        self._staff = Staff(self, clock, options.preload)
        self._trainings: dict[JobId, Training] = {}
        self._commands: dict[JobId, Command] = {}
        self._turns = {device: Turns[Key](options.max_wait_s) for device in self._devices}
        self._parking: list[tuple[JobId, int]] = []  # jobs that want to be alone on a device; the first one is
        self._is_parked = False
        self._held: set[JobId] = set()  # that stand still for it
        self._facts: list[Fact] = []
        self._ticked_at = clock()
        self._stopping: bool | None = None
        self.stopped = asyncio.Event()

    async def start(self) -> None:
        """Be able to start workers."""
        await self._staff.start()

    @property
    def broken(self) -> asyncio.Future[str]:
        """Done when no worker can be started any more."""
        return self._staff.broken

    async def end(self) -> None:
        """End every process and let go of everything."""
        for command in self._commands.values():
            command.kill()
        await self._staff.stop()
        for command in self._commands.values():
            await command.gone()
        for training in self._trainings.values():
            training.close()

    # -- orders -------------------------------------------------------------------------------------------------------

    def introduce(self, job: JobId, program: Program, *, resume: bool) -> None:
        """Make a job known; a second time it changes nothing."""
        if job in self._trainings or job in self._commands:
            return
        folder = JobFolder(self._state, job)
        try:
            folder.make(resume=resume)
            folder.log()
        except OSError as error:
            self._emit(JobFailed(job, 0, f"its folder cannot be written: {error}"))
            self._flush()
            return
        if program.command:
            ears = (self._on_moves, self._on_session)
            self._commands[job] = Command(job, program, folder, self._devices, self._options.grace_s, *ears)
            return
        rules = Rules(
            exact=program.exact,
            shards=program.shards,
            retries=program.retries,
            batch_size=program.batch_size,
            batch_per_device=program.batch_per_device,
            checkpoint_s=program.checkpoint_s,
            time_limit_s=program.time_limit_s,
            mirror_s=self._options.mirror_s,
            grace_s=self._options.grace_s,
            division=Division(self._options.updates),
            splits=self._options.splits,
        )
        kept, cuts, splits = (folder.kept(), folder.cuts(), folder.splits()) if resume else ([], [], [])
        team = Team(job, self._devices, rules, checkpoints=kept, cuts=cuts, splits=splits)
        self._trainings[job] = Training(job, program, folder, team)

    def carry(self, orders: Sequence[Order]) -> None:
        """Take orders; those of one call are taken together."""
        at = self._clock()
        for order in orders:
            wish = as_wish(order)
            unknown = [seat.device for seat in wish.seats if seat.device not in self._devices]
            if order.job in self._trainings and not unknown:
                training = self._trainings[order.job]
                self._do(training, training.team.order(at, wish))
            elif order.job in self._commands and not unknown:
                self._commands[order.job].order(at, wish)
            else:
                what = f"device {unknown[0]} is not here" if unknown else "no such job was introduced"
                self._emit(JobFailed(order.job, order.generation, f"an order for {order.job!r}: {what}"))
        self._share_out(at)
        self._flush()

    def stop(self, *, checkpoint: bool) -> None:
        """Halt all jobs at a boundary; `stopped` is set when they are gone."""
        at = self._clock()
        self._stopping = checkpoint
        for training in list(self._trainings.values()):
            self._do(training, training.team.stop(at, checkpoint=checkpoint))
        for command in list(self._commands.values()):
            command.stop(at)
        self._flush()

    # -- what happens -------------------------------------------------------------------------------------------------

    def heard(self, who: Key, message: Message) -> None:
        """A worker said something."""
        if isinstance(message, Alive):
            return
        job, worker = JobId(who[0]), who[1]
        training = self._trainings[job]
        at = self._clock()
        device = training.devices[worker]
        if isinstance(message, Asked):
            self._asked(at, training, who, device)
            return
        if isinstance(message, Contributed):
            self._turns[device].give_back(at, who)
        elif isinstance(message, _NEEDS_NO_TOKEN) and not (isinstance(message, Broke) and message.kind == "disk"):
            self._turns[device].withdraw(at, who)
        is_first = isinstance(message, Ready) and training.team.ready is None
        self._do(training, training.team.said(at, worker, message))
        if is_first and isinstance(message, Ready):
            self._report(Sized(job, message.total_steps, message.batch_size, message.num_samples))
        elif isinstance(message, Evaluated):
            self._report(Evaluation(job, message.step, message.metrics))
        self._grant(at, device)
        self._flush()

    def ended(self, who: Key, why: str) -> None:
        """A worker's process is gone."""
        training = self._trainings[JobId(who[0])]
        at = self._clock()
        device, steps = training.devices[who[1]], training.counted(who[1])
        training.bury(who[1])
        self._turns[device].leave(at, who)
        if not training.devices:
            training.drop_segment()  # a job that is off its devices takes no memory but its mirror
        self._do(training, training.team.died(at, who[1], why, steps))
        self._grant(at, device)
        self._flush()

    def tick(self) -> None:
        """Look at the clock."""
        at = self._clock()
        was_late = at - self._ticked_at > 10 * self._options.tick_s
        self._ticked_at = at
        for training in list(self._trainings.values()):
            self._do(training, training.team.tick(at))
        for command in list(self._commands.values()):
            command.tick(at)
        if not was_late:  # else what the workers said meanwhile has not been read yet
            for job, worker in self._staff.silent_for(self._options.hang_s):
                training = self._trainings[JobId(job)]
                self._do(training, training.team.silent(at, worker, training.counted(worker)))
        self._flush()

    # -- what is to be done -------------------------------------------------------------------------------------------

    def _do(self, training: Training, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(worker, device, threads):
                    self._start(training, worker, device, threads)
                case Send():
                    self._send(training, action)
                case Kill(worker):
                    self._staff.kill((training.job, worker))
                case Drop(mirror, reusable):
                    training.drop(mirror, reusable=reusable)
                case Tell(words):
                    self._report(Told(training.job, words))
                case Emit(fact):
                    self._emit(fact)
                case Park(device):
                    self._parking.append((training.job, device))
                case Unpark():
                    self._unpark(training.job)
                case Write(what):
                    with contextlib.suppress(OSError):
                        training.folder.write(what)
                case Ended() | Stopped():
                    self._conclude(training, action)
        self._see_to_parking()

    def _start(self, training: Training, worker: int, device: int, threads: int) -> None:
        place = self._devices[device]
        training.devices[worker] = device
        begin = Begin(
            training.job,
            asdict(training.program),
            device="cpu" if place.cuda is None else f"cuda:{place.cuda}",
            cores=place.cores,
            threads=threads,
            checkpoints=str(training.folder.checkpoints),
            heartbeat_s=min(self._options.heartbeat_s, self._options.hang_s / 4),
        )
        self._staff.begin((training.job, worker), begin, training.folder.log(), training.count(worker))

    def _send(self, training: Training, action: Send) -> None:
        key = (training.job, action.worker)
        fds: tuple[int, ...] = ()
        if isinstance(action.beside, Segment):
            fds = (training.shared(action.beside),)
        elif isinstance(action.beside, Mirror):
            fds = (training.memory(action.beside),)
        if isinstance(action.message, Proceed):  # it will ask anew
            self._turns[training.devices[action.worker]].leave(self._clock(), key)
        self._staff.send(key, action.message, fds)

    def _conclude(self, training: Training, end: Ended | Stopped) -> None:
        if isinstance(end, Ended):
            figures = (end.steps, end.epochs, end.loss, end.metrics, end.digest, end.reason, end.samples_per_s)
            self._report(Outcome(training.job, *figures, memory_bytes=end.memory_bytes or None))
        training.close()

    def _on_moves(self, command: Command, facts: Sequence[Fact], reports: Sequence[Report]) -> None:
        for report in reports:
            self._report(report)
        for fact in facts:
            self._emit(fact)
        self._flush()

        if not command.errand.seats:
            self._rest((command.errand.job, 0))

    def _on_session(self, command: Command, message: Message) -> None:
        """A program with a loop of its own said something."""
        at, job = self._clock(), command.errand.job
        if isinstance(message, Joined):
            self._share_out(at)
        elif isinstance(message, Asked) and command.by_token and command.errand.seats:
            seat = command.errand.seats[0]
            self._turns[seat.device].ask(at, (job, 0), seat.turn, seat.fraction, may_take_several=True)
            self._grant(at, seat.device)
        elif isinstance(message, Done):
            self._rest((job, 0))
        self._flush()

    def _rest(self, who: Key) -> None:
        """Somebody needs no token any more: others may have it."""
        at = self._clock()
        for device, turns in self._turns.items():
            turns.leave(at, who)
            self._grant(at, device)

    def _emit(self, fact: Fact) -> None:
        self._facts.append(fact)

    def _flush(self) -> None:
        """Facts of one instant go together."""
        if self._facts:
            facts, self._facts = self._facts, []
            self._report(Facts(tuple(facts)))
        if self._stopping is not None and self._all_over():
            self.stopped.set()

    def _all_over(self) -> bool:
        return all(t.team.is_over for t in self._trainings.values()) and all(
            c.errand.is_over for c in self._commands.values()
        )

    # -- sharing a device ---------------------------------------------------------------------------------------------

    def _share_out(self, at: float) -> None:
        """Who takes turns: jobs on a device with unlike turns, more jobs than cores, or several on one GPU."""
        seats = {job: t.team.wish.seats for job, t in self._trainings.items() if not t.team.is_over}
        # A program with a loop of its own can wait for one token, not for several.
        seats |= {job: c.errand.seats for job, c in self._commands.items() if c.errand.has_session and c.errand.is_solo}
        room = {n: 1 if d.cuda is not None else max(1, len(d.cores)) for n, d in self._devices.items()}
        by_token = who_take_turns(seats, room)
        for job, command in self._commands.items():
            if command.errand.has_session and command.by_token != (job in by_token):
                command.take_turns(job in by_token)
        for job, training in self._trainings.items():
            if not training.team.is_over and training.by_token != (job in by_token):
                training.by_token = job in by_token
                self._do(training, training.team.take_turns(at, training.by_token))

    def _asked(self, at: float, training: Training, who: Key, device: int) -> None:
        formation = training.team.formation
        if formation is None or not formation.shape.by_token or who[1] not in formation.members:
            return  # it asked before it heard that things have changed, and will rest or ask anew
        seat = next((seat for seat in training.team.wish.seats if seat.device == device), Seat(device))
        self._turns[device].ask(at, who, seat.turn, seat.fraction, may_take_several=formation.is_solo)
        self._grant(at, device)

    def _grant(self, at: float, device: int) -> None:
        granted = self._turns[device].next(at)
        if granted is None:
            return
        (job, _), steps = granted
        if job in self._commands:
            self._commands[JobId(job)].send(Grant(steps))
        else:
            self._staff.send(granted[0], Grant(steps))

    # -- memory -------------------------------------------------------------------------------------------------------

    def _see_to_parking(self) -> None:
        """Let the first job that asks for it be alone on its device once the others there stand still."""
        if not self._parking or self._is_parked:
            return
        at = self._clock()
        first, device = self._parking[0]
        self._is_parked = True  # before anything below comes back here
        neighbours = self._neighbours(first, device)
        for training in neighbours:
            self._held.add(training.job)
            self._do(training, training.team.hold(at, True))
        if all(training.team.has_made_room for training in neighbours):
            self._do(self._trainings[first], self._trainings[first].team.parked(at))
        else:
            self._is_parked = False  # looked at again with the next event

    def _unpark(self, job: JobId) -> None:
        at = self._clock()
        was_first = bool(self._parking) and self._parking[0][0] == job
        self._parking = [entry for entry in self._parking if entry[0] != job]
        if not was_first:
            return
        held, self._held, self._is_parked = self._held, set(), False
        for other in sorted(held):
            training = self._trainings[other]
            self._do(training, training.team.hold(at, False))

    def _neighbours(self, job: JobId, device: int) -> list[Training]:
        return [
            training
            for other, training in self._trainings.items()
            if other != job and not training.team.is_over and device in training.devices.values()
        ]
