"""`carpool.session`: without carpool, under an executor, interrupted, killed, and two on one device."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import carpool
from carpool.core.errors import InputError
from carpool.core.messages import Assign, Fact, JobFailed, JobFinished, ProgressReported, Release, ReleaseApplied
from carpool.core.model import Allocation, JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.runtime.data.datasets import TensorData
from carpool.runtime.errors import CheckpointError
from carpool.runtime.executor.client import ExecutorClient, ExecutorOptions
from carpool.runtime.executor.reports import Evaluation, Facts, Gone, Outcome, Report, Sized, Told
from carpool.runtime.process.channel import Channel, pair
from carpool.runtime.process.protocol import Done, Joined, Message, Proceed, Saved, Stepped, WorkerFailed
from carpool.runtime.worker.session import LEFT, Session

TIMEOUT_S = 60.0
CORE = min(os.sched_getaffinity(0))

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
import carpool
from carpool.runtime.data.datasets import TensorData

torch.manual_seed(3)
torch.set_num_threads(1)
data = TensorData(torch.randn(60, 5), torch.randint(0, 3, (60,)))
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
name, epochs, kill_at, partners = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
lines = open("lines", "a", buffering=1)
with carpool.session(model=model, optimizer=optimizer) as session:
    open(f"ready-{name}", "w").close()
    number = -1
    for inputs, labels in session.batches(data, batch_size=16, epochs=epochs):
        lines.write(f"begin {name}\\n")
        if number < 0:
            while not all(os.path.exists(f"ready-{partner}") for partner in partners):
                time.sleep(0.005)
        number += 1
        if name == "moved":  # it must not finish before SIGTERM
            time.sleep(0.02)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        if number == kill_at and not os.path.exists(f"killed-{name}"):
            open(f"killed-{name}", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        session.report(loss=loss, half=loss.item() / 2)
        lines.write(f"end {name}\\n")
"""


def parts() -> tuple[TensorData, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    data = TensorData(torch.randn(60, 5), torch.randint(0, 3, (60,)))
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    return data, model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(folder: Path | None, epochs: int = 3, leave_at: int = -1, **more: Any) -> str:
    """Run the script's loop in this process; returns the final digest."""
    data, model, optimizer = parts()
    with carpool.session(model=model, optimizer=optimizer, folder=folder, **more) as session:
        assert session.is_alone
        for number, (inputs, labels) in enumerate(session.batches(data, 16, epochs=epochs)):
            if number == leave_at:
                signal.raise_signal(signal.SIGTERM)
            session.step(lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), (inputs, labels))
    return carpool.digest(model)


# -- started by hand --------------------------------------------------------------------------------------------------


def test_without_carpool_the_loop_is_unchanged() -> None:
    _, model, optimizer = parts()
    torch.manual_seed(5)
    rows = torch.randn(4, 5)
    for _ in range(3):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    _, same, other = parts()
    torch.manual_seed(5)
    rows = torch.randn(4, 5)
    seen = []
    with carpool.session(model=same, optimizer=other) as session:
        for step in session.steps(3):
            seen.append(step)
            session.step(lambda model, batch: model(batch).square().mean(), rows)
    assert seen == [0, 1, 2]
    assert carpool.digest(same) == carpool.digest(model)


def test_sigterm_saves_and_the_next_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    whole = train(None)
    with pytest.raises(SystemExit) as left:
        train(tmp_path, leave_at=4)
    assert left.value.code == LEFT
    assert signal.getsignal(signal.SIGTERM) is before
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000005.ckpt"]
    assert train(tmp_path) == whole
    assert train(tmp_path) == whole, "a finished loop makes no further step"


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    whole = train(tmp_path, checkpoint_s=0.0)
    newest = max((tmp_path / "checkpoints").glob("step-*"))
    newest.write_bytes(newest.read_bytes()[:-5])
    with pytest.warns(UserWarning, match="checksum"):
        assert train(tmp_path) == whole


