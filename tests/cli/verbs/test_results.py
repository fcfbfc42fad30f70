"""``carpool results`` of the daemon's sweeps, and of runs after their end."""

import csv
import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

from carpool.backends.run_folder import RunFolder, RunSettings
from carpool.cli.main import run
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.job_file import parse_jobs
from carpool.runtime.executor.reports import Evaluation
from tests.support.cli_rig import job_file, stderr_of, stdout_of
from tests.support.http_rig import Served


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run with a sweep of three commands, of which two have reported metrics."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARPOOL_STATE", str(tmp_path / "no-daemon"))
    table = {"name": "fit", "command": ["echo", "{lr}"], "sweep": {"lr": [0.1, 0.2, 0.3]}}
    jobs = parse_jobs({"job": [table, {"name": "other", "command": ["echo"]}]}, tmp_path, "jobs.toml")
    folder = RunFolder(tmp_path / ".carpool" / "runs" / "jobs")
    folder.path.mkdir(parents=True)
    folder.begin(RunSettings("jobs", "0", "fifo", (LocalDevice(0, "cpu:0", "cpu1", (0,)),), jobs))
    for job, values in (("fit-1", (0.5, 0.6)), ("fit-2", (0.9, 0.7))):
        for step, value in enumerate(values, start=1):
            folder.append(JobId(job), "metrics.jsonl", {"at_s": 1.0, "step": step, "metrics": {"acc": value}})
    return folder


def test_a_run_is_compared_after_its_end(finished: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    heading, best, second, *_ = stdout_of(capsys, "results").splitlines()
    assert heading.split()[:3] == ["JOB", "LR", "STATE"]
    assert best.split()[:3] == ["*", "fit-2", "0.2"]
    assert second.split()[:2] == ["fit-1", "0.1"]
    found = json.loads(stdout_of(capsys, "results", "fit", "--metric", "acc", "--min", "--json"))
    assert (found["schema"], found["best"], found["mode"], len(found["rows"])) == (1, "fit-1", "min", 3)
    rows = list(csv.DictReader(stdout_of(capsys, "results", "--run", "jobs", "--csv").splitlines()))
    assert [(row["job"], row["lr"], row["best"], row["is_best"]) for row in rows[:2]] == [
        ("fit-2", "0.2", "0.9", "1"),
        ("fit-1", "0.1", "0.6", "0"),
    ]


def test_a_page_with_curves_is_written(finished: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    stdout_of(capsys, "results", "jobs", "--html", "page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    assert "lr=0.2" in page
    assert 'class="curve k0"' in page
    assert "/dashboard/" not in page, "it needs no server"
    assert "cannot write" in stderr_of(capsys, "results", "--html", "none/page.html")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["fti"], "Did you mean fit"),
        (["fit", "--metric", "ac"], "Did you mean acc"),
        (["--run", "none"], "unknown run 'none'"),
        (["nothing", "--run", "jobs"], "unknown sweep"),
    ],
)
def test_unknown_names_are_reported(
    finished: RunFolder, capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    assert part in stderr_of(capsys, "results", *words)


def test_without_runs_and_daemon_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARPOOL_STATE", str(tmp_path))
    assert "carpool run" in stderr_of(capsys, "results")


def test_a_sweep_of_the_daemon(
    served: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(["submit", "-d", job_file(served, "fit", extra="sweep = { lr = [0.1, 0.2] }")])
    accounting = served.rig.backend.read_model.accounting
    for job, value in (("fit-1", 0.4), ("fit-2", 0.3)):
        accounting.take(0.0, Evaluation(JobId(job), 5, {"val_loss": value}))
    capsys.readouterr()
    found = json.loads(stdout_of(capsys, "results", "--json"))
    assert (found["name"], found["metric"], found["best"]) == ("fit", "val_loss", "fit-2")
    assert "*  fit-2" in stdout_of(capsys, "results", "fit")
    assert "Did you mean val_loss" in stderr_of(capsys, "results", "fit", "--metric", "val_los")
