"""Whole federations in real processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool.backends.federation_devices import EmbeddedDevices, Event
from carpool.backends.federation_store import FederationStore
from carpool.core.errors import InputError
from carpool.core.model import Kind
from carpool.federated.coordinator import Coordinator
from carpool.federated.federation import DeviceName, TaskName
from carpool.federated.federation_file import FederationFile, parse_federation
from carpool.federated.messages import (
    Aggregate,
    CloseCycle,
    DeviceJoined,
    DeviceLost,
    Outcome,
    StartWork,
    TaskResult,
    WorkReported,
)
from carpool.federated.updates import decode_weights, encode_weights
from carpool.runtime.process.channel import Received, close_all
from carpool.runtime.process.protocol import TasksDone
from carpool.runtime.process.shared_memory import memory_file_of
from tests.support.federation_runs import Runs

ENTRIES = """
import os
import threading
from dataclasses import replace
from pathlib import Path
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import carpool

def make(hidden=8, lr=0.5, loss=None, **more):
    torch.manual_seed(0)
    inputs = torch.randn(240, 4)
    labels = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 4))
    test = carpool.datasets.TensorData(inputs, labels)
    return carpool.Training(
        model, torch.optim.SGD(model.parameters(), lr=lr), torch.utils.data.TensorDataset(inputs, labels),
        loss or (lambda model, batch: cross_entropy(model(batch[0]), batch[1])), 8, carpool.Stop(epochs=1),
        evaluate=lambda model: {"accuracy": carpool.datasets.accuracy(model, test)}, **more)

def broken_weights():
    def spoil(model, step):
        with torch.no_grad():
            model[0].weight.fill_(float("nan"))
    return make(after_update=spoil)

def fails():
    def loss(model, batch):
        raise ValueError("no luck")
    return make(loss=loss)

def dies_once(flag):
    calls = [0]
    def loss(model, batch):
        calls[0] += 1
        if calls[0] == 8:  # in the first cycle: three steps are timed before it
            try:
                Path(flag).touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os._exit(9)
        return cross_entropy(model(batch[0]), batch[1])
    return make(loss=loss)

def hangs_when_loaded_again(flag):
    if Path(flag).exists():
        threading.Event().wait()
    return dies_once(flag)

def dies_without_a_log(flag):
    training, calls = make(), [0]
    def loss(model, batch):
        calls[0] += 1
        if calls[0] == 8 and not Path(flag).exists():
            Path(flag).touch()
            log = os.readlink("/proc/self/fd/1")
            os.unlink(log)
            os.mkdir(log)  # cannot be opened
            os._exit(9)
        return cross_entropy(model(batch[0]), batch[1])
    return replace(training, loss=loss)

def hangs_in_a_step(flag):
    calls = [0]
    def loss(model, batch):
        calls[0] += 1
        if calls[0] == 8:
            try:
                Path(flag).touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                threading.Event().wait()
        return cross_entropy(model(batch[0]), batch[1])
    return make(loss=loss)

def exits(where):
    if where == "load":
        os._exit(9)
    if where == "hang":
        threading.Event().wait()
    return replace(make(), evaluate=lambda model: os._exit(9))

def meets(own, other):
    training = make()
    calls = [0]
    def loss(model, batch):
        calls[0] += 1
        if calls[0] > 3:  # three steps are timed before the first cycle
            Path(own).touch()
            for _ in range(200):
                if Path(other).exists():
                    break
                threading.Event().wait(0.05)
            else:
                raise ValueError("the other task does not come")
        return cross_entropy(model(batch[0]), batch[1])
    return replace(training, loss=loss)

def no_entry():
    raise RuntimeError("missing data")
