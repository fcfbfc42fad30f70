"""A real daemon: it starts by itself, runs a real program, is asked over both lines, and ends when it is told."""

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
    """A user's shell, with a home of its own."""

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

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "carpool", *words]
        return subprocess.run(
            command, env=self.environment, cwd=self.home, capture_output=True, text=True, timeout=120, check=False
        )


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and str(shell.settings.state).encode() in words:
            os.kill(int(process.name), signal.SIGKILL)


def test_a_daemon_from_its_first_job_to_its_end(shell: Shell) -> None:
    (shell.home / "jobs.toml").write_text(
        '[[job]]\nname = "hi"\ncommand = ["python", "-c", "print(\'hello\'); raise SystemExit(3)"]\n', encoding="utf-8"
    )
    submitted = shell.run("submit", "jobs.toml")
    assert (submitted.returncode, submitted.stdout) == (3, "hello\n"), submitted.stderr
    pid = int(submitted.stderr.partition("kill ")[2].split()[0])

    (job,) = json.loads(shell.run("ps", "--all", "--json").stdout)["jobs"]
    assert (job["phase"], job["exit_code"]) == ("failed", 3)
    told = (shell.settings.state / DAEMON_LOG).read_text(encoding="utf-8")
    assert f"listening at unix:{shell.settings.socket}" in told
    assert shell.settings.state.stat().st_mode & 0o777 == 0o700

    reports = shell.settings.state / "reports"
    reports.mkdir()
    (reports / "week.json").write_text("{}", encoding="utf-8")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(shell.settings.socket))) as browser:
        assert "week.json" in browser.get("http://localhost/compare").text

    own = shell.settings.state / OWN_TOKEN
    if own.exists():  # unless somebody else's daemon has the port
        url = told.partition(" and ")[2].split()[0]
        with Client(url, own.read_text(encoding="utf-8").strip()) as client:
            assert client.me()["role"] == "admin"
            assert (
                client.plan({"job": [{"name": "hi", "command": ["true"]}]}, folder=shell.home)["jobs"][0]["name"]
                == "hi-2"
            )
        with Client(url) as stranger, pytest.raises(RequestDenied, match="takes a token"):
            stranger.me()

    os.kill(pid, signal.SIGTERM)
    while Path(f"/proc/{pid}").exists() and not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].startswith(
        " Z"
    ):
        os.sched_yield()
    assert not shell.settings.socket.exists()


def test_beyond_this_machine_somebody_must_have_a_token(shell: Shell) -> None:
    refused = shell.run("serve", "--host", "0.0.0.0", "--port", "17637")
    assert refused.returncode == 2
    assert "nobody has a token" in refused.stderr


def test_beyond_this_machine_it_wants_a_certificate(shell: Shell) -> None:
    assert shell.run("token", "add", "ada").returncode == 0
    refused = shell.run("serve", "--host", "0.0.0.0", "--port", "17637")
    assert refused.returncode == 2
    assert "--insecure-http" in refused.stderr
