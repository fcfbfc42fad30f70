"""Rank context: joins a process-group epoch and holds the worker's rank, reducer and measurements."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from carpool.runtime.compat.torch_api import file_store, tcp_store
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.process.protocol import Proceed
from carpool.runtime.reduce.param_exchange import ParamExchange, measure_copy_s
from carpool.runtime.reduce.process_group_reducer import JOIN_S, PeerLost, ProcessGroupReducer, open_group
from carpool.runtime.reduce.reducer import Reducer
from carpool.runtime.reduce.shm_layout import Owners, ShmLayout, piece_owners
from carpool.runtime.reduce.shm_reducer import ShmReducer, contribution_bytes
from carpool.runtime.reduce.sync_batchnorm import ShmAllGather, SyncBatchNorms, all_gather_bytes
from carpool.runtime.sharing.turn_token import TurnToken
from carpool.runtime.worker.rate_meter import RateMeter
from carpool.runtime.worker.step_grants import StepGrants


@dataclass(slots=True, eq=False)
class RankContext:
    """A worker's rank in a process group, from one `Proceed` to the next."""

    proceed: Proceed
    owners: Owners
    parts: tuple[int, ...]
    reducer: Reducer | None  # None: the only rank
    rate_meter: RateMeter
    param_exchange: ParamExchange | None = None  # None: every rank updates all parameters
    all_gather: ShmAllGather | None = None  # for synchronized BatchNorm
    update_s: float = 0.0  # of the last update, per element
    copy_s: float = 0.0  # to exchange an updated parameter, per element
    token: TurnToken | None = None  # None: the device is not time-sliced
    halt_requested: bool = False  # at the next step boundary, after its evaluation
    grants: StepGrants | None = None  # across nodes; None: permission for each step on its own

    @property
    def pieces(self) -> range:
        return range(*self.owners[self.proceed.rank])

    @property
    def updates(self) -> range:
        """The parameters that this rank updates for all."""
        return range(*self.proceed.update_ranges[self.proceed.rank])

    @property
    def update_threads(self) -> int | None:
        """Intra-op threads for the update, equal in all ranks because they may change bits; None: the only rank."""
        return self.proceed.update_threads or None

    def before_launch(self) -> None:
        if self.token is not None:
            self.token.before_launch()

    def after_launch(self) -> None:
        """Forward and backward are launched: the next worker may prepare if this is the last step of the turn."""
        if self.token is not None:
            self.token.after_launch()

    def after_update_launch(self) -> None:
        """The whole step is launched and no user code follows."""
        if self.token is not None and not self.halt_requested:
            self.token.after_update_launch()

    def finish(self, trainer: Trainer) -> None:
        """Hand the device on at the end of the training, before the weights are saved."""
        if self.token is not None:
            trainer.synchronize()
            self.token.finish()

    def measure_update(self, trainer: Trainer, updated: Sequence[int]) -> None:
        elements = sum(trainer.layout.parameters[index].numel() for index in updated)
        self.update_s = trainer.update.step_s / elements if elements else 0.0
        if not self.copy_s:
            self.copy_s = measure_copy_s(trainer.layout, trainer.training.whole_optimizer)


class GroupJoiner:
    """Joins one process group after another.

    `Proceed` brings one memory file: the segment of the shared-memory reducer, or the store in which the ranks of a
    torch process group find each other. Across nodes rank 0 serves that store on a socket instead.
    """

    def __init__(self, trainer: Trainer, norms: SyncBatchNorms | None, is_aborted: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._norms = norms
        self._is_aborted = is_aborted
        self.slot_bytes = contribution_bytes(trainer.layout)
        if norms is not None:
            self.slot_bytes += all_gather_bytes(norms.vector_size)

    def join(self, proceed: Proceed, fds: tuple[int, ...]) -> RankContext:
        """Join a process group; `StepAborted` if other ranks do not."""
        trainer = self._trainer
        owners = piece_owners(proceed.owners, proceed.size, trainer.shards)
        parts = proceed.parts or tuple(1 for _ in range(proceed.size))
        context = RankContext(proceed, owners, parts, None, RateMeter(proceed.probe))
        if self._norms is not None:
            self._norms.all_gather = None
        is_split = proceed.size > 1 and trainer.shards is None
        trainer.update.threads = context.update_threads if is_split else None
        if proceed.size > 1 and proceed.reducer == "group":
            context.reducer = self._process_group_reducer(proceed, fds, owners)
            if proceed.store and not proceed.time_sliced:
                context.grants = StepGrants(proceed.epoch, trainer.cursor.step)
        elif proceed.size > 1:
            self._use_shared_memory(context, fds[0])
        return context

    def _use_shared_memory(self, context: RankContext, fd: int) -> None:
        proceed, trainer = context.proceed, self._trainer
        layout = ShmLayout(context.owners, self.slot_bytes)
        reducer = ShmReducer(fd, layout, trainer.layout)
        reducer.clear(proceed.rank)
        context.reducer = reducer
        if proceed.update_ranges:
            optimizer = trainer.training.whole_optimizer
            context.param_exchange = ParamExchange(fd, layout.num_bytes, trainer.layout, optimizer)
        if self._norms is not None:
            size = self._norms.vector_size
            context.all_gather = ShmAllGather(fd, layout, proceed.rank, proceed.epoch, size, self._is_aborted)
            self._norms.all_gather = context.all_gather

    def _process_group_reducer(self, proceed: Proceed, fds: tuple[int, ...], owners: Owners) -> Reducer:
        address = proceed.address or "127.0.0.1"  # without one all ranks are on this node
        kept = os.dup(fds[0]) if fds and not proceed.store else None  # the store opens its file by this number
        try:
            store = _network_store(proceed, fds) if kept is None else file_store(f"/proc/self/fd/{kept}")
            group = open_group(store, proceed.epoch, proceed.rank, proceed.size, address)
        except BaseException:
            if kept is not None:
                os.close(kept)
            raise
        exact, layout = self._trainer.shards is not None, self._trainer.layout
        reducer = ProcessGroupReducer(group, proceed.rank, owners, layout, exact=exact, is_aborted=self._is_aborted)
        if kept is not None:
            weakref.finalize(reducer, os.close, kept)
        return reducer


def _network_store(proceed: Proceed, fds: tuple[int, ...]) -> Any:
    """The TCP store of a process group across nodes; rank 0 serves it. Raises `PeerLost` if rank 0 does not answer."""
    host, _, port = proceed.store.rpartition(":")
    listener = os.dup(fds[0]) if fds else None
    try:
        return tcp_store(host, int(port), listener, timeout_s=JOIN_S)
    except RuntimeError as error:
        raise PeerLost(f"the store of epoch {proceed.epoch} at {proceed.store} does not answer: {error}") from error
