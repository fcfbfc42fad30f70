"""Tasks of a GPU device side by side as clients of MPS: on a CPU, where lanes do not change what is computed."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from carpool.backends.federation_devices import EmbeddedDevices, NoLanes, host_message, start_process
from carpool.backends.federation_lanes import FederationLanes
from carpool.federated.federation import TaskName
from carpool.federated.federation_file import FederatedDevice, FederationFile, parse_federation
from carpool.federated.messages import DeviceLost, Outcome, Record, StartWork, TaskResult, Work, WorkReported
from carpool.federated.updates import decode_weights, weights_digest
from carpool.jobs.devices import Gpu
from carpool.runtime.process.channel import close_all
from carpool.runtime.process.protocol import Alive, HostTasks, RunTasks, TasksDone, TasksReady
from carpool.runtime.process.shared_memory import memory_file_of, read_memory_file
from carpool.runtime.sharing.mps_daemon import PERCENTAGE, MpsDaemon, MpsUnavailable
from tests.backends.test_federation_run import ENTRIES
from tests.support.federation_runs import Runs

_STALLED_S = 120.0
LANE = {PERCENTAGE: "100"}
MORE = """
from carpool.runtime.sharing.mps_daemon import PERCENTAGE

def logs(folder, own, seed=1):
    if folder:
        with open(f"{folder}/{own}", "a") as log:
            log.write(f"{os.getpid()} {os.environ.get(PERCENTAGE)}\\n")
    training, calls = make(hidden=seed), [0]
    def loss(model, batch):
        if folder:
            with open(f"{folder}/steps", "a") as log:
                log.write(own)
        calls[0] += 1
        mishap(folder, own, calls[0])
        return cross_entropy(model(batch[0]), batch[1])
    return replace(training, loss=loss)

def mishap(folder, own, calls):
    if calls != 4:  # the first in a cycle: three steps are timed before it
        return
    where, happened = Path(folder), Path(folder, "happened")
    (where / f"met:{own}").touch()
    while Path(folder, "meet").exists() and len(list(where.glob("met:*"))) < 3:
        threading.Event().wait(0.01)
    if list(where.glob("*-at-once")) and not list(where.glob(f"{own}-*")) and not happened.exists():
        (where / f"waits:{own}").touch()
        threading.Event().wait()  # no other task is done before it happens
    for flag in where.glob(f"{own}-*"):
        while "at-once" in flag.name and len(list(where.glob("waits:*"))) < 2:
            threading.Event().wait(0.01)
        happened.touch()
        kind = flag.name.split("-")[1]
        if "always" not in flag.name:
            flag.unlink()
        if kind == "exits":
            os._exit(9)
        if kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
        name = "MPS server is not ready" if kind == "mps" else "an illegal memory access was encountered"
        raise RuntimeError(f"CUDA error: {name}")

def does_not_fit(folder, own):
    if PERCENTAGE in os.environ:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return make()
