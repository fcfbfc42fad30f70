"""The process-group reducer with real processes: bits of one process, and a new epoch when a peer is killed."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.functional import cross_entropy

import carpool
from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.forward_backward import Step
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.reduce.process_group_reducer import PeerLost, ProcessGroupReducer, open_group
from carpool.runtime.reduce.shm_layout import Owners
from carpool.runtime.state.digest import digest

TIMEOUT_S = 60.0
STEPS = 5
BUCKET_BYTES = 256  # several buckets, of even so small a model
DIES_AT = 2  # steps done when the last rank is killed


def trainer(*, exact: bool) -> Trainer:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    training = carpool.Training(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        dataset=TensorData(torch.randn(100, 6), torch.randint(0, 3, (100,))),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        batch_size=36,
        stop=carpool.Stop(steps=STEPS),
    )
    return Trainer(training, exact=exact)


def owned(sizes: tuple[int, ...]) -> Owners:
    return tuple(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def member(
    rank: int, port: int, epochs: list[tuple[int, ...]], exact: bool, dies: bool, gone: Any, reports: Any
) -> None:
    """One rank: trains, in the next epoch when a peer is lost, and reports its digest."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    trained = trainer(exact=exact)
    losses = 0
    for epoch, sizes in enumerate(epochs):
        is_last = epoch == len(epochs) - 1
        group = open_group(store, epoch, rank, len(sizes), join_s=TIMEOUT_S)
        is_aborted = (lambda: False) if is_last else gone.is_set
        reducer = ProcessGroupReducer(
            group, rank, owned(sizes), trained.layout, exact=exact, is_aborted=is_aborted, bucket_bytes=BUCKET_BYTES
        )
        try:
            while not trained.stop_reason:
                if dies and trained.cursor.step == DIES_AT:
                    os.kill(os.getpid(), signal.SIGKILL)
                parts = () if exact else tuple(1 for _ in sizes)
                step = trained.next_step(parts)
                slots = reducer.slots(step, rank)
                reducer.write(step, trained.contribute(step, range(*owned(sizes)[rank]), slots, reducer.ready))
                trained.advance(step, trained.apply(step, reducer.total(step)))
        except PeerLost:
            losses += 1
        del reducer, group
    reports.put((rank, losses, digest(trained.training.model)))


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["torch._dynamo", "carpool.runtime.engine.trainer"])  # imported by every member
    return made


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def train_all(
    context: ForkServerContext, store: TCPStore, epochs: list[tuple[int, ...]], *, exact: bool
) -> list[tuple[int, int, str]]:
    """The reports of the surviving ranks; with several epochs the last rank of the first one is killed."""
    reports, gone = context.SimpleQueue(), context.Event()
    first, last = len(epochs[0]), len(epochs[-1])
    members = [
        context.Process(target=member, args=(rank, store.port, epochs, exact, rank >= last, gone, reports), daemon=True)
        for rank in range(first)
    ]
    for process in members:
        process.start()
    try:
        for process in members[last:]:
            process.join(TIMEOUT_S)
            assert process.exitcode == -signal.SIGKILL
        gone.set()
        for process in members[:last]:
            process.join(TIMEOUT_S)
            assert process.exitcode == 0
        return sorted(reports.get() for _ in range(last))
    finally:
        for process in members:
            process.kill()


def alone(*, exact: bool) -> Trainer:
    trained = trainer(exact=exact)
    for _ in trained.steps():
        pass
    return trained


def test_exact_mode_equals_one_process_bitwise_and_survives_a_killed_peer(
    context: ForkServerContext, store: TCPStore
) -> None:
    expected = digest(alone(exact=True).training.model)
    assert train_all(context, store, [(3, 3, 2), (4, 4)], exact=True) == [(0, 1, expected), (1, 1, expected)]


def test_default_mode_is_equal_on_all_ranks(context: ForkServerContext, store: TCPStore) -> None:
    (_, _, first), (_, _, second) = train_all(context, store, [(1, 1)], exact=False)
    assert first == second


def test_the_sum_does_not_depend_on_when_gradients_are_sent(store: TCPStore) -> None:
    expected = PairOfRanks(store, TIMEOUT_S)
    for _ in range(STEPS):
        expected.make_step(early=(False, False))
    ranks = PairOfRanks(store, TIMEOUT_S, epoch=1)
    for number in range(STEPS):
        ranks.make_step(early=(True, number % 2 == 0))
    assert len({digest(each.training.model) for each in (*expected.trained, *ranks.trained)}) == 1


def test_a_rank_without_samples_sends_the_same_buckets(store: TCPStore) -> None:
    pairs = []
    for epoch, is_early in enumerate((False, True)):
        ranks = PairOfRanks(store, TIMEOUT_S, epoch=epoch)
        for _ in range(STEPS):
            ranks.make_step(early=(is_early, is_early), parts=(1, 0))
        pairs.append(ranks)
    assert len({digest(each.training.model) for ranks in pairs for each in ranks.trained}) == 1


