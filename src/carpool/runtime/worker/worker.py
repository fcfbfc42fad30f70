"""Worker: trains one rank of one job on one device as the executor's messages direct.

`_act` does one action, which depends only on the rank context (None: wait for orders) and the trainer's state. Orders
are handled between actions, at once: contributing to a step leaves the trainer unchanged, so each of these moments is a
step boundary. The only exception is the exchange of updated parameters, which defers what it can.
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
from carpool.runtime.engine.custom_step import check_custom_step
from carpool.runtime.engine.determinism import intra_op_threads
from carpool.runtime.engine.flat_buffers import Contribution, StepSums
from carpool.runtime.engine.forward_backward import Step
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.errors import CheckpointError, LeaveRequested, StateLost
from carpool.runtime.memory.device_state import DeviceState
from carpool.runtime.memory.memory_usage import MemoryGrowth, peak_memory, process_limit, release_memory
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
from carpool.runtime.reduce.process_group_reducer import PeerLost
from carpool.runtime.reduce.reducer import Reducer, StepAborted
from carpool.runtime.reduce.sync_batchnorm import SyncBatchNorms
from carpool.runtime.sharing.turn_token import TurnToken, TurnTokens
from carpool.runtime.state.checkpoint import Checkpoints, FinalSaveRetries
from carpool.runtime.state.mirror import MirrorWriter
from carpool.runtime.state.state_io import StateIO
from carpool.runtime.worker.error_classifier import failure_message, is_device_fault, is_out_of_memory, root_cause
from carpool.runtime.worker.fault_injection import FaultInjector
from carpool.runtime.worker.rank_context import GroupJoiner, RankContext
from carpool.runtime.worker.step_grants import StepGrants

_RETRY_S = 2.0  # between attempts to write a final state
_ORDERS_S = 15.0  # for orders after a peer is lost: longer than an executor takes to notice the loss of a machine
_FENCED_POLL_S = 0.1  # between looks at a lease that has ended


class Worker:
    """Runs a trainer under the executor's orders."""

    def __init__(
        self,
        channel: Channel,
        begin: Begin,
        program: Program,
        trainer: Trainer,
        counter: StepCounter,
        norms: SyncBatchNorms | None = None,
        tokens: TurnTokens | None = None,
        device_state: DeviceState | None = None,
    ) -> None:
        self._channel = channel
        self._tokens = tokens or TurnTokens(channel.send, trainer.device)
        self._swap = SwapClient(device_state, channel.send)
        self._trainer = trainer
        self._counter = counter
        self._program = program
        self._growth = MemoryGrowth(trainer.device)
        self._batch_size = trainer.batch_size
        self._noise = GradientNoiseMeter(trainer.layout.parameters) if program.tune else None
        self._faults = FaultInjector.of(begin.job)
        folder = Path(begin.checkpoints)
        checkpoints = Checkpoints(folder, program.keep, counter.may_save).hold() if begin.checkpoints else None
        self._state_io = StateIO(trainer, self._swap, channel.send, checkpoints, self._faults)
        self._mirror_writer = MirrorWriter(trainer, self._swap, channel.send)
        self._joiner = GroupJoiner(trainer, norms, self._is_step_aborted)
        self._context: RankContext | None = None  # None: waiting for orders
        self._newest_epoch = -1
        self._is_torn = False  # an update is incomplete: the state belongs to no step
        self._deferred: list[Received] = []
        self._unsaved_end = ""  # why training ended, while its final state cannot be written
        self._retries = FinalSaveRetries()

    def announce(self) -> None:
        """Report that the training is ready, or raise what its model raises when its state is read."""
        self._channel.send(ready_message(self._trainer, self._program, self._joiner.slot_bytes))

    def run(self) -> None:
        """Train and carry out orders until `Leave` or the end of the channel."""
        with self._trainer.nondeterministic_ops.collect():
            try:
                while True:
                    self._run_once()
            finally:
                self._mirror_writer.finish()

    def _run_once(self) -> None:
        try:
            if self._context is None and self._unsaved_end and not self._deferred:
                self._retry_final_save()
            elif self._context is None:
                self._handle_next()
            elif self._counter.is_fenced:
                self._await_lease()
            else:
                self._act(self._context)
            while self._deferred or self._channel.poll():
                self._handle_next()
            return
        except (Closed, LeaveRequested, StateLost, ProtocolError):
            raise
        except BaseException as raised:  # noqa: BLE001 - user code may raise anything, KeyboardInterrupt too
            traceback.print_exc()  # to the job's log; its story gets one line
            self._report_failure(raised)
        release_memory(self._trainer)  # here the traceback no longer holds the failed step's tensors

    def _await_lease(self) -> None:
        """Handle orders and make no step until the lease is renewed: the job may run on another machine by now."""
        if self._deferred:
            self._handle_next()
        elif (received := self._channel.receive(_FENCED_POLL_S)) is not None:
            self._handle(received)

    def _report_failure(self, raised: BaseException) -> None:
        error, context = root_cause(raised), self._context
        message = failure_message(error, self._trainer.cursor.step)
        out_of_memory = is_out_of_memory(error)
        if out_of_memory:
            is_pass = context is not None and not self._is_torn and not self._trainer.evaluation_due
            samples = self._trainer.next_step(context.parts).samples_in(context.pieces) if context and is_pass else 0
            limit = process_limit(self._trainer.device)
            message = replace(message, samples=samples, growth=self._growth.description(), limit=limit)
        self._context = None
        self._channel.send(message)
        if is_device_fault(error) or (out_of_memory and self._is_torn):
            raise StateLost from raised

    def _act(self, context: RankContext) -> None:
        trainer = self._trainer
        if trainer.evaluation_due:
            self._evaluate(context)
        elif reason := trainer.stop_reason:
            self._finish(context, reason)
        elif context.halt_requested:
            self._halt()
        elif context.token is None or self._has_turn(context.token):
            self._make_step(context)
        else:
            context.token.wait(self._channel.fileno())

    def _has_turn(self, token: TurnToken) -> bool:
        """Whether this worker may start the next step; hands the device on if its turn is used up."""
        if not token.steps_left:
            self._trainer.synchronize()  # the next worker gets an idle device
            self._swap.report_usage()
        if token.is_used_up:
            token.hand_off()
        if not token.has_turn:
            self._swap.swap_out_if_ordered()
        graphs = self._trainer.graphs
        return token.try_begin(self._trainer.cursor.step, can_queue=graphs is None or graphs.can_queue_step)

    def _make_step(self, context: RankContext) -> None:
        trainer = self._trainer
        self._swap.await_weights()
        step = trainer.next_step(context.parts)
        if context.reducer is None:
            sums: StepSums | None = self._local_step(step, context)
        else:
            sums = self._shared_step(step, context, context.reducer)
        if sums is None:
            return
        with intra_op_threads(context.update_threads):
            done = trainer.advance(step, sums)
        self._swap.enter_region()
        self._counter.set(done.step)
        self._growth.count_step()
        self._is_torn = False
        if context.token is not None:
            context.token.step_done(is_idle=not (trainer.evaluation_due or context.halt_requested))
        if context.proceed.rank == 0 and (report := context.rate_meter.count(done, trainer.all_metrics)):
            noise = None if self._noise is None else self._noise.scale
            self._channel.send(replace(report, noise=noise, memory_bytes=peak_memory(trainer.device)))
        for note in trainer.take_notes():
            self._channel.send(Noted(note))

    def _local_step(self, step: Step, context: RankContext) -> StepSums:
        trainer = self._trainer
        self._faults.inject(step, context.proceed.rank, context.pieces)
        if trainer.training.step is not None:
            self._swap.await_state()
            self._is_torn = True  # the user's function updates the weights at any time
            return trainer.custom_step(step, context)
        if trainer.is_single_pass(step):
            loss = trainer.single_pass(step, context)
            self._swap.await_state()
            if self._noise is not None:
                self._noise.observe(step.num_samples)
            self._is_torn = True
            return trainer.apply_single_pass(
                step, loss, context.after_update_launch if self._swap.is_disabled else None
            )
        if len(step.bounds) > 1:
            self._note_eager(f"each step has {len(step.bounds)} passes")
        self._swap.await_state()
        context.before_launch()
        contributions = trainer.contribute(step, range(len(step.bounds)))
        context.after_launch()
        total = trainer.combine(step, contributions)
        self._is_torn = True
        return trainer.apply(step, total)

    def _shared_step(self, step: Step, context: RankContext, reducer: Reducer) -> StepSums | None:
        """Make a step together with other ranks; None: it was aborted by new orders, which are handled."""
        try:
            return self._reduced_step(step, context, reducer)
        except PeerLost as error:
            self._await_orders(context, error)
        except StepAborted:
            while self._context is context:
                self._handle_next()
        return None

    def _await_orders(self, context: RankContext, lost: PeerLost) -> None:
        """Handle the orders that follow the loss of a peer; if none end the epoch in time, exit, so that it is retried.

        The executor notices a dead process or machine by itself, but not a connection that only two workers had.
        """
        until = time.monotonic() + _ORDERS_S * (2 if context.proceed.rank == 0 else 1)  # one rank keeps the state
        while self._context is context:
            if self._deferred:
                self._handle_next()
            elif (received := self._channel.receive(max(0.0, until - time.monotonic()))) is not None:
                self._handle(received)
            else:
                raise StateLost(str(lost)) from lost

    def _reduced_step(self, step: Step, context: RankContext, reducer: Reducer) -> StepSums | None:
        """Contribute to a step, wait for `Apply`, and update the weights; None: new orders ended the step."""
        proceed = context.proceed
        began = time.perf_counter()
        self._note_eager("several devices share each step")
        if context.grants is not None:
            return self._granted_step(step, context, reducer, context.grants)
        if context.all_gather is not None:
            context.all_gather.begin_step(step)
        slots = reducer.slots(step, proceed.rank)
        reducer.write(step, self._trainer.contribute(step, context.pieces, slots, reducer.ready))
        self._faults.inject(step, proceed.rank, context.pieces)
        seconds = time.perf_counter() - began
        samples = step.samples_in(context.pieces)
        self._channel.send(Contributed(proceed.epoch, step.number, seconds, samples, context.update_s, context.copy_s))
        while self._context is context:
            match self._handle_next():
                case Apply(epoch, number, halt) if (epoch, number) == (proceed.epoch, step.number):
                    context.halt_requested = halt
                    return self._update(step, context, reducer)
        return None

    def _granted_step(self, step: Step, context: RankContext, reducer: Reducer, grants: StepGrants) -> StepSums | None:
        """Make a step across nodes, where permission is asked for ahead of time; None: new orders ended the step."""
        if grants.is_due(step.number):
            self._channel.send(grants.ask(self._trainer.cursor.step, step.samples_in(context.pieces)))
        began = time.perf_counter()
        slots = reducer.slots(step, context.proceed.rank)
        contributions = self._trainer.contribute(step, context.pieces, slots, reducer.ready)
        grants.count_pass(time.perf_counter() - began)
        self._faults.inject(step, context.proceed.rank, context.pieces)
        reducer.write(step, contributions)
        while self._context is context and step.number >= grants.next_step:
            self._handle_next()
        if self._context is not context:
            return None
        sums = self._update(step, context, reducer)
        context.halt_requested = grants.halt_after == step.number
        return sums

    def _note_eager(self, reason: str) -> None:
        if self._trainer.graphs is not None:
            self._trainer.graphs.note_eager(reason)

    def _update(self, step: Step, context: RankContext, reducer: Reducer) -> StepSums | None:
        """Update the weights from the sum of all contributions; None: aborted during the parameter exchange."""
        self._swap.await_state()
        total = reducer.total(step)
        self._is_torn = True
        if context.param_exchange is None:
            sums = self._trainer.apply(step, total)
            context.measure_update(self._trainer, range(len(self._trainer.layout.parameters)))
            return sums
        return self._update_and_exchange(step, context, total, context.param_exchange)

    def _update_and_exchange(
        self, step: Step, context: RankContext, total: Contribution, exchange: ParamExchange
    ) -> StepSums | None:
        proceed = context.proceed
        exchange.update_layout()
        count = len(self._trainer.layout.parameters)
        own = [index for index in range(count) if index in context.updates or index not in exchange.shared]
        sums = self._trainer.apply(step, total, own)
        context.measure_update(self._trainer, own)
        exchange.write([index for index in context.updates if index in exchange.shared])
        self._channel.send(Updated(proceed.epoch, step.number))
        while self._context is context:
            received = self._receive()
            match received.message:
                case Gather(epoch, number) if (epoch, number) == (proceed.epoch, step.number):
                    exchange.read(sorted(exchange.shared - set(context.updates)))
                    return sums
                case Publish() | Save():
                    self._deferred.append(received)
                case _:
                    self._handle(received)
        return None

    def _evaluate(self, context: RankContext) -> None:
        """Evaluate on rank 0; the other ranks wait for its metrics."""
        if context.proceed.rank:
            self._handle_next()
            return
        self._swap.await_state()
        metrics = self._trainer.evaluate()
        is_best = self._trainer.record_metrics(metrics)
        self._channel.send(Evaluated(self._trainer.cursor.step, metrics))
        if is_best:
            self._state_io.save(is_best=True)

    def _finish(self, context: RankContext, reason: str) -> None:
        self._context = None
        context.finish(self._trainer)
        self._swap.swap_out()
        if context.proceed.rank == 0 and self._state_io.save() is None:
            self._unsaved_end, self._retries = reason, FinalSaveRetries()
            self._channel.send(
                Noted(f"its final state is not on disk: the job ends once it is (tried every {_RETRY_S:g} s)")
            )
            self._count_failed_save()
        else:
            self._report_done(reason)

    def _retry_final_save(self) -> None:
        """Try again to write the final state, after an order or a pause: the job finishes only once it is on disk."""
        received = self._channel.receive(_RETRY_S)
        if received is not None:
            if isinstance(received.message, Proceed | Halt | Load):
                self._unsaved_end = ""  # the end is reached again
            self._handle(received)
        elif self._state_io.save(quietly=True) is not None:
            reason, self._unsaved_end = self._unsaved_end, ""
            self._report_done(reason)
        else:
            self._count_failed_save()

    def _count_failed_save(self) -> None:
        """Fail the job if its final state cannot be written and free space would not help."""
        error = self._state_io.error
        if self._retries.is_exhausted(error):
            self._unsaved_end = ""
            self._channel.send(
                WorkerFailed("input", f"its final state cannot be saved: {error}", self._trainer.cursor.step)
            )

    def _report_done(self, reason: str) -> None:
        with self._swap.readable():
            self._channel.send(done_message(self._trainer, reason, self._swap.notes()))

    def _handle_next(self) -> Message:
        received = self._deferred.pop(0) if self._deferred else self._receive()
        self._handle(received)
        return received.message

    def _is_step_aborted(self) -> bool:
        """Whether an order that ends the current step has arrived; received orders are deferred."""
        while self._channel.poll():
            self._deferred.append(self._receive())
        return any(isinstance(received.message, Proceed | Halt | Load | Leave) for received in self._deferred)

    def _receive(self) -> Received:
        received = self._channel.receive()
        assert received is not None, "without a timeout receive() returns a message or raises"
        return received

    def _handle(self, received: Received) -> None:
        match received.message:
            case Proceed() as proceed:
                self._proceed(proceed, received.fds)
            case Halt():
                self._check_not_torn()
                if self._context is not None and (reason := self._trainer.stop_reason):
                    self._finish(self._context, reason)
                else:
                    self._halt()
            case Load() as order:
                self._load(order, received.fds)
            case ReleaseMemory():
                release_memory(self._trainer)
                self._channel.send(MemoryReleased())
            case Publish():
                self._mirror_writer.publish(received.fds[0])
            case Save():
                if (path := self._state_io.save()) is not None:
                    self._channel.send(Saved(self._trainer.cursor.step, path))
            case MetricsMeasured(step, metrics):
                if self._trainer.evaluation_due and step == self._trainer.cursor.step:
                    self._trainer.record_metrics(metrics)
            case Apply() as apply:
                if self._context is not None and self._context.grants is not None:
                    self._context.grants.take(apply)
            case Grant() as grant:
                if self._context is not None and self._context.token is not None:
                    self._context.token.add_grant(grant)
                    self._swap.swap_in()
            case SwapOut() | SwapIn() as order:
                self._swap.handle(order)
                if self._context is None or self._context.token is None or not self._context.token.has_turn:
                    self._swap.swap_out_if_ordered()
            case Leave():
                raise LeaveRequested
        close_all(received.fds)

    def _proceed(self, proceed: Proceed, fds: tuple[int, ...]) -> None:
        if proceed.epoch < self._newest_epoch:
            return
        self._check_not_torn()
        trainer = self._trainer
        self._newest_epoch, self._context = proceed.epoch, None
        try:
            check_custom_step(trainer.training, devices=proceed.size)
            apply_batch_size(trainer, proceed, self._batch_size, per_device=self._program.batch_per_device)
        except CarpoolError as error:
            self._channel.send(WorkerFailed("input", str(error), trainer.cursor.step))
            return
        if proceed.threads:
            torch.set_num_threads(proceed.threads)
        trainer.limits = proceed.limits
        trainer.is_first_rank = proceed.rank == 0
        try:
            context = self._joiner.join(proceed, fds)
        except StepAborted as error:
            if not self._is_step_aborted():
                raise StateLost from error
            return
        if proceed.time_sliced:
            context.token = self._tokens.new_token(proceed.size)
        self._context = context

    def _check_not_torn(self) -> None:
        if self._is_torn:
            raise StateLost

    def _halt(self) -> None:
        self._context = None
        self._trainer.synchronize()
        self._channel.send(Halted(self._trainer.cursor.step))

    def _load(self, order: Load, fds: tuple[int, ...]) -> None:
        self._context = None
        try:
            self._state_io.load(order, fds, self._channel.poll)
        except CheckpointError as error:
            self._channel.send(WorkerFailed("input", str(error), self._trainer.cursor.step))
            return
        self._is_torn = False
        self._counter.set(self._trainer.cursor.step)
        self._channel.send(Loaded(self._trainer.cursor.step))
