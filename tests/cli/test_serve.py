"""The verb serve: it holds its folder, says what it found, and leaves as tidily as it can."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from carpool.cli.main import run
from carpool.cli.serve import default_state


def test_a_daemon_keeps_others_out_and_ends_on_sigterm(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    state = tmp_path / "state"
    given = ["serve", "--state", str(state), "--devices", "cpu:1", "--policy", "fifo"]
    daemon = subprocess.Popen([sys.executable, "-m", "carpool", *given], stderr=subprocess.PIPE, text=True)
    assert daemon.stderr is not None
    try:
        first = daemon.stderr.readline()
        assert first == f"carpool: serves 1 device from {state} with policy fifo; 0 jobs to go on with\n"
        assert run(given) == 2
        assert "another daemon is going on in it" in capfd.readouterr().err
        daemon.send_signal(signal.SIGTERM)
        assert daemon.stderr.read() == "carpool: halts all jobs with checkpoints\n"
        assert daemon.wait() == 0
    finally:
        daemon.kill()
        daemon.wait()
        daemon.stderr.close()
    assert (state / "executor" / "executor.log").read_text() == ""
    assert not (state / "executor" / "executor").exists()
    assert state.stat().st_mode & 0o777 == 0o700


def test_a_users_state_is_where_users_keep_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state() == tmp_path / "carpool"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert default_state() == Path("/home/ada/.local/state/carpool")
