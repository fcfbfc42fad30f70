"""The verb run on a pretended machine: JSON, exit codes, folders, resuming, and what bad input gets."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from carpool.cli.main import run
from carpool.cli.render.live_table import LineDisplay
from carpool.cli.render.run_summary import as_document, print_summary
from carpool.cli.support.executor_start import start_executor
from carpool.cli.support.run_lookup import look_up
from carpool.cli.verbs import run as verb
from carpool.core.errors import InputError
from carpool.core.messages import (
    AssignApplied,
    Change,
    JobFinished,
    JobSubmitted,
    Planned,
    ProgressReported,
    Record,
    ReleaseApplied,
)
from carpool.core.model import Allocation, JobId, JobSpec
from carpool.jobs.devices import LocalDevice, parse_devices
from carpool.runtime.sharing.mps_daemon import CONTROL
from carpool.service.daemon.batch_run import BatchRun, RunEnd
from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions
from carpool.service.store.store import LOG
from tests.support.fake_executor import FakeExecutor

ENTRY = "def main(lr=0.1):\n    pass\n"
JOBS = """
[[job]]
name = "a"
entry = "train.py:main"
weight = 2
[[job]]
name = "b"
entry = "train.py:main"
after = "a"
"""
TOP = [
    *("schema", "version", "policy", "backend", "devices", "makespan_s", "avg_jct_s", "weighted_jct_s"),
    *("utilisation", "jobs"),
]
JOB = [
    *("name", "state", "steps", "epochs", "loss", "metrics", "jct_s", "wait_s", "samples_per_s", "digest"),
    *("allocations", "error", "params"),
]


class Machine:
    """Starts pretended executors, and says how."""

    def __init__(self) -> None:
        self.fails: dict[str, str] = {}
        self.interrupts = False
        self.batch = (0, 0)
        self.started: list[FakeExecutor] = []
        self.options: tuple[str, int, str, int] | None = None
        self.environment: dict[str, str] = {}

    async def start(
        self,
        devices: Sequence[LocalDevice],
        state: Path,
        *,
        lanes: str,
        warm: int,
        reducer: str,
        memory_cap: int,
        launched: None,
    ) -> FakeExecutor:
        self.options = (lanes, warm, reducer, memory_cap)
        kept = self.started[-1].kept if self.started else None
        steps = {"a": 10, "b": 20, "c": 5}
        machine = FakeExecutor(steps, fails=self.fails, kept=kept, batch=self.batch, at_once=not self.interrupts)
        self.started.append(machine)
        if self.interrupts:
            os.kill(os.getpid(), signal.SIGINT)
        return machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A pretended machine, and a folder with a job file to stand in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(ENTRY, encoding="utf-8")
    (tmp_path / "jobs.toml").write_text(JOBS, encoding="utf-8")
    machine = Machine()
    monkeypatch.setattr(verb, "launch", machine.environment.update)
    monkeypatch.setattr(verb, "start_executor", machine.start)
    return machine


def test_json_has_the_promised_keys_and_nothing_else_is_on_stdout(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--devices", "cpu:2", "--policy", "fifo", "--lanes", "slice", "--warm", "2", "--reducer", "group"]
    assert run(["run", "jobs.toml", *words, "--memory-cap", "3GiB", "--json"]) == 0
    assert machine.options == ("slice", 2, "group", 3 << 30)
    assert machine.environment == {}
    printed = capsys.readouterr()
    assert "not the memory of a step" in printed.err
    document = json.loads(printed.out)
    assert list(document) == TOP
    assert (document["schema"], document["policy"], document["backend"]) == (1, "fifo", "local")
    assert [device["name"] for device in document["devices"]] == ["cpu:0", "cpu:1"]
    assert list(document["utilisation"]) == ["device", "memory"]
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    held = document["utilisation"]["device"] * 2  # devices held on average
    assert document["utilisation"]["memory"] == pytest.approx(held * (1 << 28) / here)
    a, b = document["jobs"]
    assert list(a) == JOB
    assert (a["name"], a["state"], a["steps"], a["epochs"], a["loss"]) == ("a", "finished", 10, 1, 0.25)
    assert (a["metrics"], a["digest"], a["error"]) == ({"accuracy": 0.5}, "digest of a", None)
    (given,) = a["allocations"]
    assert list(given) == ["at_s", "devices", "fractions", "batch_size", "parts", "reason"]
    assert (given["devices"], given["fractions"]) == (["cpu:0"], [1.0])
    assert b["jct_s"] >= a["jct_s"]


def test_allocations_tell_the_batch_that_the_training_has_by_itself(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.batch = (8, 80)
    told = tmp_path / "told.toml"
    told.write_text(JOBS + "batch = 16\n", encoding="utf-8")
    assert run(["run", "told.toml", "--devices", "cpu:2", "--json"]) == 0
    jobs = {job["name"]: job["allocations"][0] for job in json.loads(capsys.readouterr().out)["jobs"]}
    assert (jobs["a"]["batch_size"], jobs["b"]["batch_size"]) == (8, 16)


def test_people_get_lines_and_a_summary(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "jobs.toml", "--devices", "cpu:1"]) == 0
    printed = capsys.readouterr()
    assert "2 of 2 jobs finished" in printed.out
    assert "a  gets cpu:0" in printed.err
    assert "reached its steps, loss 0.2500, accuracy 0.5" in printed.err


def test_log_options_reach_the_executor(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--log-level", "info", "--log-format", "json"]
    assert run(["run", "jobs.toml", "--devices", "cpu:2", "--policy", "fifo", "--json", *words]) == 0
    printed = capsys.readouterr()
    json.loads(printed.out)
    assert "plan" in {json.loads(line)["event"] for line in printed.err.splitlines()}
    assert machine.environment == {"CARPOOL_LOG_LEVEL": "info", "CARPOOL_LOG_FORMAT": "json"}


def test_a_failed_job_gives_exit_code_1_and_its_error(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.fails = {"a": "the loss is not a number"}
    assert run(["run", "jobs.toml", "--json"]) == 1
    a, b = json.loads(capsys.readouterr().out)["jobs"]
    assert (a["state"], a["error"]) == ("failed", "the loss is not a number")
    assert b["state"] == "failed"
    assert run(["run", "jobs.toml"]) == 1
    assert "a failed: the loss is not a number" in capsys.readouterr().out
    assert run(["why", "a"]) == 0
    assert "a failed: the loss is not a number" in capsys.readouterr().out


def test_every_run_has_a_folder_of_its_own(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", "jobs.toml"]) == run(["run", "jobs.toml"]) == 0
    assert sorted(path.name for path in (tmp_path / ".carpool" / "runs").iterdir()) == ["jobs", "jobs-2"]
    assert run(["run", "jobs.toml", "--state", "mine", "--journal", "copy.jsonl"]) == 0
    assert (tmp_path / "mine" / LOG).is_file()
    assert run(["explain", "a", "--journal", "copy.jsonl"]) == 0
    assert "gets device 0" in capsys.readouterr().out
    assert run(["explain", "a", "--run", "mine"]) == 0
    assert "gets cpu:" in capsys.readouterr().out


def test_interrupt_and_resume(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.interrupts = True
    assert run(["run", "jobs.toml", "--no-check", "--json", "--policy", "las"]) == 130
    printed = capsys.readouterr()
    assert [job["state"] for job in json.loads(printed.out)["jobs"]] == ["interrupted", "interrupted"]
    assert machine.started[0].stopped == [True]
    machine.interrupts = False
    assert run(["run", "jobs.toml", "--resume", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["policy"] == "las", "a resumed run keeps its policy"
    assert [job["state"] for job in document["jobs"]] == ["finished", "finished"]
    assert machine.started[1].introduced == {"a": True, "b": True}
    assert run(["run", "jobs.toml", "--resume"]) == 2
    assert "is unfinished" in capsys.readouterr().err


def test_commands_that_start_again_after_an_interruption_are_named(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = '[[job]]\nname = "{}"\ncommand = ["true"]\nresumable = {}\n'
    training = '[[job]]\nname = "c"\nentry = "train.py:main"\n'
    (tmp_path / "mixed.toml").write_text(table.format("a", "false") + table.format("b", "true") + training)
    machine.interrupts = True
    assert run(["run", "mixed.toml", "--no-check", "--devices", "cpu:3"]) == 130
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "start again" in line]
    assert line.endswith(": a")


def test_interrupted_before_it_began(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def never(devices: Sequence[LocalDevice], state: Path, **options: object) -> FakeExecutor:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(verb, "start_executor", never)
    assert run(["run", "jobs.toml", "--json"]) == 130
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert [(job["name"], job["state"], job["steps"], job["jct_s"], job["allocations"]) for job in jobs] == [
        ("a", "interrupted", 0, None, []),
        ("b", "interrupted", 0, None, []),
    ]
    monkeypatch.setattr(verb, "start_executor", machine.start)
    assert run(["run", "jobs.toml", "--resume"]) == 0


POLICY = """
from dataclasses import dataclass
from carpool.core.policy import Plan, Policy, Snapshot

