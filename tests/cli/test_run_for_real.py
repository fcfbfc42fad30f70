"""The verb run with its executor and real trainings: tiny ones, because starting processes is what takes the time."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from carpool.cli.main import run

torch = pytest.importorskip("torch")

ENTRY = """
import torch
from torch import nn
from carpool import Stop, Training
from carpool.runtime.data.datasets import synthetic


def net(epochs=3, fail=False):
    data = synthetic((8,), classes=4, size=64)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    def loss(model, batch):
        if fail:
            raise RuntimeError("no luck")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    return Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=data.train,
        loss=loss,
        batch_size=16,
        stop=Stop(epochs=epochs),
        evaluate=lambda model: {"size": 1.0},
        best="max size",
    )
"""
JOBS = """
[[job]]
name = "one"
entry = "train.py:net"
exact = true
shards = 2
[[job]]
name = "two"
entry = "train.py:net"
exact = true
shards = 2
devices = 2
[[job]]
name = "bad"
entry = "train.py:net"
args = { fail = true }
[[job]]
name = "shell"
command = ["sh", "-c", "echo hello"]
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an entry, to stand in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(ENTRY, encoding="utf-8")
    return tmp_path


def test_jobs_are_trained_and_their_weights_can_be_had(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "jobs.toml").write_text(JOBS, encoding="utf-8")
    words = ["--devices", "cpu:2", "--reducer", "group", "--json"]
    assert run(["run", "jobs.toml", *words]) == 1  # one of them fails
    jobs = {job["name"]: job for job in json.loads(capsys.readouterr().out)["jobs"]}
    assert {name: job["state"] for name, job in jobs.items()} == {
        "one": "finished",
        "two": "finished",
        "bad": "failed",
        "shell": "finished",
    }
    assert jobs["one"]["digest"] == jobs["two"]["digest"], "on one device and on two: the same bits"
    assert (jobs["one"]["steps"], jobs["one"]["epochs"], jobs["one"]["metrics"]) == (12, 3, {"size": 1.0})
    assert "no luck" in jobs["bad"]["error"]
    assert jobs["shell"]["digest"] is None
    assert (home / ".carpool/runs/jobs/jobs/shell/log").read_text(encoding="utf-8") == "hello\n"
    assert run(["get", "one", "--out", "taken"]) == 0
    weights = torch.load(home / "taken" / "final.pt", weights_only=True)
    assert sorted(weights) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert {path.name for path in (home / "taken").iterdir()} >= {"best.pt", "outcome.json", "log"}
    capsys.readouterr()
    assert run(["explain", "one"]) == 0
    assert "finished" in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupted_run_ends_as_if_nothing_had_been(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        '[[job]]\nname = "{name}"\nentry = "train.py:net"\nargs = {{ epochs = 400 }}\n'
        "exact = true\nshards = 2\nmax_devices = 2\n"
    )
    (home / "jobs.toml").write_text(text.format(name="one") + text.format(name="two"), encoding="utf-8")
    assert run(["run", "jobs.toml", "--devices", "cpu:2", "--state", "whole", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    words = [sys.executable, "-m", "carpool", "run", "jobs.toml", "--devices", "cpu:2", "--state", "cut"]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    metrics = home / "cut" / "jobs" / "two" / "metrics.jsonl"
    while not metrics.is_file():
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(timeout=0.1) is None, "it ended before it could be interrupted"
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert run(["run", "--resume", "cut", "--devices", "cpu:1", "--json"]) == 0
    resumed = json.loads(capsys.readouterr().out)
    assert [job["digest"] for job in resumed["jobs"]] == [job["digest"] for job in whole["jobs"]]


def test_where_an_entry_raises_nothing_is_started_or_kept(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (home / "jobs.toml").write_text(JOBS, encoding="utf-8")
    (home / "train.py").write_text(ENTRY.replace("data = ", "assert not fail, 'not so'\n    data = "), encoding="utf-8")
    assert run(["run", "jobs.toml", "--devices", "cpu:2"]) == 2
    out, err = capfd.readouterr()
    assert err == "carpool: job 'bad': train.py:net: raised AssertionError: not so (train.py, line 9)\n"
    assert out == ""
    assert not list((home / ".carpool/runs").iterdir())


HALVED = """
import torch
from torch import nn
from carpool import Stop, Training
from carpool.runtime.data.datasets import synthetic


def net(lr):
    data = synthetic((8,), classes=4, size=64)
    model = nn.Linear(8, 4)
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    return Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        dataset=data.train,
        loss=loss,
        batch_size=16,
        stop=Stop(epochs=100),
        evaluate=lambda model: {"score": -lr},
    )
"""


def test_halving_stops_the_worse_half_and_the_best_ends_with_the_bits_it_has_alone(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "halved.py").write_text(HALVED, encoding="utf-8")
    table = '[[job]]\nname = "net"\nentry = "halved.py:net"\n'
    rule = "sweep = { lr = [0.2, 0.05, 0.1, 0.3], at_most = 2, halving = { metric = 'score', eta = 2, min_steps = 8 } }"
    (home / "sweep.toml").write_text(f"{table}{rule}\n", encoding="utf-8")
    assert run(["run", "sweep.toml", "--devices", "cpu:1", "--json"]) == 0
    jobs = {job["name"]: job for job in json.loads(capsys.readouterr().out)["jobs"]}
    assert jobs["net-2"]["state"] == "finished"
    assert jobs["net-2"]["params"] == {"lr": 0.05}
    stopped = [job for job in jobs.values() if job["state"] == "cancelled"]
    assert stopped
    assert all("stopped at rung" in job["error"] for job in stopped)
    assert min(job["steps"] for job in stopped) < 400, "before its end"
    from carpool.runtime.worker.entry_loader import load_training
    from carpool.testing import plain_loop

    monkeypatch.setattr(sys, "path", [*sys.path])  # loading adds the folder
    alone = plain_loop(load_training("halved.py:net", {"lr": 0.05}, folder=home))
    assert alone.digest == jobs["net-2"]["digest"], "held and resumed: the same bits"
    assert run(["results", "--run", "sweep", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == "net-2"


def test_a_program_runs_in_the_current_folder_and_its_output_is_printed(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "script.py").write_text("import os, sys; print(os.getcwd(), sys.argv); sys.exit(3)", encoding="utf-8")
    assert run(["run", "--devices", "cpu:1", "--set", "retries=0", "--", "python", "script.py", "--lr", "0.1"]) == 1
    said = capsys.readouterr()
    assert said.out == f"{home} ['script.py', '--lr', '0.1']\n"
    assert f"exit code 3 after it printed: {home} ['script.py', '--lr', '0.1'] (carpool logs script)" in said.err
    assert (home / ".carpool" / "runs" / "script" / "jobs" / "script" / "log").is_file()
    monkeypatch.setenv("CARPOOL_STATE", str(home / "no-daemon"))
    for args in ([], ["--run", "script"], ["-f"], ["--tail", "1"]):
        assert run(["logs", "script", *args]) == 0
        assert capsys.readouterr().out == said.out
    assert run(["logs", "none"]) == 2


def test_a_program_alone_gets_all_cores_and_threads_that_soon_sleep(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert run(["run", "--name", "p", "--", "sh", "-c", "echo $CARPOOL_CORES $CARPOOL_THREADS $GOMP_SPINCOUNT"]) == 0
    cores = sorted(os.sched_getaffinity(0))
    assert capsys.readouterr().out.split() == [",".join(map(str, cores)), str(len(cores)), "1000"]
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert run(["run", "--name", "q", "--", "sh", "-c", "echo ${GOMP_SPINCOUNT:-own}"]) == 0
    assert capsys.readouterr().out.split() == ["own"]


def test_a_program_can_be_swept_and_each_line_names_its_job(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["run", "--devices", "cpu:1", "--name", "p", "--sweep", "lr=0.1,0.01"]
    assert run([*sweep, "--", "sh", "-c", "echo {lr}; printf end"]) == 0
    printed = capsys.readouterr()
    assert sorted(printed.out.splitlines()) == ["p-1 | 0.1", "p-1 | end", "p-2 | 0.01", "p-2 | end"]
    assert [line.split()[-1] for line in printed.err.splitlines() if "lr=" in line] == ["lr=0.1", "lr=0.01"]
    assert run([*sweep, "--json", "--", "sh", "-c", "echo {lr}"]) == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert [job["params"] for job in jobs] == [{"lr": 0.1}, {"lr": 0.01}]
    assert run([*sweep, "--", "sh", "-c", "echo"]) == 2, "{lr} is not used"