def test_wrong_arguments_are_rejected(tmp_path: Path) -> None:
    train(tmp_path)
    with (
        pytest.raises(CheckpointError, match="does not fit this program"),
        carpool.session(model=nn.Linear(2, 2), folder=tmp_path),
    ):
        pass
    with pytest.raises(InputError, match="without state_dict"):
        carpool.session(state={"ema": 3})  # type: ignore[dict-item]
    with carpool.session() as session:
        with pytest.raises(InputError, match="needs a model and an optimizer"):
            session.step(lambda model, batch: batch, torch.zeros(1))
        with pytest.raises(InputError, match="whole number of steps"):
            next(session.steps(-1))
        with pytest.raises(InputError, match="4 samples"):
            next(session.batches(TensorData(torch.zeros(4)), 5, epochs=1))


def test_a_program_whose_final_state_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("no folder can be made here", encoding="utf-8")
    with pytest.warns(UserWarning, match="cannot write"), pytest.raises(CheckpointError):
        train(tmp_path, epochs=1)


def test_under_carpool_a_program_waits_for_room_for_its_final_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair()
    monkeypatch.setenv("CARPOOL_CHANNEL", str(theirs.detach()))
    monkeypatch.setenv("CARPOOL_FOLDER", str(tmp_path))
    monkeypatch.setattr("carpool.runtime.worker.session._RETRY_S", 0.01)
    blocker, channel = tmp_path / "checkpoints", Channel(ours)
    blocker.write_text("no folder can be made here", encoding="utf-8")
    channel.send(Proceed(1))
    said: list[Message] = []

    def executor() -> None:
        while not said or not isinstance(said[-1], Done):
            received = channel.receive(60.0)
            assert received is not None
            said.append(received.message)
            if isinstance(received.message, WorkerFailed):
                blocker.unlink()

    listening = threading.Thread(target=executor)
    listening.start()
    with pytest.warns(UserWarning, match="cannot write"), carpool.session(model=parts()[1]) as session:
        for _ in session.steps(2):
            pass
    listening.join()
    ours.close()
    assert [type(each) for each in said if not isinstance(each, Stepped)] == [Joined, WorkerFailed, Saved, Done]


@pytest.mark.parametrize("total", [-1, 2.0, 10**400])
def test_numbers_of_steps_that_cannot_be_are_refused_at_once(total: Any) -> None:
    with carpool.session() as session, pytest.raises(InputError, match=r"2\*\*"):
        next(session.steps(total))


def test_a_loop_left_by_break_counts_its_last_step(tmp_path: Path) -> None:
    with carpool.session(folder=tmp_path) as session:
        for step in session.steps(10):
            if step == 6:
                break
    assert isinstance(session, Session)
    assert (tmp_path / "checkpoints" / "step-000000007.ckpt").exists()


# -- under an executor ------------------------------------------------------------------------------------------------


class Executor:
    """A real executor with one device of one core, and its reports."""

    def __init__(self, client: ExecutorClient, folder: Path) -> None:
        self.client = client
        self.folder = folder
        self.reports: list[Report] = []
        self.generation = 0

    def begin(self, job: str, epochs: int = 3, kill_at: int = -1, partners: tuple[str, ...] = ()) -> None:
        command = ("python", "session.py", job, str(epochs), str(kill_at), *partners)
        checkpoint_s = 60.0 if kill_at < 0 else 0.0
        self.client.introduce(JobId(job), Program(command=command, folder=str(self.folder), checkpoint_s=checkpoint_s))
        self.assign(job)

    def assign(self, job: str) -> None:
        self.generation += 1
        self.client.carry([Assign(JobId(job), Allocation.of(0, fraction=0.5), self.generation)])

    def release(self, job: str) -> None:
        self.generation += 1
        self.client.carry([Release(JobId(job), self.generation)])

    async def wait_for(self, of: type[Fact], job: str, done: float = 0.0) -> None:
        """Wait for a fact about a job."""
        while True:
            report = await asyncio.wait_for(self.client.receive(), TIMEOUT_S)
            self.reports.append(report)
            for fact in report.facts if isinstance(report, Facts) else ():
                assert of is JobFailed or not isinstance(fact, JobFailed), (fact, self.log(job))
                if isinstance(fact, of) and getattr(fact, "job", "") == job and getattr(fact, "done", 0.0) >= done:
                    return

    def log(self, job: str) -> str:
        return (self.folder / "state" / "jobs" / job / "log").read_text()

    def of(self, kind: type[Any], job: str) -> list[Any]:
        return [report for report in self.reports if isinstance(report, kind) and report.job == job]