@dataclass(frozen=True)
class Raises(Policy):
    def plan(self, view: Snapshot) -> Plan:
        raise ZeroDivisionError("no device")
"""


def test_what_a_policy_of_ones_own_raises_is_told_as_its_fault(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(POLICY, encoding="utf-8")
    assert run(["run", "jobs.toml", "--policy", "./mine.py:Raises"]) == 2
    words = "policy './mine.py:Raises' failed: ZeroDivisionError: no device (mine.py, line 8)"
    assert capsys.readouterr().err.startswith(f"carpool: {words}. Test it with")


def prepared(machine: Machine, devices: str) -> BatchRun:
    return verb.prepare(look_up("jobs.toml", None, None), parse_devices(devices), "fifo", start_executor)


def test_of_a_job_without_steps_no_progress_is_told(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    going = prepared(machine, "cpu:1")
    going.accounting.record(Record(0.0, [JobSubmitted(JobSpec(JobId("a")))]))
    given = Planned("it is next", (Change(JobId("a"), Allocation.of(0)),), (1.0,))
    going.accounting.record(Record(21.0, [], given))
    going.accounting.record(Record(21.1, [AssignApplied(JobId("a"), 1, 0.0)]))
    lines = LineDisplay(going)
    lines.refresh()
    assert capsys.readouterr().err == "     21.0 s  a  gets cpu:0: it is next\n"
    going.accounting.record(Record(22.0, [ProgressReported(JobId("a"), 1, 5.0, 5.0)]))
    lines.refresh()
    assert capsys.readouterr().err == "     22.0 s  a  step 5, 5.0 steps/s\n"


def test_while_a_job_is_left_nobody_says_how_busy_devices_were(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted = prepared(machine, "cpu:2")
    a, b = (JobId(name) for name in "ab")
    both = Planned("both fit", (Change(a, Allocation.of(0)), Change(b, Allocation.of(1))), (1.0, 1.0))
    submitted = Record(0.0, [JobSubmitted(JobSpec(a)), JobSubmitted(JobSpec(b))], both)
    for record in (submitted, Record(1.0, [JobFinished(a, 1)]), Record(9.0, [ReleaseApplied(b, 2, 9.0)])):
        interrupted.metrics.record(record)
        interrupted.accounting.record(record)
    assert as_document(interrupted)["utilisation"] == {"device": None, "memory": None}
    print_summary(interrupted, RunEnd.INTERRUPTED)
    assert "1 of 2 jobs finished in 1.0 s, on average after 1.0 s\n" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--resume", "jobs"], ["--resume", "jobs.toml"], ["--resume", ".carpool/runs/jobs"]])
def test_ways_to_name_what_is_resumed(machine: Machine, words: list[str]) -> None:
    machine.interrupts = True
    assert run(["run", "jobs.toml"]) == 130
    machine.interrupts = False
    assert run(["run", *words]) == 0


def test_get_copies_what_a_job_left(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "jobs.toml", "--json"]) == 0
    capsys.readouterr()
    assert run(["get", "a", "--out", "taken", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == ["taken/outcome.json"]
    assert json.loads((tmp_path / "taken" / "outcome.json").read_text())["digest"] == "digest of a"
    assert run(["get", "a"]) == 0
    assert "no weights: a ended without a checkpoint" in capsys.readouterr().err
    assert run(["get", "c"]) == 2
    assert run(["get", "a", "--run", "jbos"]) == 2
    assert "Did you mean jobs" in capsys.readouterr().err


BAD = [
    (["nowhere.toml"], ["nowhere.toml", "cannot be read"]),
    ([], ["no job file"]),
    (["jobs.toml", "--policy", "fifa"], ["unknown policy 'fifa'"]),
    (["jobs.toml", "--devices", "gpu"], ["'gpu'", "cuda:0,1"]),
    (["jobs.toml", "--devices", "cpu:9x9"], ["cores"]),
    (["jobs.toml", "--memory-cap", "12"], ["--memory-cap", "12 bytes", "16GiB"]),
    (["jobs.toml", "--resume", "x"], ["unknown run 'x'"]),
    (["jobs.toml", "--state", "train.py"], ["train.py", "cannot be written"]),
    (["jobs.toml", "--journal", "no/where.jsonl"], ["no/where.jsonl", "cannot be written"]),
    (["wide.toml", "--devices", "cpu:2"], ["3 devices; there are 2"]),
    (["wrong.toml"], ["job 'a'", "unknown key 'wieght'"]),
    (["joint.toml", "--reducer", "group"], ["job 'a'", "sync_batchnorm = true", "--reducer shared"]),
]


@pytest.mark.parametrize(("words", "told"), BAD, ids=[" ".join(words) or "nothing" for words, _ in BAD])
def test_bad_input_starts_nothing(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: list[str]
) -> None:
    head = '[[job]]\nname = "a"\nentry = "train.py:main"\n'
    (tmp_path / "wide.toml").write_text(head + "devices = 3\n", encoding="utf-8")
    (tmp_path / "joint.toml").write_text(head + "sync_batchnorm = true\n", encoding="utf-8")
    (tmp_path / "wrong.toml").write_text(head + "wieght = 3\n", encoding="utf-8")
    assert run(["run", *words]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in told), error
    assert machine.started == []


def test_the_state_of_another_run_is_not_overwritten(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "jobs.toml", "--state", "mine"]) == 0
    assert run(["run", "jobs.toml", "--state", "mine"]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_run_and_serve_keep_out_of_each_others_folders(machine: Machine, tmp_path: Path) -> None:
    assert run(["run", "jobs.toml", "--state", "mine"]) == 0
    with pytest.raises(InputError, match="holds a run"):
        DaemonInstance.open(DaemonOptions(tmp_path / "mine", tuple(parse_devices("cpu:1")), "1"))
    (tmp_path / "mine" / "run.json").unlink()
    assert run(["run", "jobs.toml", "--state", "mine"]) == 2


def test_overlapping_devices_are_told(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "jobs.toml", "--devices", "cpu:64"]) == 0
    assert "take turns on one core" in capsys.readouterr().err


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A driver that lists one GPU, and a control program of MPS."""
    driver = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda place: place,
        nvmlDeviceGetName=lambda handle: "NVIDIA H200",
        nvmlDeviceGetUUID=lambda handle: "GPU-aa",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=100 << 30),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [],
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    control = tmp_path / "bin" / CONTROL
    control.parent.mkdir()
    control.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{control.parent}:{os.environ['PATH']}")
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_lanes_of_a_gpu_are_devices_of_a_run(
    machine: Machine, one_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", "jobs.toml", "--devices", "cuda:0@75,cuda:0@50", "--policy", "fifo", "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    found = [(device["name"], device["kind"], device["memory_bytes"] >> 30) for device in document["devices"]]
    assert found == [("cuda:0@75", "H200@75", 60), ("cuda:0@50", "H200@50", 40)]
    assert "125 %" in printed.err


@pytest.mark.parametrize("words", [["--lanes", "slice"], ["--memory-cap", "3GiB"]])
def test_lanes_that_the_options_exclude_are_refused_before_a_job_starts(
    machine: Machine, one_gpu: None, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert run(["run", "jobs.toml", "--devices", "cuda:0@50", *words]) == 2
    assert words[0] in capsys.readouterr().err
    assert not machine.started
