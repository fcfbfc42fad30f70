"""``carpool slurm``: writes the script and submits it, or says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.cli.main import run

JOBS = '[[job]]\nname = "a"\ncommand = ["/bin/true"]\n'


def write_jobs(folder: Path) -> str:
    (folder / "jobs.toml").write_text(JOBS, encoding="utf-8")
    return str(folder / "jobs.toml")


def test_the_script_is_written_and_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho "Submitted batch job 17: $1"\n', encoding="utf-8")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert run(["slurm", write_jobs(tmp_path), "--time", "30", "--sbatch=--account=lab"]) == 0
    script = tmp_path / "jobs.slurm"
    assert "#SBATCH --account=lab" in script.read_text().splitlines()
    assert capsys.readouterr().out.splitlines() == [str(script), f"Submitted batch job 17: {script}"]


def test_without_sbatch_the_script_is_written_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["slurm", write_jobs(tmp_path), "--time", "30"]) == 2
    assert "--no-submit" in capsys.readouterr().err
    assert run(["slurm", write_jobs(tmp_path), "--time", "30", "--no-submit"]) == 0


def test_a_wrong_job_file_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text("[[job]]\n", encoding="utf-8")
    assert run(["slurm", str(tmp_path / "jobs.toml"), "--time", "30", "--no-submit"]) == 2
    assert not (tmp_path / "jobs.slurm").exists()