"""


def federation(folder: Path, tasks: list[dict[str, Any]], **more: Any) -> FederationFile:
    (folder / "entries.py").write_text(ENTRIES)
    devices = [{"name": "fast", "slowdown": 1}, {"name": "slow", "slowdown": 3}]
    data = {"rounds": 3, "plan": "equal-epochs", "device": devices, "task": tasks, **more}
    return parse_federation(data, folder, "test")


def two_tasks(folder: Path, **more: Any) -> FederationFile:
    return federation(
        folder,
        [
            {"name": "a", "entry": "entries.py:make", "partition": {"scheme": "labels"}},
            {"name": "b", "entry": "entries.py:make", "args": {"hidden": 4}, "algorithm": "fedadam", "server_lr": 0.1},
        ],
        **more,
    )


def test_tasks_learn_together(tmp_path: Path, run: Runs) -> None:
    summaries, records = run(two_tasks(tmp_path, rounds=6, plan="balanced"), tmp_path / "run")
    assert [(each.rounds, each.failed) for each in summaries.values()] == [(6, False)] * 2
    for summary in summaries.values():
        assert [done for done, _ in summary.metrics] == list(range(1, 7))
    curve = [metrics["accuracy"] for _, metrics in summaries[TaskName("a")].metrics]
    assert curve[-1] > 0.6
    coordinator = Coordinator(FederationStore(tmp_path / "run").read()[0])
    for record in records:  # the journal's facts give the same orders again
        assert tuple(coordinator.handle(record.at, record.facts)) == record.orders


def test_a_killed_run_resumes_with_the_same_weights(tmp_path: Path, run: Runs) -> None:
    file = two_tasks(tmp_path)
    whole, records = run(file, tmp_path / "whole")
    digests = {name: each.digest for name, each in whole.items()}
    closings = [n for n, record in enumerate(records, 1) if any(isinstance(o, CloseCycle) for o in record.orders)]
    for crash_at in (2, closings[1]):  # in a cycle, and before an aggregation is saved
        folder = tmp_path / f"cut-{crash_at}"
        with pytest.raises(ConnectionAbortedError):
            run(file, folder, crash_at=crash_at)
        resumed, _ = run(file, folder, resume=True)
        assert {name: each.digest for name, each in resumed.items()} == digests
        assert [each.metrics[-1] for each in resumed.values()] == [each.metrics[-1] for each in whole.values()]
    with pytest.raises(InputError):
        run(replace(file, federation=replace(file.federation, epochs=2.0)), tmp_path / "whole", resume=True)


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from carpool.backends.federation_run import FederationRun, fork_server
from carpool.backends.federation_store import FederationStore
from tests.backends.test_federation_run import two_tasks

left = int(sys.argv[2])

def observe(record):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with fork_server() as forks:
        file = two_tasks(Path(sys.argv[1]))
        await FederationRun(file, FederationStore(Path(sys.argv[1]) / "killed"), [observe]).run(forks)

asyncio.run(main())
"""


def test_a_coordinator_killed_by_sigkill_resumes_with_the_same_weights(tmp_path: Path, run: Runs) -> None:
    file = two_tasks(tmp_path)
    whole, _ = run(file, tmp_path / "whole")
    (tmp_path / "killed").mkdir()
    words = [sys.executable, "-c", KILLED, str(tmp_path), "5"]
    root = Path(__file__).resolve().parents[2]
    child = subprocess.run(words, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=False)
    assert child.returncode == -signal.SIGKILL
    resumed, _ = run(file, tmp_path / "killed", resume=True)
    assert {name: each.digest for name, each in resumed.items()} == {name: each.digest for name, each in whole.items()}


def test_a_device_that_dies_works_again_in_the_same_round(tmp_path: Path, run: Runs) -> None:
    flag = str(tmp_path / "flag")
    file = federation(tmp_path, [{"name": "a", "entry": "entries.py:dies_once", "args": {"flag": flag}}])
    summaries, records = run(file, tmp_path / "run")
    assert Path(flag).exists()
    assert any(isinstance(fact, DeviceLost) for record in records for fact in record.facts)
    first = next(order for record in records for order in record.orders if isinstance(order, Aggregate))
    assert first.devices == ("fast", "slow")
    again, _ = run(file, tmp_path / "again")  # it does not die again
    assert summaries[TaskName("a")].digest == again[TaskName("a")].digest


