"""A real daemon with the worst jobs: each ends alone, with its reason, and a bystander is started once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from carpool.cli.main import BAD_INPUT, FINISHED, run
from carpool.service.client import Client

ENTRIES = """
import torch
from torch import nn
from carpool import Stop, Training
from carpool.runtime.data.datasets import TensorData


def training(steps):
    data = TensorData(torch.randn(8, 2), torch.randint(0, 2, (8,)))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(model, optimizer, data, loss, 4, Stop(steps=steps))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def huge():
    return training(10**400)


def loud():
    raise ValueError("x" * 70_000_000)


def good():
    return training(20)
"""
CHANNEL = """
import os, socket, sys, time
end = socket.socket(fileno=int(os.environ["CARPOOL_CHANNEL"]))
line = {
    "steps": b'{"say":"Joined","step":0,"total_steps":' + b"9" * 401 + b"}",
    "rate": b'{"say":"Stepped","step":1,"epoch":0,"loss":NaN,"samples_per_s":1,"steps_per_s":Infinity}',
    "deep": b"[" * 100_000,
    "long": b"x" * (1 << 25),
}[sys.argv[1]]
try:
    end.sendall(line + b"\\n")
except OSError:
    pass
time.sleep(600)
"""
FILES = """
import os, shutil
folder = os.environ["CARPOOL_FOLDER"]
for name in ("log", "metrics.jsonl", "story.jsonl", "outcome.json", "cuts.jsonl"):
    path = os.path.join(folder, name)
    if os.path.lexists(path):
        os.unlink(path)
    os.mkfifo(path)
"""
JOBS = """
[[job]]
name = "huge"
entry = "entries.py:huge"
[[job]]
name = "loud"
entry = "entries.py:loud"
[[job]]
name = "files"
command = ["python", "files.py"]
[[job]]
name = "environment"
command = ["sh", "-c", "env > seen"]
[[job]]
name = "good"
entry = "entries.py:good"
"""
MESSAGES = ("steps", "rate", "deep", "long")
SECRETS = {"CARPOOL_TOKEN": "t0ken", "AWS_SECRET_ACCESS_KEY": "k3y", "HF_TOKEN": "hf"}


@contextmanager
def daemon(state: Path) -> Iterator[tuple[subprocess.Popen[bytes], Client]]:
    """A daemon with two devices in a process of its own, and a client."""
    command = [sys.executable, "-m", "carpool", "serve", "--state", str(state), "--devices", "cpu:2", "--port", "0"]
    environment = {**os.environ, **SECRETS, "CARPOOL_PASS_ENV": "HF_*"}
    process = subprocess.Popen([*command, "--policy", "fifo"], stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    try:
        while b"listening" not in (line := process.stderr.readline()):
            assert line, "the daemon has exited"
        with Client(f"unix:{state / 'api.sock'}") as client:
            yield process, client
    finally:
        process.stderr.close()  # nothing reads what it prints any more
        if process.poll() is None:
            assert run(["stop", "--state", str(state)]) == FINISHED
        process.wait()
        assert run(["stop", "--state", str(state)]) == BAD_INPUT, "no daemon is left"


def await_ends(client: Client, jobs: set[str]) -> dict[str, str]:
    """Wait for jobs to end; the phase of each."""
    for _ in client.events(after=0):
        phases = {job["id"]: job["phase"] for job in client.all_jobs() if job["id"] in jobs}
        if phases.keys() == jobs and not {"waiting", "running", "blocked"} & set(phases.values()):
            return phases
    raise AssertionError("the daemon has ended its stream")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in {"entries.py": ENTRIES, "channel.py": CHANNEL, "files.py": FILES}.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    sent = [f'[[job]]\nname = "{name}"\ncommand = ["python", "channel.py", "{name}"]' for name in MESSAGES]
    (tmp_path / "jobs.toml").write_text("\n".join([JOBS, *sent]), encoding="utf-8")
    bystander = '[[job]]\nname = "bystander"\ncommand = ["sh", "-c", "echo started >> starts; exec sleep 600"]\n'
    (tmp_path / "bystander.toml").write_text(bystander, encoding="utf-8")
    return tmp_path


def test_the_worst_jobs_end_alone_and_the_daemon_starts_again(folder: Path) -> None:
    state, names = folder / "state", {"huge", "loud", "files", "environment", "good", *MESSAGES}
    with daemon(state) as (process, client):
        client.submit(folder / "bystander.toml")
        client.submit(folder / "jobs.toml")
        phases = await_ends(client, names)
        assert {name for name, phase in phases.items() if phase == "finished"} == {"files", "environment", "good"}
        errors = {name: client.job(name)["error"] for name in names}
        assert "2**53" in errors["huge"]
        assert "total_steps" in errors["steps"]
        assert "steps_per_s" in errors["rate"]
        assert 1_000 < len(errors["loud"]) < 5_000
        assert client.log("files")["next"] >= 0
        assert client.measurements("files") == []
        process.kill()
        process.wait()
    seen = (folder / "seen").read_text(encoding="utf-8")
    assert "HF_TOKEN=hf" in seen
    assert "t0ken" not in seen
    assert "k3y" not in seen
    with daemon(state) as (_, client):
        assert {name: client.job(name)["phase"] for name in names} == phases
        assert client.job("bystander")["phase"] == "running"
        client.cancel("bystander")
    assert (folder / "starts").read_text(encoding="utf-8") == "started\n"