@pytest.fixture(scope="module")
def executor(loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    folder = tmp_path_factory.mktemp("sessions")
    (folder / "session.py").write_text(SCRIPT)
    device = LocalDevice(0, "cpu:0", "cpu1", cores=(CORE,))
    options = ExecutorOptions(grace_s=30.0)
    made = Executor(loop.run_until_complete(ExecutorClient.start([device], folder / "state", options=options)), folder)
    yield made
    loop.run_until_complete(made.client.stop(checkpoint=False))
    while not isinstance(loop.run_until_complete(made.client.receive()), Gone):
        pass


@pytest.fixture(scope="module")
def uninterrupted() -> Iterator[dict[int, str]]:
    """Digests by number of epochs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {epochs: train(None, epochs) for epochs in (3, 60)}
    torch.set_num_threads(threads)


def test_a_killed_program_resumes_from_its_checkpoint(
    executor: Executor, loop: asyncio.AbstractEventLoop, uninterrupted: dict[int, str]
) -> None:
    executor.begin("killed", kill_at=6)
    loop.run_until_complete(executor.wait_for(JobFinished, "killed"))
    (outcome,) = executor.of(Outcome, "killed")
    assert outcome.digest == uninterrupted[3]
    assert (outcome.steps, outcome.epochs) == (12, 3)
    killed, resumed = [told.words for told in executor.of(Told, "killed")]
    assert "signal 9" in killed
    assert "step 6" in resumed
    assert executor.of(Sized, "killed")[0].total_steps == 12
    assert executor.of(Evaluation, "killed")[-1].metrics["half"] == pytest.approx(outcome.loss / 2)


def test_a_released_program_resumes_later(
    executor: Executor, loop: asyncio.AbstractEventLoop, uninterrupted: dict[int, str]
) -> None:
    executor.begin("moved", epochs=60)
    loop.run_until_complete(executor.wait_for(ProgressReported, "moved", done=3))
    executor.release("moved")
    loop.run_until_complete(executor.wait_for(ReleaseApplied, "moved", done=3))
    executor.assign("moved")
    loop.run_until_complete(executor.wait_for(JobFinished, "moved"))
    assert executor.of(Outcome, "moved")[0].digest == uninterrupted[60]
    assert "checkpoint" in executor.of(Told, "moved")[-1].words


def test_two_programs_on_one_core_take_turns(
    executor: Executor, loop: asyncio.AbstractEventLoop, uninterrupted: dict[int, str]
) -> None:
    jobs = ("one", "two")
    (executor.folder / "lines").unlink(missing_ok=True)
    for job in jobs:
        executor.begin(job, epochs=60, partners=jobs)
    loop.run_until_complete(executor.wait_for(JobFinished, "one"))
    if not executor.of(Outcome, "two"):
        loop.run_until_complete(executor.wait_for(JobFinished, "two"))
    for job in jobs:
        assert executor.of(Outcome, job)[0].digest == uninterrupted[60]
    lines = [line.split() for line in (executor.folder / "lines").read_text().splitlines()]
    first = lines[0][1]
    joined = next(n for n, (_, job) in enumerate(lines) if job != first)
    # The first program runs freely until the second joins: their steps may overlap once.
    settled = next(n for n in range(joined, len(lines)) if lines[n] == ["end", first]) + 1
    inside = {job for job in jobs if sum(name == job for _, name in lines[:settled]) % 2}
    switches, last = 0, ""
    for what, job in lines[settled:]:
        if what == "end":
            inside.discard(job)
            continue
        assert not inside, f"{job} began while {inside} computed"
        inside.add(job)
        switches, last = switches + (job != last), job
    assert switches >= 3
