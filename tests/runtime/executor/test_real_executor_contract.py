"""The backend contract holds for an executor with real processes, reached through its client."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.core.messages import (
    AssignApplied,
    Fact,
    JobCrashed,
    JobFailed,
    JobFinished,
    Order,
    ProgressReported,
    ReleaseApplied,
)
from carpool.core.model import JobId, JobSpec
from carpool.jobs.devices import parse_devices
from carpool.jobs.program import Program
from carpool.runtime.executor.client import ExecutorClient, ExecutorOptions
from carpool.runtime.executor.reports import Facts, Gone
from carpool.testing.backend_contract import BackendContract

pytest.importorskip("torch")

STEP_S, LONG_S = 0.02, 1000.0
QUIET_S = 0.3  # without an answer, after which none is to come
ENTRY = f"""
import time
import torch
from torch import nn
from carpool import Stop, Training


def paced(steps):
    model = nn.Linear(4, 2)

    def loss(model, batch):
        time.sleep({STEP_S})
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.zeros(64, dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(model=model, optimizer=optimizer, dataset=data, loss=loss, batch_size=8, stop=Stop(steps=steps))
"""


_OfJob = AssignApplied | ReleaseApplied | ProgressReported | JobFinished | JobFailed | JobCrashed


class ExecutorProcess:
    """An executor that all tests share, since importing torch takes seconds; each test has names of its own there."""

    def __init__(self, runner: asyncio.Runner, client: ExecutorClient, folder: Path) -> None:
        self.runner, self.client, self.folder = runner, client, folder
        self.received: dict[str, list[_OfJob]] = {}  # by the prefix of a test's names

    def new_prefix(self) -> str:
        prefix = f"test{len(self.received)}-"
        self.received[prefix] = []
        return prefix

    async def receive(self, timeout_s: float) -> None:
        """Wait for one report; TimeoutError where none comes."""
        report = await asyncio.wait_for(self.client.receive(), timeout_s)
        assert not isinstance(report, Gone), report
        for fact in report.facts if isinstance(report, Facts) else ():
            assert isinstance(fact, _OfJob), fact
            prefix, _, name = fact.job.partition("-")
            self.received[f"{prefix}-"].append(replace(fact, job=JobId(name)))


class ExecutorBench:
    """The executor as one test sees it."""

    def __init__(self, process: ExecutorProcess) -> None:
        self._process = process
        self._prefix = process.new_prefix()
        self._newest: dict[JobId, int] = {}  # generation ordered so far; an older order is not answered
        self._unanswered: dict[JobId, int] = {}
        self._short: set[JobId] = set()  # jobs that end by themselves
        self._ended: set[JobId] = set()
        self.jobs: list[JobId] = []

    def submit(self, spec: JobSpec) -> None:
        assert spec.work is not None
        steps = max(1, round(spec.work / STEP_S))
        self.jobs.append(JobId(self._prefix + spec.id))
        program = Program(entry="paced.py:paced", args={"steps": steps}, folder=str(self._process.folder))
        self._process.client.introduce(self.jobs[-1], program)
        if spec.work < LONG_S:
            self._short.add(spec.id)

    def give(self, *orders: Order) -> None:
        for order in orders:
            if order.generation > self._newest.get(order.job, 0):
                self._newest[order.job] = self._unanswered[order.job] = order.generation
        self._process.client.carry([replace(order, job=JobId(self._prefix + order.job)) for order in orders])

    def run(self, seconds: float) -> list[Fact]:
        return self._process.runner.run(self._answers(seconds))

    async def _answers(self, seconds: float) -> list[Fact]:
        """All facts until every order is answered and nothing follows for a while."""
        facts = self._process.received[self._prefix]
        until = time.monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            while self._is_waiting(facts):
                await self._process.receive(until - time.monotonic())
            until = time.monotonic() + QUIET_S
            while True:
                await self._process.receive(max(0.0, until - time.monotonic()))
        self._unanswered.clear()
        self._process.received[self._prefix] = []
        return list(facts)

    def _is_waiting(self, facts: Sequence[_OfJob]) -> bool:
        """Whether an order is unanswered, or a job that was started should end."""
        self._ended |= {fact.job for fact in facts if isinstance(fact, JobFinished | JobFailed)}
        answered = {fact.job for fact in facts if fact.generation >= self._unanswered.get(fact.job, 0)}
        moves = {fact.job: fact for fact in facts if isinstance(fact, AssignApplied | ReleaseApplied)}
        running = {job for job, last in moves.items() if isinstance(last, AssignApplied)}
        return bool(self._unanswered.keys() - answered - self._ended or (running & self._short) - self._ended)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExecutorProcess]:
    folder = tmp_path_factory.mktemp("contract")
    (folder / "paced.py").write_text(ENTRY, encoding="utf-8")
    devices = parse_devices("cpu:2x1", oversubscribe=True)
    with asyncio.Runner() as runner:
        start = ExecutorClient.start(devices, folder / "state", options=ExecutorOptions(mirror_s=0.2, tick_s=0.02))
        client = runner.run(start)
        yield ExecutorProcess(runner, client, folder)
        runner.run(client.stop(checkpoint=False))


class TestRealExecutor(BackendContract):
    """An executor process on two CPU devices."""

    long_s = LONG_S
    short_s = 0.2
    answer_s = 30.0

    @pytest.fixture(autouse=True)
    def benches(self, process: ExecutorProcess) -> Iterator[None]:
        """Jobs of a test leave the executor when it is over."""
        self.process = process
        self.open: list[ExecutorBench] = []
        yield
        for bench in self.open:
            for job in bench.jobs:
                process.client.forget(job)

    def make_bench(self) -> ExecutorBench:
        """Two devices of a core each."""
        self.open.append(ExecutorBench(self.process))
        return self.open[-1]
