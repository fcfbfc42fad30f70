"""Worker: trains one rank of one job on one device as the executor's messages direct.

What it does next depends on two things only: its place in a formation (none: it waits to be told), and where its
trainer stands. `_go_on` makes one move; between moves it hears what has been said. Every moment in which it hears
something is a step boundary, because contributing to a step leaves the trainer as it was: so orders are carried out at
once. The one exception is the exchange of updated weights, which defers what it can.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from carpool.core.errors import CarpoolError
from carpool.jobs.program import Program
from carpool.runtime.engine.adaptive_batch import GradientNoiseMeter, apply_batch_size
from carpool.runtime.engine.determinism import intra_op_threads
from carpool.runtime.engine.flat_buffers import Contribution, StepSums
from carpool.runtime.engine.forward_backward import Step
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.errors import CheckpointError, LeaveRequested, StateLost
from carpool.runtime.memory.device_state import DeviceState
from carpool.runtime.memory.memory_usage import peak_memory, release_memory
from carpool.runtime.memory.swap_client import SwapClient
from carpool.runtime.process.channel import Channel, Closed, ProtocolError, Received, close_all
from carpool.runtime.process.protocol import (
    Apply,
    Begin,
    Contributed,
    Evaluated,
    Gather,
    Grant,
    Halt,
    Halted,
    Leave,
    Load,
    Loaded,
    MemoryReleased,
    Message,
    MetricsMeasured,
    Noted,
    Proceed,
    Publish,
    ReleaseMemory,
    Save,
    Saved,
    SwapIn,
    SwapOut,
    Updated,
    WorkerFailed,
)
from carpool.runtime.process.shared_memory import StepCounter
from carpool.runtime.process.worker_setup import done_message, ready_message
from carpool.runtime.reduce.param_exchange import ParamExchange
from carpool.runtime.reduce.reducer import Reducer, StepAborted
from carpool.runtime.reduce.sync_batchnorm import SyncBatchNorms
from carpool.runtime.sharing.turn_token import TurnToken, TurnTokens
from carpool.runtime.state.checkpoint import Checkpoints
from carpool.runtime.state.mirror import MirrorWriter
from carpool.runtime.state.state_io import StateIO
from carpool.runtime.worker.error_classifier import broke_message, is_device_fault, is_out_of_memory, root_cause
from carpool.runtime.worker.fault_injection import FaultInjector
from carpool.runtime.worker.rank_context import GroupJoiner, RankContext


class Worker:
    """A trainer under orders."""

    def __init__(
        self,
        channel: Channel,
        begin: Begin,
        program: Program,
        trainer: Trainer,
        counter: StepCounter,
        norms: SyncBatchNorms | None = None,
        tokens: TurnTokens | None = None,
        residence: DeviceState | None = None,
    ) -> None:
        self._channel = channel
        self._tokens = tokens or TurnTokens(channel.send, trainer.device)
        self._lodger = SwapClient(residence, channel.send)
        self._trainer = trainer
        self._counter = counter
        self._program = program
        self._batch_size = trainer.batch_size
        self._noise = GradientNoiseMeter(trainer.layout.parameters) if program.tune else None
        self._faults = FaultInjector.of(begin.job)
        checkpoints = Checkpoints(Path(begin.checkpoints), program.keep) if begin.checkpoints else None
        self._keeper = StateIO(trainer, self._lodger, channel.send, checkpoints, self._faults)
        self._publisher = MirrorWriter(trainer, self._lodger, channel.send)
        self._joiner = GroupJoiner(trainer, norms, self._is_given_up)
        self._place: RankContext | None = None
        self._formation = -1  # the newest
        self._torn = False
        self._deferred: list[Received] = []

    def run(self) -> None:
        """Do as told until told to leave."""
        self._channel.send(ready_message(self._trainer, self._program, self._joiner.slot_bytes))
        with self._trainer.caveats.watching():
            try:
                while True:
                    self._turn()
            finally:
                self._publisher.finish()

    # -- moves --------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Make a move and hear what was said meanwhile; what goes wrong is told, and orders are awaited."""
        try:
            if self._place is None:
                self._hear()
            else:
                self._go_on(self._place)
            while self._deferred or self._channel.poll():
                self._hear()
            return
        except (Closed, LeaveRequested, StateLost, ProtocolError):
            raise
        except (Exception, SystemExit) as raised:
            traceback.print_exc()  # for the log; the story gets one line
            error = root_cause(raised)
            said = broke_message(error, self._trainer.cursor.step)
            if (
                is_out_of_memory(error)
                and self._place is not None
                and not self._torn
                and not self._trainer.evaluation_due
            ):
                said = replace(said, samples=self._trainer.begin(self._place.parts).samples_in(self._place.pieces))
            self._place = None
            self._channel.send(said)
            if is_device_fault(error) or (is_out_of_memory(error) and self._torn):
                raise StateLost from raised
        release_memory(self._trainer)  # now that the failed step's tensors do not hang on its traceback any more

    def _go_on(self, place: RankContext) -> None:
        trainer = self._trainer
        if trainer.evaluation_due:
            self._evaluate(place)
        elif reason := trainer.stopped:
            self._finish(place, reason)
        elif place.halting:
            self._halt()
        elif place.token is None or self._has_turn(place.token):
            self._make_step(place)
        else:
            place.token.wait(self._channel.fileno())

    def _has_turn(self, token: TurnToken) -> bool:
        """Whether the device is this worker's for the next step; who comes after this one gets it as soon as it can."""
        if not token.left:
            self._trainer.await_device()  # the next one shall have it for itself
            self._lodger.tell_measures()
        if token.is_spent:
            token.hand_on()
        if not token.has_turn:
            self._lodger.make_way()
        graphs = self._trainer.graphs
        return token.begins(self._trainer.cursor.step, queues=graphs is None or graphs.may_queue)

    def _make_step(self, place: RankContext) -> None:
        trainer = self._trainer
        self._lodger.enter()
        step = trainer.begin(place.parts)
        sums = self._alone(step, place) if place.reducer is None else self._in_company(step, place, place.reducer)
        if sums is None:
            return
        with intra_op_threads(place.threads):
            done = trainer.advance(step, sums)
        self._lodger.settle()
        self._counter.set(done.step)
        self._torn = False
        if place.token is not None:
            place.token.done(is_idle=not (trainer.evaluation_due or place.halting))
        if place.said.rank == 0 and (report := place.speedometer.count(done, trainer.progress.metrics)):
            noise = None if self._noise is None else self._noise.scale
            self._channel.send(replace(report, noise=noise, memory_bytes=peak_memory(trainer.device)))
        for words in trainer.take_news():
            self._channel.send(Noted(words))

    def _alone(self, step: Step, place: RankContext) -> StepSums:
        """New weights from all pieces of a step."""
        trainer = self._trainer
        self._faults.strike(step, place.said.rank, place.pieces)
        if trainer.is_whole(step):
            loss = trainer.pass_whole(step, place)
            self._lodger.enter_wholly()
            if self._noise is not None:
                self._noise.see(step.num_samples)
            self._torn = True
            return trainer.apply_whole(step, loss, place.is_made if self._lodger.stays else None)
        self._tell_unrecorded(f"each of them is {len(step.bounds)} passes" if len(step.bounds) > 1 else "")
        self._lodger.enter_wholly()
        place.starts()
        contributions = trainer.contribute(step, range(len(step.bounds)))
        place.is_queued()
        total = trainer.combine(step, contributions)
        self._torn = True
        return trainer.apply(step, total)

    def _in_company(self, step: Step, place: RankContext, reducer: Reducer) -> StepSums | None:
        """New weights of all ranks' contributions to a step; None: the step was given up, and there are new orders."""
        try:
            return self._with_others(step, place, reducer)
        except StepAborted:
            while self._place is place:
                self._hear()
            return None

    def _with_others(self, step: Step, place: RankContext, reducer: Reducer) -> StepSums | None:
        """Contribute to a step, wait for the others, and make new weights of the sum; None: the step was given up."""
        began = time.perf_counter()
        self._tell_unrecorded("several devices share them")
        places = reducer.places(step, place.said.rank)
        if place.meeting is not None:
            place.meeting.attend(step)
        reducer.write(step, self._trainer.contribute(step, place.pieces, places))
        self._faults.strike(step, place.said.rank, place.pieces)
        seconds = time.perf_counter() - began
        samples = step.samples_in(place.pieces)
        self._channel.send(Contributed(place.said.epoch, step.number, seconds, samples, place.update_s, place.copy_s))
        while self._place is place:
            match self._hear():
                case Apply(formation, number, halt) if (formation, number) == (place.said.epoch, step.number):
                    place.halting = halt
                    return self._update(step, place, reducer)
        return None

    def _tell_unrecorded(self, why: str) -> None:
        if why and self._trainer.graphs is not None:
            self._trainer.graphs.pass_by(why)

    def _update(self, step: Step, place: RankContext, reducer: Reducer) -> StepSums | None:
        """New weights of the sum of all contributions; None if the step was given up while they were exchanged."""
        self._lodger.enter_wholly()
        total = reducer.total(step)
        self._torn = True
        if place.exchange is None:
            sums = self._trainer.apply(step, total)
            place.measure(self._trainer, range(len(self._trainer.layout.parameters)))
            return sums
        return self._update_and_exchange(step, place, total, place.exchange)

    def _update_and_exchange(
        self, step: Step, place: RankContext, total: Contribution, exchange: ParamExchange
    ) -> StepSums | None:
        """Update this rank's parameters, and take those that others have updated."""
        exchange.lay_out()
        count = len(self._trainer.layout.parameters)
        mine = [index for index in range(count) if index in place.updates or index not in exchange.known]
        sums = self._trainer.apply(step, total, mine)
        place.measure(self._trainer, mine)
        exchange.give([index for index in place.updates if index in exchange.known])
        self._channel.send(Updated(place.said.epoch, step.number))
        while self._place is place:
            received = self._next()
            match received.message:
                case Gather(formation, number) if (formation, number) == (place.said.epoch, step.number):
                    exchange.take(sorted(exchange.known - set(place.updates)))
                    return sums
                case Publish() | Save():
                    self._deferred.append(received)
                case _:
                    self._carry_out(received)
        return None

    def _evaluate(self, place: RankContext) -> None:
        """Rank 0 evaluates for all; the others wait for what it found."""
        if place.said.rank:
            self._hear()
            return
        self._lodger.enter_wholly()
        metrics = self._trainer.evaluate()
        is_best = self._trainer.record(metrics)
        self._channel.send(Evaluated(self._trainer.cursor.step, metrics))
        if is_best:
            self._keeper.save(is_best=True)

    def _finish(self, place: RankContext, reason: str) -> None:
        self._place = None
        place.end(self._trainer)
        self._lodger.part()
        if place.said.rank == 0:
            self._keeper.save()
        with self._lodger.readable():
            self._channel.send(done_message(self._trainer, reason, self._lodger.story()))

    # -- orders -------------------------------------------------------------------------------------------------------

    def _hear(self) -> Message:
        """Wait for the next order and carry it out."""
        received = self._deferred.pop(0) if self._deferred else self._next()
        self._carry_out(received)
        return received.message

    def _is_given_up(self) -> bool:
        """Whether orders have come that end the present step; what has been said is put aside."""
        while self._channel.poll():
            self._deferred.append(self._next())
        return any(isinstance(received.message, Proceed | Halt | Load | Leave) for received in self._deferred)

    def _next(self) -> Received:
        received = self._channel.receive()
        assert received is not None, "without a timeout there is a message or an end"
        return received

    def _carry_out(self, received: Received) -> None:
        match received.message:
            case Proceed() as said:
                self._proceed(said, received.fds)
            case Halt():
                self._refuse_if_torn()
                if self._place is not None and (reason := self._trainer.stopped):
                    self._finish(self._place, reason)
                else:
                    self._halt()
            case Load() as said:
                self._load(said, received.fds)
            case ReleaseMemory():
                release_memory(self._trainer)
                self._channel.send(MemoryReleased())
            case Publish():
                self._publisher.publish(received.fds[0])
            case Save():
                if (saved := self._keeper.save()) is not None:
                    self._channel.send(Saved(self._trainer.cursor.step, saved))
            case MetricsMeasured(step, metrics):
                if self._trainer.evaluation_due and step == self._trainer.cursor.step:
                    self._trainer.record(metrics)
            case Grant() as grant:
                if self._place is not None and self._place.token is not None:
                    self._place.token.take(grant)
                    self._lodger.come()
            case SwapOut() | SwapIn() as order:
                self._lodger.hear(order)
                if self._place is None or self._place.token is None or not self._place.token.has_turn:
                    self._lodger.make_way()
            case Leave():
                raise LeaveRequested
        close_all(received.fds)

    def _proceed(self, said: Proceed, fds: tuple[int, ...]) -> None:
        if said.epoch < self._formation:
            return
        self._refuse_if_torn()
        trainer = self._trainer
        self._formation, self._place = said.epoch, None
        try:
            apply_batch_size(self._trainer, said, self._batch_size, per_device=self._program.batch_per_device)
        except CarpoolError as error:
            self._channel.send(WorkerFailed("input", str(error), trainer.cursor.step))
            return
        if said.threads:
            torch.set_num_threads(said.threads)
        trainer.limits = said.limits
        try:
            place = self._joiner.join(said, fds)
        except StepAborted as error:
            if not self._is_given_up():
                raise StateLost from error
            return
        if said.time_sliced:
            place.token = self._tokens.token(said.size)
        self._place = place

    def _refuse_if_torn(self) -> None:
        """The last update was given up half-way: what is here belongs to no step."""
        if self._torn:
            raise StateLost

    def _halt(self) -> None:
        self._place = None
        self._trainer.await_device()
        self._channel.send(Halted(self._trainer.cursor.step))

    def _load(self, said: Load, fds: tuple[int, ...]) -> None:
        self._place = None
        try:
            self._keeper.take_over(said, fds, self._channel.poll)
        except CheckpointError as error:
            self._channel.send(WorkerFailed("input", str(error), self._trainer.cursor.step))
            return
        self._torn = False
        self._counter.set(self._trainer.cursor.step)
        self._channel.send(Loaded(self._trainer.cursor.step))
