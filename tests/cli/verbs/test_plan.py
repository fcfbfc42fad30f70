"""``carpool plan``: table, JSON, profiles, and bad input. No job is started."""

import json
from pathlib import Path
from typing import Any

import pytest

from carpool.backends.profile_library import ProfileLibrary, save_profile
from carpool.cli.main import run
from carpool.jobs.job_file import read_jobs
from carpool.predictors.profiles.profile import Measurement, Profile

ENTRY = "def main(lr=0.1):\n    pass\n"
JOBS = """
[[job]]
name = "a"
entry = "train.py:main"
max_devices = 2
[[job]]
name = "b"
entry = "train.py:main"
args = { lr = 0.2 }
after = "a"
[[job]]
name = "shell"
command = ["true"]
"""
KEYS = ["name", "start_s", "end_s", "end_range_s", "steps", "steps_per_s", "spread", "basis", "allocations"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(ENTRY)
    (tmp_path / "jobs.toml").write_text(JOBS)
    return tmp_path


@pytest.fixture
def profile() -> Profile:
    """Profile of job a: 100 steps of 0.1 s on one device, of 0.05 s on two."""
    measured = (Measurement("cpu1", 1, 32, step_s=0.1), Measurement("cpu1", 2, 32, step_s=0.05))
    profile = Profile("train.py:main", {}, "", 32, 320, stop_steps=100, measurements=measured)
    save_profile(profile)
    return profile


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert run(["plan", "jobs.toml", "--devices", "cpu:2", "--policy", "fifo", "--json", *more]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_json_has_times_and_their_basis(capsys: pytest.CaptureFixture[str], profile: Profile) -> None:
    document = planned(capsys)
    assert document["schema"] == 1
    a, b, shell = document["jobs"]
    assert list(a) == KEYS
    assert (a["start_s"], a["end_s"], a["steps"], a["basis"]) == (0.0, pytest.approx(11.1), 100.0, "measured")
    assert a["end_range_s"][0] < 11.0 < a["end_range_s"][1]
    assert a["allocations"][0]["devices"] == ["cpu:0"]
    assert b["start_s"] == a["end_s"]  # because of `after`
    assert (b["steps"], b["basis"], b["spread"]) == (None, "guessed; length guessed", 1.0)
    assert b["end_s"] is b["end_range_s"] is None
    assert shell["start_s"] == 0.0


def test_the_same_seed_gives_the_same_plan(capsys: pytest.CaptureFixture[str], profile: Profile) -> None:
    assert planned(capsys) == planned(capsys)


def test_the_table_marks_guesses(capsys: pytest.CaptureFixture[str], profile: Profile) -> None:
    assert run(["plan", "jobs.toml", "--devices", "cpu:2"]) == 0
    out = capsys.readouterr().out
    assert "measured (± 5%)" in out
    assert "--probe" in out
    assert "·" in out  # b waits


def test_long_names_are_shortened(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "net-" + "x" * 80 + "-17"
    (here / "long.toml").write_text(f'[[job]]\nname = "{name}"\ncommand = ["true"]\n')
    assert run(["plan", "long.toml", "--devices", "cpu:1"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert "-17  cpu:0" in line
    assert line.rstrip().endswith("(± 100%)")


def test_nothing_is_started_or_written(here: Path) -> None:
    assert run(["plan", "jobs.toml", "--devices", "cpu:2"]) == 0
    assert not (here / ".carpool").exists()


def test_saved_profiles_are_found(here: Path, profile: Profile) -> None:
    assert set(ProfileLibrary().beliefs(read_jobs(Path("jobs.toml")).jobs)) == {"a"}


def test_a_job_that_never_gets_a_device_gives_exit_code_1(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "never.py").write_text(
        "from dataclasses import dataclass\n"
        "from carpool.core.policy import Plan, Policy\n"
        "@dataclass(frozen=True)\nclass Never(Policy):\n    def plan(self, view):\n        return Plan.NOTHING\n"
    )
    assert run(["plan", "jobs.toml", "--devices", "cpu:1x1", "--policy", "never.py:Never"]) == 1
    assert "never" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["missing.toml"], "missing.toml"),
        (["jobs.toml", "--devices", "tpu:1"], "tpu:1"),
        (["jobs.toml", "--policy", "fito"], "Did you mean fifo"),
        (["wide.toml", "--devices", "cpu:2"], "9 devices"),
        (["circle.toml"], "circle"),
    ],
)
def test_bad_input_gets_exit_code_2(
    here: Path, capsys: pytest.CaptureFixture[str], args: list[str], expected: str
) -> None:
    (here / "wide.toml").write_text('[[job]]\nname = "a"\nentry = "train.py:main"\ndevices = 9\n')
    (here / "circle.toml").write_text('[[job]]\nname = "a"\nentry = "train.py:main"\nafter = "a"\n')
    assert run(["plan", *args]) == 2
    assert expected in capsys.readouterr().err


def test_the_hyper_parameters_of_a_sweep_are_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = '[[job]]\nname = "fit"\ncommand = ["sleep", "{seconds}"]\nsweep = { seconds = [1, 2] }\n'
    (here / "jobs.toml").write_text(table)
    assert [job["params"] for job in planned(capsys)["jobs"]] == [{"seconds": 1}, {"seconds": 2}]
    assert run(["plan", "jobs.toml", "--devices", "cpu:2"]) == 0
    assert "seconds=2" in capsys.readouterr().out


@pytest.mark.parametrize("count", [6, 7, 12])
def test_commands_that_cannot_resume_are_planned_side_by_side(
    here: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """Their groups are hidden from the policy while it plans for the others."""
    jobs = [f'[[job]]\nname = "j{number}"\ncommand = ["true"]\n' for number in range(count)]
    (here / "many.toml").write_text("\n".join(jobs))
    assert run(["plan", "many.toml", "--devices", "cpu:2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["jobs"]
    assert [bool(job["allocations"]) for job in found] == [True] * count
