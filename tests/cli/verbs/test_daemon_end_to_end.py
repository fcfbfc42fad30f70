"""A real daemon: started by `submit`, runs a program, answers on socket and port, stops on SIGTERM."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")
pytest.importorskip("torch", reason="torch is not installed")

import httpx

from carpool.cli.support.serve_app import OWN_TOKEN
from carpool.cli.verbs.submit import DAEMON_LOG
from carpool.service.client import Client, RequestDenied
from carpool.service.config import Settings, read_settings


class Shell:
    """Runs commands with a home directory of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "CARPOOL_DEVICES": "cpu:1",
        }

    @property
    def settings(self) -> Settings:
        return read_settings(self.environment)

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "carpool", *args]
        return subprocess.run(
            command, env=self.environment, cwd=self.home, capture_output=True, text=True, timeout=120, check=False
        )


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    for process in Path("/proc").glob("[0-9]*"):
        try:
            args = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in args and str(shell.settings.state).encode() in args:
            os.kill(int(process.name), signal.SIGKILL)


def test_submit_starts_a_daemon_that_stops_on_sigterm(shell: Shell) -> None:
    (shell.home / "jobs.toml").write_text(
        '[[job]]\nname = "hi"\ncommand = ["python", "-c", "print(\'hello\'); raise SystemExit(3)"]\n', encoding="utf-8"
    )
    submitted = shell.run("submit", "jobs.toml")
    assert (submitted.returncode, submitted.stdout) == (3, "hello\n"), submitted.stderr
    pid = int(submitted.stderr.partition("(process ")[2].partition(")")[0])

    (job,) = json.loads(shell.run("ps", "--all", "--json").stdout)["jobs"]
    assert (job["phase"], job["exit_code"]) == ("failed", 3)
    log = (shell.settings.state / DAEMON_LOG).read_text(encoding="utf-8")
    assert f"unix:{shell.settings.socket}" in log
    assert shell.settings.state.stat().st_mode & 0o777 == 0o700

    reports = shell.settings.state / "reports"
    reports.mkdir()
    (reports / "week.json").write_text("{}", encoding="utf-8")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(shell.settings.socket))) as browser:
        assert "week.json" in browser.get("http://localhost/compare").text

    own = shell.settings.state / OWN_TOKEN
    if own.exists():  # unless another user's daemon has the port
        url = log.partition(" and ")[2].split()[0]
        with Client(url, own.read_text(encoding="utf-8").strip()) as client:
            assert client.me()["role"] == "admin"
            assert (
                client.plan({"job": [{"name": "hi", "command": ["true"]}]}, folder=shell.home)["jobs"][0]["name"]
                == "hi-2"
            )
        with Client(url) as anonymous, pytest.raises(RequestDenied) as denied:
            anonymous.me()
        assert denied.value.status == 401

    os.kill(pid, signal.SIGTERM)
    while Path(f"/proc/{pid}").exists() and not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].startswith(
        " Z"
    ):
        os.sched_yield()
    assert not shell.settings.socket.exists()


def test_an_urgent_job_interrupts_a_command_that_then_continues(shell: Shell) -> None:
    """The command is parked on the only device, not killed: it begins once."""
    (shell.home / "waits.py").write_text(
        "import pathlib, time\n"
        "print('begun', flush=True)\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.01)\n"
        "raise SystemExit(7)\n",
        encoding="utf-8",
    )
    assert shell.run("submit", "-d", "--", "python", "waits.py").stdout == "waits\n"
    while "begun" not in shell.run("logs", "waits").stdout:
        os.sched_yield()
    urgent = shell.run("submit", "--name", "now", "--set", "priority=urgent", "--", "echo", "done")
    assert (urgent.returncode, urgent.stdout) == (0, "done\n"), urgent.stderr
    assert "parked" in shell.run("explain", "waits").stdout
    (shell.home / "go").touch()
    with Client(f"unix:{shell.settings.socket}") as client:
        assert b"".join(client.follow("waits", 0)) == b"begun\n"
        assert client.job("waits")["exit_code"] == 7


def test_listening_beyond_loopback_requires_a_token(shell: Shell) -> None:
    rejected = shell.run("serve", "--host", "0.0.0.0", "--port", "17637")
    assert rejected.returncode == 2
    assert "carpool token add" in rejected.stderr


def test_listening_beyond_loopback_requires_a_certificate(shell: Shell) -> None:
    assert shell.run("token", "add", "ada").returncode == 0
    rejected = shell.run("serve", "--host", "0.0.0.0", "--port", "17637")
    assert rejected.returncode == 2
    assert "--insecure-http" in rejected.stderr
