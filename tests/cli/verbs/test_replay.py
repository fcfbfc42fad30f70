"""``carpool replay``: a recorded run in the simulator, and the errors for runs that cannot be simulated."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from carpool.backends.profile_library import ProfileLibrary
from carpool.backends.run_folder import BELIEVED, PROFILE, RunFolder
from carpool.cli.main import run
from carpool.core.model import JobId, JobSpec
from carpool.jobs.devices import LocalDevice, parse_devices
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.predictors.profiles.profile import read_profile
from carpool.service.daemon.batch_run import BatchRun, RunRequest
from tests.support.fake_executor import FakeExecutor

TWO = tuple(parse_devices("cpu:2x2", cores=(0, 1, 2, 3), gpus=()))  # estimated twice as fast as one core
STEPS = {"a": 10, "b": 20, "c": 5, "d": 30}


def record(root: Path, name: str, policy: str = "fifo", commands: str = "", **fails: str) -> RunFolder:
    """Four jobs of one device on a pretended machine of two, which makes a step a second; some may run commands."""
    (root / "train.py").write_text("def main(): ...\n")
    jobs = tuple(
        ListedJob(JobSpec(JobId(job)), Program(command=("sleep", str(steps)), folder=str(root)))
        if job in commands
        else ListedJob(
            JobSpec(JobId(job), model="train.py:main"), Program("train.py:main", {"steps": steps}, folder=str(root))
        )
        for job, steps in STEPS.items()
    )
    folder = RunFolder(root / ".carpool" / "runs" / name)
    request = RunRequest(name, jobs, TWO, policy, "0", profiles=ProfileLibrary(root / ".carpool").beliefs(jobs))
    machine = FakeExecutor(STEPS, fails=fails, batch=(8, 80))
    for at in range(1, 50):
        machine.at(float(at), machine.report_progress)

    async def start(devices: Sequence[LocalDevice], state: Path) -> FakeExecutor:
        return machine

    begun = BatchRun.open(request, folder, start, lambda at, begun_at: machine)
    asyncio.run(begun.run())
    begun.close()
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_output_of_a_policy_file_goes_to_stderr(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "mine.py").write_text(
        "from carpool.policies.baselines.nonpreemptive import Fifo\nprint('imported')\n", encoding="utf-8"
    )
    record(root, "first")
    assert run(["replay", "first", "--policy", "./mine.py:Fifo", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["policy"] == "./mine.py:Fifo"
    assert "imported" in err


def test_a_constant_rate_is_predicted_exactly(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(root, "first")
    record(root, "second", "srtf")
    assert run(["replay", "second", "--profiles", "before", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["policy"], document["profiles"]) == ("srtf", "before")
    assert document["makespan_s"]["simulated"] == pytest.approx(document["makespan_s"]["live"])
    assert document["worst_error"] == pytest.approx(0.0, abs=1e-6)
    assert {job["name"]: job["live_end_s"] for job in document["jobs"]} == {"a": 10.0, "b": 25.0, "c": 5.0, "d": 40.0}
    assert run(["replay", "first", "--policy", "srtf"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["job", "submitted", "live", "end", "simulated", "error"]
    assert lines[1].split()[0] == "a"
    assert lines[-1].split()[:2] == ["makespan", "45.00"]


def test_rates_and_overheads_come_from_the_profiles(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(root, "first")
    path = folder.job("d") / PROFILE
    document = json.loads(path.read_text())
    document["measurements"][0]["step_s"] = 2.0
    document["start_s"], document["end_s"] = 3.0, 4.0
    path.write_text(json.dumps(document))
    assert run(["replay", "first", "--json"]) == 0
    jobs = {job["name"]: job for job in json.loads(capsys.readouterr().out)["jobs"]}
    assert jobs["d"]["simulated_end_s"] == pytest.approx(15.0 + 3.0 + 30 * 2.0 + 4.0)
    assert jobs["a"]["simulated_end_s"] == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("args", "expected"), [(["nobody"], "'nobody'"), (["first", "--profiles", "before"], "profile")]
)
def test_a_run_without_profiles_cannot_be_simulated(
    root: Path, args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record(root, "first")
    assert not (folder.job("a") / BELIEVED).exists()
    assert run(["replay", *args]) == 2
    assert expected in capsys.readouterr().err


def test_commands_keep_their_recorded_duration(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(root, "first", commands="b")
    assert run(["replay", "first", "--json"]) == 0
    ends = {job["name"]: job["simulated_end_s"] for job in json.loads(capsys.readouterr().out)["jobs"]}
    assert ends == {"a": 10.0, "b": 20.0, "c": 15.0, "d": 45.0}


def test_failed_jobs_are_left_out(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(root, "first", b="no luck")
    assert run(["replay", "first", "--json"]) == 0
    assert [job["name"] for job in json.loads(capsys.readouterr().out)["jobs"]] == ["a", "c", "d"]


def test_explain_shows_the_profiles_before_and_after(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(root, "first")
    folder = record(root, "second")
    assert run(["explain", "c", "--run", "second"]) == 0
    events = [line.split(" s  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    steps = [read_profile(folder.job("c") / name).measurements[0].steps for name in (BELIEVED, PROFILE)]
    assert steps[0] < steps[1]
    kind = TWO[0].kind
    assert events[0] == f"profile before: 1 steps/s on 1 {kind} (batch 8, {steps[0]} steps measured)"
    assert events[1] == "profile before: start 0.00 s, end 0.00 s"
    assert events[-2] == f"profile after: 1 steps/s on 1 {kind} (batch 8, {steps[1]} steps measured)"