def test_buckets_leave_the_process_before_the_pass_ends(store: TCPStore) -> None:
    ranks = PairOfRanks(store, TIMEOUT_S)
    ranks.make_step(early=(True, True))  # counts
    trained, reducer = ranks.trained[0], ranks.reducers[0]
    step = trained.next_step((1, 1))
    trained.contribute(step, range(1), reducer.slots(step, 0), reducer.ready)
    assert reducer._num_sent > 1


JOIN_S = 2.0
POLLS = 150  # of 20 ms each: longer than that
SHORT_S = 0.5


class PairOfRanks:
    """Two ranks of one process, with a short timeout for joining."""

    def __init__(
        self, store: TCPStore, collective_s: float, is_aborted: Callable[[], bool] = lambda: False, *, epoch: int = 0
    ) -> None:
        def join(rank: int) -> Any:
            client = TCPStore("127.0.0.1", store.port, is_master=False)
            return open_group(client, epoch, rank, 2, join_s=JOIN_S, collective_s=collective_s)

        with ThreadPoolExecutor(2) as pool:
            groups = list(pool.map(join, (0, 1)))
        self.trained = [trainer(exact=False) for _ in groups]
        self.reducers = [
            ProcessGroupReducer(
                group, rank, owned((1, 1)), each.layout, exact=False, is_aborted=is_aborted, bucket_bytes=BUCKET_BYTES
            )
            for rank, (group, each) in enumerate(zip(groups, self.trained, strict=True))
        ]

    def contribute(self, rank: int, *, early: bool = False, parts: tuple[int, int] = (1, 1)) -> Step:
        trained, reducer = self.trained[rank], self.reducers[rank]
        step = trained.next_step(parts)
        slots = reducer.slots(step, rank) if early else None
        made = trained.contribute(step, range(*owned((1, 1))[rank]), slots, reducer.ready if early else None)
        reducer.write(step, made)
        return step

    def make_step(self, *, early: tuple[bool, bool], parts: tuple[int, int] = (1, 1)) -> None:
        """One step of both ranks; only some send gradients during the backward pass."""
        steps = [self.contribute(rank, early=is_early, parts=parts) for rank, is_early in enumerate(early)]
        for trained, reducer, step in zip(self.trained, self.reducers, steps, strict=True):
            trained.advance(step, trained.apply(step, reducer.total(step)))


def test_a_slow_rank_is_waited_for_longer_than_for_joining(store: TCPStore) -> None:
    polls = itertools.count()
    is_late = threading.Event()

    def is_aborted() -> bool:
        if next(polls) == POLLS:
            is_late.set()
        return False

    ranks = PairOfRanks(store, TIMEOUT_S, is_aborted)
    with ThreadPoolExecutor(1) as pool:
        first = ranks.contribute(0)
        total = pool.submit(ranks.reducers[0].total, first)
        assert is_late.wait(TIMEOUT_S), total.exception()
        ranks.reducers[1].total(ranks.contribute(1))
        assert total.result(TIMEOUT_S).values.numel()


def test_a_rank_that_falls_silent_is_lost_after_the_timeout_for_collectives(store: TCPStore) -> None:
    ranks = PairOfRanks(store, SHORT_S)
    with pytest.raises(PeerLost, match="a peer is lost"):
        ranks.reducers[0].total(ranks.contribute(0))


def test_a_rank_that_is_reported_lost_is_not_waited_for(store: TCPStore) -> None:
    ranks = PairOfRanks(store, TIMEOUT_S, lambda: True)
    with pytest.raises(PeerLost, match="aborted"):
        ranks.reducers[0].total(ranks.contribute(0))


def test_a_group_whose_ranks_do_not_all_come_is_not_formed(store: TCPStore) -> None:
    with pytest.raises(PeerLost, match="epoch 3 was not formed"):
        open_group(store, 3, 0, 2, join_s=SHORT_S)


class LateWork:
    """A collective that ends just after a wait for it has timed out."""

    def __init__(self, error: str = "") -> None:
        self.error, self.waits = error, 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waits += 1
        if timeout is not None or self.error:
            raise RuntimeError(self.error or "timed out")

    def is_completed(self) -> bool:
        return self.waits > 0


def test_a_collective_that_ends_just_after_a_timeout_counts() -> None:
    trained = trainer(exact=False)
    reducer = ProcessGroupReducer(None, 0, owned((1, 1)), trained.layout, exact=False)
    reducer._wait(LateWork())
    with pytest.raises(PeerLost, match="reset"):
        reducer._wait(LateWork("reset"))