def test_a_device_that_hangs_while_it_is_loaded_again_is_lost_and_the_others_go_on(tmp_path: Path, run: Runs) -> None:
    tasks = [{"name": "a", "entry": "entries.py:hangs_when_loaded_again", "args": {"flag": str(tmp_path / "flag")}}]
    summaries, records = run(federation(tmp_path, tasks, load_s=3.0), tmp_path / "run")
    assert (summaries[TaskName("a")].rounds, summaries[TaskName("a")].failed) == (3, False)
    (lost,) = [fact for record in records for fact in record.facts if isinstance(fact, DeviceLost)]
    assert "did not load its tasks within 3 s" in lost.reason
    used = {order.devices for record in records for order in record.orders if isinstance(order, Aggregate)}
    assert used == {tuple({"fast", "slow"} - {lost.device})}


def test_a_device_that_cannot_be_started_again_is_lost_and_the_others_go_on(tmp_path: Path, run: Runs) -> None:
    tasks = [{"name": "a", "entry": "entries.py:dies_without_a_log", "args": {"flag": str(tmp_path / "flag")}}]
    summaries, records = run(federation(tmp_path, tasks), tmp_path / "run")
    assert (summaries[TaskName("a")].rounds, summaries[TaskName("a")].failed) == (3, False)
    (lost,) = [fact for record in records for fact in record.facts if isinstance(fact, DeviceLost)]
    assert f"{lost.device}.log" in lost.reason


def test_a_cycle_is_closed_without_a_device_that_has_not_loaded_since_the_resume(tmp_path: Path, run: Runs) -> None:
    devices = EmbeddedDevices(two_tasks(tmp_path), run.forks, tmp_path)
    devices.halt([DeviceName("slow")])
    assert not devices.is_working


def test_a_device_that_hangs_in_a_step_is_killed_at_the_second_deadline_and_comes_back(
    tmp_path: Path, run: Runs
) -> None:
    tasks = [{"name": "a", "entry": "entries.py:hangs_in_a_step", "args": {"flag": str(tmp_path / "flag")}}]
    devices = [{"name": "device", "count": 2}]
    file = federation(tmp_path, tasks, rounds=30, device=devices, deadline_s=0.3, grace_s=0.2)
    summaries, records = run(file, tmp_path / "run")
    assert (summaries[TaskName("a")].rounds, summaries[TaskName("a")].failed) == (30, False)
    lost = {fact.device for record in records for fact in record.facts if isinstance(fact, DeviceLost)}
    closings = [order for record in records for order in record.orders if isinstance(order, CloseCycle)]
    missing = [name for order in closings for name in order.missing]
    assert len(lost) == 1
    assert lost <= set(missing)
    (hung,) = lost
    last = [order for record in records for order in record.orders if isinstance(order, Aggregate)][-1]
    assert hung in last.devices


def test_tasks_that_cannot_train_fail_and_the_others_do_not(tmp_path: Path, run: Runs) -> None:
    tasks: list[dict[str, Any]] = [
        {"name": "nan", "entry": "entries.py:broken_weights", "batch_size": 120},
        {"name": "raises", "entry": "entries.py:fails"},
        {"name": "far", "entry": "entries.py:make", "max_norm": 1e-6},
        {"name": "large", "entry": "entries.py:make", "max_update": 100},
        {"name": "good", "entry": "entries.py:make"},
    ]
    summaries, records = run(federation(tmp_path, tasks), tmp_path / "run")
    found = {(refusal.task, refusal.outcome) for record in records for refusal in record.refused}
    assert found == {
        ("nan", Outcome.NOT_FINITE),
        ("raises", Outcome.FAILED),
        ("far", Outcome.NORM_EXCEEDED),
        ("large", Outcome.OVERSIZED),
    }
    assert {name for name, each in summaries.items() if not each.failed} == {"good"}


def spoiled(arrays: dict[str, Any], fault: str) -> dict[str, Any]:
    """The arrays of an update with a fault."""
    name = "0.weight"
    value = arrays[name]
    made: dict[str, Any] = {
        "nan": np.full_like(value, np.nan),
        "infinite": np.full_like(value, np.inf),
        "shape": value.T,
        "empty": value[:0],
        "dtype": value.astype(np.float64),
        "complex": value.astype(np.complex64),
        "swapped": value.astype(value.dtype.newbyteorder()),
    }
    if fault == "missing":
        return {key: array for key, array in arrays.items() if key != name}
    return {**arrays, name: made.get(fault, value), **({"extra": value} if fault == "extra" else {})}


