"""``carpool profile``: entries, options, output and bad input."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from carpool.cli.main import run
from carpool.cli.verbs.profile import find_program
from carpool.core.errors import InputError
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.predictors.profiles.profile import Measurement, NoiseSeen, Profile
from carpool.runtime.profiling import profiler as profiling
from carpool.runtime.profiling.profiler import MeasurementBudget

ENTRY = "def main(lr=0.1):\n    pass\n"
JOBS = """
[[job]]
name = "a"
entry = "sub/train.py:main"
args = { lr = 0.2 }
batch = 64
[[job]]
name = "shell"
command = ["true"]
"""
MIB = 1 << 20


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text(ENTRY)
    (tmp_path / "jobs.toml").write_text(JOBS)
    return tmp_path


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Program, profiling.ProfileRequest, MeasurementBudget]]:
    """Requests to a fake profiler, which measures nothing and returns two batch sizes."""
    requests: list[tuple[Program, profiling.ProfileRequest, MeasurementBudget]] = []

    async def fake_profile(
        program: Program,
        devices: Sequence[LocalDevice],
        request: profiling.ProfileRequest,
        budget: MeasurementBudget,
        version: str,
        report: Any,
    ) -> Profile:
        requests.append((program, request, budget))
        report(0, 1, "measuring")
        measured = tuple(
            Measurement("cpu1", 1, batch, 1.0, False, "", 9, 0.01 * batch, 0.0, batch * MIB, batch * MIB, 0.5)
            for batch in (8, 16)
        )
        full = Measurement("cpu1", 1, 32, out_of_memory=True, error="step 1 needs more memory")
        return Profile(program.entry, program.args, "", 8, 80, 5, None, (*measured, full), NoiseSeen(120.0, 9.0, 8, 20))

    monkeypatch.setattr(profiling, "make_profile", fake_profile)
    return requests


def test_options_reach_the_profiler(
    requests: list[tuple[Program, profiling.ProfileRequest, MeasurementBudget]],
) -> None:
    options = ["--args", "{ lr = 0.3 }", "--batches", "32,8", "--shares", "1,0.5", "--memory", "1GiB", "--no-noise"]
    assert run(["profile", "sub/train.py:main", *options, "--with", "jobs.toml:a", "--devices", "cpu:1x1"]) == 0
    ((program, request, budget),) = requests
    assert (program.entry, program.args) == ("train.py:main", {"lr": 0.3})
    assert (request.batches, request.shares, request.exact, request.noise) == ((32, 8), (0.5, 1.0), True, False)
    assert request.beside is not None
    assert request.beside.args == {"lr": 0.2}
    assert budget.memory_bytes == 1 << 30


@pytest.mark.usefixtures("requests")
def test_the_profile_is_printed_and_saved(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    assert run(["profile", "sub/train.py:main", "--devices", "cpu:1x1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert json.loads((here / document.pop("path")).read_text()) == document
    assert run(["profile", "sub/train.py:main", "--devices", "cpu:1x1", "--out", "p.json"]) == 0
    out = capsys.readouterr().out
    assert "out of memory" in out
    assert "batch 32" in out
    assert "120 ± 9" in out
    assert (here / "p.json").is_file()


def test_an_entry_may_be_a_job_of_a_file(here: Path) -> None:
    program = find_program("jobs.toml:a")
    assert (program.entry, program.args, program.batch_size) == ("sub/train.py:main", {"lr": 0.2}, 64)
    assert find_program("sub/train.py:main").folder == str(here / "sub")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["train.py"], "file.py:function"),
        (["sub/trian.py:main"], "did you mean"),
        (["sub/train.py:mian"], "did you mean"),
        (["jobs.toml:b"], "'b'"),
        (["jobs.toml:shell"], "'shell'"),
        (["jobs.toml:a", "--args", "{}"], "--args"),
        (["sub/train.py:main", "--args", "{ lr: 3 }"], "TOML"),
        (["sub/train.py:main", "--args", "{ rate = 3 }"], "rate"),
        (["sub/train.py:main", "--batches", "32,x"], "'x'"),
        (["sub/train.py:main", "--batches", "0"], "'0'"),
        (["sub/train.py:main", "--shares", "0.5,2"], "'2'"),
        (["sub/train.py:main", "--seconds", "0"], "--seconds"),
        (["sub/train.py:main", "--memory", "much"], "--memory"),
        (["sub/train.py:main", "--devices", "tpu"], "tpu"),
        (["sub/train.py:main", "--with", "nothing"], "file.py:function"),
    ],
)
def test_bad_input_gets_exit_code_2(
    requests: list[object], capsys: pytest.CaptureFixture[str], args: list[str], expected: str
) -> None:
    assert run(["profile", *args]) == 2
    assert expected.lower() in capsys.readouterr().err.lower()
    assert requests == []


def test_an_unwritable_file_is_bad_input(
    requests: list[object], capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    (here / "file").write_text("")
    assert run(["profile", "sub/train.py:main", "--devices", "cpu:1x1", "--out", "file/p.json"]) == 2
    assert "file/p.json" in capsys.readouterr().err


def test_an_entry_needs_a_colon() -> None:
    with pytest.raises(InputError, match=r"file\.py:function"):
        find_program("train")
