"""The batch script in a real shell, with a fake carpool and a fake scontrol: stops, requeues and resumes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from carpool.core.errors import InputError
from carpool.jobs.slurm_script import RUN_FILE, SlurmJob, batch_script

FAKE_RUN = """#!/bin/bash
echo "$@" >> calls
mkdir -p "{state}"; touch "{state}/{run_file}"
trap 'exit {code}' TERM
echo ready > "{ready}"
for _ in $(seq 6000); do [ -e end ] && exit {end}; sleep 0.01; done
"""


def prepare(folder: Path, *, code: int = 130, end: int = 0) -> Path:
    """A script whose run exits with `code` after SIGTERM, and with `end` once a file `end` exists."""
    folder.mkdir(exist_ok=True)
    os.mkfifo(folder / "ready")
    state = folder / "a state"
    python = folder / "python"
    values = {"state": state, "run_file": RUN_FILE, "ready": folder / "ready", "code": code, "end": end}
    python.write_text(FAKE_RUN.format(**values))
    (folder / "scontrol").write_text('#!/bin/bash\necho scontrol "$@" >> calls\n')
    for each in (python, folder / "scontrol"):
        each.chmod(0o755)
    script = folder / "jobs.slurm"
    script.write_text(batch_script(SlurmJob(folder / "jobs.toml", state, str(python), "4:00:00")))
    return script


def launch(script: Path) -> subprocess.Popen[bytes]:
    environment = {"PATH": f"{script.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    process = subprocess.Popen(["bash", str(script)], env=environment)
    (script.parent / "ready").read_text()  # the run has begun
    return process


def calls(script: Path) -> list[list[str]]:
    return [line.split() for line in (script.parent / "calls").read_text().splitlines()]


@pytest.mark.parametrize("code", [130, 143])
def test_a_run_that_is_stopped_before_the_limit_is_requeued_and_resumed(code: int, tmp_path: Path) -> None:
    script = prepare(tmp_path / "a folder", code=code)
    first = launch(script)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0
    (run, requeue) = calls(script)
    assert "--resume" not in run
    assert requeue == ["scontrol", "requeue", "17"]
    second = launch(script)
    (script.parent / "end").touch()
    assert second.wait(60) == 0
    assert calls(script)[2][-1] == "--resume"
    assert len(calls(script)) == 3, "a finished run is not requeued"


@pytest.mark.parametrize("end", [1, 2, 130])
def test_a_run_that_ends_by_itself_is_not_requeued(end: int, tmp_path: Path) -> None:
    script = prepare(tmp_path / "folder", end=end)
    process = launch(script)
    (script.parent / "end").touch()
    assert process.wait(60) == end
    assert len(calls(script)) == 1


def test_slurm_gets_the_limit_and_is_asked_to_signal_before_it() -> None:
    text = batch_script(
        SlurmJob(Path("/a/jobs.toml"), Path("/a/s"), "python", "30", stop_s=60, options=["--gpus-per-node=2"])
    )
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert {"--time=30", "--signal=B:TERM@60", "--requeue", "--gpus-per-node=2"} <= set(asked)


@pytest.mark.parametrize("option", ["--a\nrm -rf x", "jobs"])
def test_what_is_no_option_of_sbatch_is_refused(option: str) -> None:
    with pytest.raises(InputError):
        batch_script(SlurmJob(Path("jobs.toml"), Path("s"), "python", "30", options=[option]))


def test_several_nodes_use_the_engine_and_survive_the_loss_of_one() -> None:
    text = batch_script(SlurmJob(Path("/a/jobs.toml"), Path("/a/s"), "python", "30", nodes=3))
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert {"--nodes=3", "--no-kill"} <= set(asked)
    assert "--engine slurm" in text