REFUSED = {
    "nan": Outcome.NOT_FINITE,
    "infinite": Outcome.NOT_FINITE,
    "shape": Outcome.WRONG_SHAPE,
    "empty": Outcome.WRONG_SHAPE,
    "extra": Outcome.WRONG_SHAPE,
    "missing": Outcome.WRONG_SHAPE,
    "dtype": Outcome.WRONG_DTYPE,
    "complex": Outcome.WRONG_DTYPE,
    "swapped": Outcome.WRONG_DTYPE,
    "large": Outcome.OVERSIZED,
    "junk": Outcome.UNREADABLE,
    "without": Outcome.UNREADABLE,
    "invented": Outcome.FAILED,
    "samples": Outcome.INFLATED,
    "few-steps": Outcome.INFLATED,
    "many-steps": Outcome.INFLATED,
    "twice": Outcome.DUPLICATE,
    "stale": Outcome.STALE,
    "early": Outcome.NOT_ORDERED,
}
UNREADABLE_REPORTS: dict[str, dict[str, Any]] = {
    "text": {"samples": "many"},
    "negative": {"samples": -5},
    "huge": {"samples": 1 << 60},
    "endless": {"busy_s": float("inf")},
    "unknown": {"colour": "red"},
}
CLAIMS: dict[str, dict[str, Any]] = {
    **UNREADABLE_REPORTS,
    "invented": {"outcome": "splendid"},
    "samples": {"samples": 100_000},
    "few-steps": {"steps": 1},
    "many-steps": {"steps": 1 << 39},
    "good": {"num_bytes": 1 << 39},
}


class HostileDevices:
    """Devices that answer at once, each with its own fault; in place of processes."""

    NAMES = ("good", *REFUSED, *UNREADABLE_REPORTS, "silent")

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._late: list[Event] = []

    async def start(self) -> list[DeviceJoined]:
        return [DeviceJoined(DeviceName(name), Kind("cpu"), {"a": 10}) for name in self.NAMES]

    def run(self, order: StartWork, weights: Sequence[bytes]) -> None:
        (work,) = order.work
        name, arrays = order.device, decode_weights(weights[0])
        data = {"large": b"x" * 1_000_000, "junk": b"junk"}.get(name, encode_weights(spoiled(arrays, name)))
        result = TaskResult(work.task, work.round, work.samples, 2, 0.1, len(data), outcome="accepted")._asdict()
        result |= CLAIMS.get(name, {})
        other = encode_weights({**arrays, "0.bias": arrays["0.bias"] + 100})  # with other weights
        done, next_done = (TasksDone(order.cycle + more, (result,), 0.1) for more in (0, 1))
        reports: list[tuple[TasksDone, list[bytes]]] = [(done, [] if name == "without" else [data])]
        if name in ("twice", "early"):
            reports.append((done if name == "twice" else next_done, [other]))
        found = [received(name, *each) for each in reports]
        if name == "stale":
            found, self._late = self._late, found  # it answers one cycle late
        for event in found if name != "silent" else ():
            self.events.put_nowait(event)

    def halt(self, missing: Sequence[DeviceName]) -> None:
        assert {"stale", "silent"} <= set(missing)

    @property
    def is_working(self) -> bool:
        return not self.events.empty()

    @property
    def may_join(self) -> bool:
        return True

    async def close(self) -> None:
        for _, event in self._late:
            if isinstance(event, Received):
                close_all(event.fds)


def received(name: str, done: TasksDone, files: Sequence[bytes]) -> Event:
    return name, Received(done, tuple([memory_file_of(each, "update") for each in files]))