"""
NAMES = ("a", "b", "c")


def described(folder: Path, entries: Sequence[str] = ("logs",) * 3, **more: Any) -> FederationFile:
    """Three tasks on a device that is a CPU."""
    (folder / "entries.py").write_text(ENTRIES + MORE)
    tasks = [
        {"name": name, "entry": f"entries.py:{entry}", "args": {"folder": str(folder), "own": name}}
        for name, entry in zip(NAMES, entries, strict=True)
    ]
    data = {"rounds": 2, "plan": "balanced", "device": [{"name": "gpu"}], "task": tasks, **more}
    return parse_federation(data, folder, "test")


def worked(
    run: Runs, file: FederationFile, folder: Path, cycles: Sequence[Sequence[float]], *,
    lane: Mapping[str, str] = LANE, in_turn: bool = False,
) -> list[list[tuple[TaskResult, str]]]:  # fmt: skip
    """The results of cycles with these shares on one device, and the digests of its updates."""

    async def work() -> list[list[tuple[TaskResult, str]]]:
        server, _, weights = await start_process(run.forks, HostTasks("server", file.hosted_tasks()), folder)
        host = host_message(file, file.devices[0], lane)
        process, _, _ = await start_process(run.forks, host, folder)
        server.close()
        found = []
        for number, shares in enumerate(cycles, 1):
            given = zip(NAMES, shares, strict=True)
            order = tuple(Work(TaskName(name), 0, 0, 120, 8, share) for name, share in given)
            fds = [memory_file_of(data, "weights") for data in weights]
            process.channel.send(RunTasks(number, order, in_turn=in_turn), fds)
            close_all(fds)
            received = await process.channel.receive()
            while isinstance(received.message, Alive):
                received = await process.channel.receive()
            if isinstance(received.message, TasksReady):
                process.close()
                raise NoLanes(received.message.no_lanes)
            assert isinstance(received.message, TasksDone)
            assert received.message.cycle == number
            results, files = [TaskResult(**each) for each in received.message.results], list(received.fds)
            digests = [
                weights_digest(decode_weights(read_memory_file(files.pop(0)))) if r.steps else "" for r in results
            ]
            close_all(received.fds)
            found.append(list(zip(results, digests, strict=True)))
        process.close()
        return found

    return run.do(work())


def digests(cycle: Sequence[tuple[TaskResult, str]]) -> list[str]:
    assert {result.outcome for result, _ in cycle} == {Outcome.ACCEPTED}
    return [digest for _, digest in cycle]


def starts(folder: Path) -> dict[str, list[str]]:
    """The percentages that the processes of each task were started with, without those that evaluate."""
    return {name: [each for each in (folder / name).read_text().split()[1::2] if each != "None"] for name in NAMES}


EQUAL = (0.5, 0.5, 0.5)


def test_updates_on_lanes_are_those_in_turn_and_a_changed_share_restarts_one_process(tmp_path: Path, run: Runs) -> None:
    file = described(tmp_path)
    (in_turn,) = worked(run, file, tmp_path, [EQUAL], lane={})
    for name in NAMES:
        (tmp_path / name).unlink()
    found = worked(run, file, tmp_path, [(1.0, 1.0, 1.0), (1.0, 0.5, 1.0), (1.0, 0.5, 0.33)])
    assert [digests(cycle) for cycle in found] == [digests(in_turn)] * 3
    assert starts(tmp_path) == {"a": ["100"], "b": ["100", "50"], "c": ["100", "33"]}


def test_tasks_follow_one_another_if_ordered(tmp_path: Path, run: Runs) -> None:
    (cycle,) = worked(run, described(tmp_path), tmp_path, [(1.0, 1.0, 1.0)], in_turn=True)
    digests(cycle)
    steps = (tmp_path / "steps").read_text()
    assert steps[:9] == "aaabbbccc", "each is timed alone before the first cycle"
    assert sorted((name, len(list(made))) for name, made in groupby(steps[9:])) == [("a", 15), ("b", 15), ("c", 15)]


def test_tasks_run_at_the_same_time(tmp_path: Path, run: Runs) -> None:
    """In its first step each waits for the others, which in turn it would for ever."""
    (tmp_path / "meet").touch()
    (cycle,) = worked(run, described(tmp_path), tmp_path, [(1.0, 1.0, 1.0)])
    digests(cycle)


@pytest.mark.parametrize("mishap", ["faults", "exits", "mps"])
def test_after_a_fault_that_does_not_come_again_all_updates_are_made(tmp_path: Path, run: Runs, mishap: str) -> None:
    (clean,) = worked(run, described(tmp_path), tmp_path, [EQUAL])
    (tmp_path / f"b-{mishap}-at-once").touch()
    (cycle,) = worked(run, described(tmp_path), tmp_path, [EQUAL])
    assert digests(cycle) == digests(clean)


def test_a_task_that_faults_alone_fails_and_the_others_are_made(tmp_path: Path, run: Runs) -> None:
    (clean,) = worked(run, described(tmp_path), tmp_path, [EQUAL])
    (tmp_path / "b-faults-always-at-once").touch()
    cycles = worked(run, described(tmp_path), tmp_path, [EQUAL, EQUAL])
    for cycle in cycles:
        a, b, c = cycle
        assert [a[1], c[1]] == [clean[0][1], clean[2][1]]
        assert b[0].outcome == Outcome.FAILED
        assert "illegal memory access" in b[0].detail


def test_a_task_that_runs_out_of_memory_on_lanes_is_not_at_fault(tmp_path: Path, run: Runs) -> None:
    (tmp_path / "c-memory").touch()
    with pytest.raises(NoLanes, match="task 'c': OutOfMemoryError: CUDA out of memory"):
        worked(run, described(tmp_path), tmp_path, [EQUAL])


def test_without_a_working_service_the_tasks_take_turns_and_none_is_at_fault(tmp_path: Path, run: Runs) -> None:
    (tmp_path / "b-mps-always").touch()
    with pytest.raises(NoLanes, match="task 'b': CUDA error: MPS server is not ready"):
        worked(run, described(tmp_path), tmp_path, [EQUAL])


class Lanes(FederationLanes):
    """Lanes for all devices, until one is refused."""

    refused: list[str]

    def __init__(self, file: FederationFile) -> None:
        super().__init__(file, file.devices)
        self.refused = []

    def environment(self, device: FederatedDevice) -> dict[str, str]:
        return {} if self.refused else LANE

    def refuse(self, device: FederatedDevice, reason: str) -> None:
        self.refused.append(reason)


def federated(run: Runs, file: FederationFile, folder: Path) -> tuple[list[Record], Lanes]:
    async def devices() -> EmbeddedDevices:
        return EmbeddedDevices(file, run.forks, folder, lanes)

    lanes = Lanes(file)
    folder.mkdir()
    summaries, records = run(file, folder, devices=run._runner.run(devices()))
    assert {(each.rounds, each.failed) for each in summaries.values()} == {(2, False)}
    return records, lanes


def test_a_federation_runs_on_lanes(tmp_path: Path, run: Runs) -> None:
    records, lanes = federated(run, described(tmp_path), tmp_path / "run")
    assert lanes.refused == []
    assert {each[0] for each in starts(tmp_path).values()} == {"100"}
    reported = [fact for record in records for fact in record.facts if isinstance(fact, WorkReported)]
    assert {result.outcome for fact in reported for result in fact.results} == {Outcome.ACCEPTED}


def test_tasks_that_do_not_fit_side_by_side_take_turns(tmp_path: Path, run: Runs) -> None:
    """When they are loaded, and when memory runs out in a cycle: then the round is made again."""
    _, lanes = federated(run, described(tmp_path, ("logs", "logs", "does_not_fit")), tmp_path / "load")
    assert [reason.partition(":")[0] for reason in lanes.refused] == ["task 'c'"]
    (tmp_path / "b-memory").touch()
    records, lanes = federated(run, described(tmp_path), tmp_path / "cycle")
    assert [reason.partition(":")[0] for reason in lanes.refused] == ["task 'b'"]
    assert len([fact for record in records for fact in record.facts if isinstance(fact, DeviceLost)]) == 1
    orders = [order for record in records for order in record.orders if isinstance(order, StartWork)]
    assert orders[0] == orders[1], "the same work again"


def test_a_reason_that_holds_for_several_devices_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = on_gpus(tmp_path, [{"name": "gpu", "device": "cuda:0", "count": 2}])
    lanes = FederationLanes(file, file.devices)
    for device in file.devices:
        lanes.refuse(device, "MPS is not active")
    assert caplog.messages == ["the tasks of gpu-0 take turns on its GPU: MPS is not active"]


class Daemon(MpsDaemon):
    """MPS that starts, or does not."""

    is_alive = True
    problem = ""

    async def start(self) -> None:
        if self.problem:
            raise MpsUnavailable(self.problem)

    async def quit(self) -> None:
        pass

    def environment(self, percent: int) -> dict[str, str]:
        return {PERCENTAGE: str(percent)}


class Broken(Daemon):
    problem = "no such program"


def on_gpus(folder: Path, devices: Sequence[dict[str, Any]], **more: Any) -> FederationFile:
    (folder / "entries.py").write_text(ENTRIES)
    tasks = [{"name": name, "entry": "entries.py:make", **more} for name in NAMES]
    return parse_federation({"device": list(devices), "task": tasks}, folder, "test")


def environments(file: FederationFile, make_daemon: type[MpsDaemon] = Daemon) -> list[dict[str, str]]:
    async def start() -> list[dict[str, str]]:
        gpus = [Gpu(0, "H200", 100 << 30), Gpu(1, "H200", 100 << 30)]
        lanes = FederationLanes(file, file.devices, make_daemon=make_daemon, list_gpus=lambda: gpus)
        await lanes.start()
        return [lanes.environment(device) for device in file.devices]

    return asyncio.run(start())


def test_each_gpu_has_lanes_if_the_tasks_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    two = [{"name": "a", "device": "cuda"}, {"name": "b", "device": "cuda:1"}, {"name": "c"}]
    assert environments(on_gpus(tmp_path, two)) == [LANE, LANE, {}]
    assert environments(on_gpus(tmp_path, two, memory="32GiB")) == [LANE, LANE, {}]
    assert caplog.messages == []
    assert environments(on_gpus(tmp_path, two, memory="33GiB")) == [{}, {}, {}]
    assert "take turns: they declare 104448 MiB with CUDA itself, and it has 102400 MiB free" in caplog.text
    emulated = [{**device, "slowdown": 2} for device in two]
    assert environments(on_gpus(tmp_path, emulated)) == [{}, {}, {}]


def test_why_there_are_no_lanes_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        file = on_gpus(tmp_path, [{"name": "gpu", "device": "cuda:0", "count": 2}, {"device": "cuda:1"}])
        assert environments(file, Broken) == [{}, {}, {}]
        assert caplog.messages == ["the tasks of GPU devices take turns: no such program"]
        caplog.clear()
        many = on_gpus(tmp_path, [{"name": "gpu", "device": "cuda:0", "count": 17}])
        assert environments(many) == [{}] * 17
        assert [
            message for message in caplog.messages if "51 processes, and MPS serves 48" in message
        ] == caplog.messages