def test_every_hostile_update_has_its_outcome_and_the_good_ones_count(tmp_path: Path, run: Runs) -> None:
    devices = [{"name": name, "slowdown": 1} for name in HostileDevices.NAMES]
    file = federation(
        tmp_path, [{"name": "a", "entry": "entries.py:make"}], device=devices, deadline_s=1.0, grace_s=1.0
    )
    summaries, records = run(file, tmp_path / "run", devices=HostileDevices())
    assert (summaries[TaskName("a")].rounds, summaries[TaskName("a")].failed) == (3, False)
    refused = {(refusal.device, refusal.outcome) for record in records for refusal in record.refused}
    assert refused == set(REFUSED.items())
    model = FederationStore(tmp_path / "run").load_model(TaskName("a"), ())
    assert model is not None
    assert np.abs(model.weights["0.bias"]).max() < 10  # neither a second report counts, nor one before its cycle
    used = {order.devices for record in records for order in record.orders if isinstance(order, Aggregate)}
    assert used == {("early", "good", "twice")}
    missing = [order.missing for record in records for order in record.orders if isinstance(order, CloseCycle)]
    assert missing == [
        tuple(sorted((*UNREADABLE_REPORTS, "silent", "stale"))),
        ("silent", "stale"),
        ("silent", "stale"),
    ]
    lost = {fact.device: fact.reason for record in records for fact in record.facts if isinstance(fact, DeviceLost)}
    assert lost.keys() == UNREADABLE_REPORTS.keys()
    assert "-5" in lost[DeviceName("negative")]
    reported = [fact for record in records for fact in record.facts if isinstance(fact, WorkReported)]
    assert max(result.num_bytes for fact in reported if fact.device == "good" for result in fact.results) < 10_000


def test_a_task_without_data_on_a_device_is_not_ordered_there(tmp_path: Path, run: Runs) -> None:
    tasks: list[dict[str, Any]] = [
        {"name": "both", "entry": "entries.py:make"},
        {"name": "one", "entry": "entries.py:make", "partition": {"sizes": [1, 0]}},
    ]
    summaries, records = run(federation(tmp_path, tasks), tmp_path / "run")
    assert not any(each.failed for each in summaries.values())
    used = {
        (order.task, order.devices) for record in records for order in record.orders if isinstance(order, Aggregate)
    }
    assert used == {("both", ("fast", "slow")), ("one", ("fast",))}


def test_an_entry_that_raises_is_bad_input(tmp_path: Path, run: Runs) -> None:
    with pytest.raises(InputError, match="missing data"):
        run(federation(tmp_path, [{"name": "a", "entry": "entries.py:no_entry"}]), tmp_path / "run")


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("load", "exited while it loaded its tasks"),
        ("hang", "did not load its tasks within 3 s"),
        ("evaluate", "the process that evaluates exited"),
    ],
)
def test_a_server_that_exits_or_hangs_is_reported_with_its_log(
    tmp_path: Path, run: Runs, where: str, problem: str
) -> None:
    tasks = [{"name": "a", "entry": "entries.py:exits", "args": {"where": where}}]
    with pytest.raises(InputError, match=problem):
        run(federation(tmp_path, tasks, load_s=3.0), tmp_path / "run")


@pytest.mark.parametrize(
    ("device", "task", "problem"),
    [
        ({"device": "cuda:99"}, {}, "cuda:99, and torch sees"),
        ({"slowdown": 1}, {"target": "acuracy >= 0.9"}, "'acuracy', and its evaluate returns accuracy"),
    ],
)
def test_what_only_devices_can_tell_is_bad_input(
    tmp_path: Path, run: Runs, device: dict[str, Any], task: dict[str, Any], problem: str
) -> None:
    tasks = [{"name": "a", "entry": "entries.py:make", **task}]
    with pytest.raises(InputError, match=problem):
        run(federation(tmp_path, tasks, device=[{"name": "one", **device}]), tmp_path / "run")


def test_real_devices_run_at_once(tmp_path: Path, run: Runs) -> None:
    summaries, _ = run(two_tasks(tmp_path, device=[{"name": "device", "count": 2}]), tmp_path / "run")
    emulated, _ = run(two_tasks(tmp_path), tmp_path / "emulated")
    for name, summary in summaries.items():  # equal plans give equal work, whatever the speed of devices
        assert (summary.rounds, summary.digest) == (3, emulated[name].digest)
