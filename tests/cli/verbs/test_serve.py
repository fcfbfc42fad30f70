"""The verb serve: it holds its folder, says what it found, and leaves as tidily as it can."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from carpool.cli.main import run


def test_a_daemon_keeps_others_out_and_ends_on_sigterm(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
    state = tmp_path / "state"
    given = ["serve", "--state", str(state), "--devices", "cpu:1", "--policy", "fifo", "--port", "0"]
    daemon = subprocess.Popen([sys.executable, "-m", "carpool", *given], stderr=subprocess.PIPE, text=True)
    assert daemon.stderr is not None
    try:
        first = daemon.stderr.readline()
        assert all(words in first for words in ("1 device ", str(state), "fifo", "0 jobs"))
        assert f"unix:{state}/api.sock" in daemon.stderr.readline()
        assert run(given) == 2
        refused = capfd.readouterr().err
        assert str(state) in refused
        assert f"kill {daemon.pid}" in refused
        daemon.send_signal(signal.SIGTERM)
        assert "checkpoints" in daemon.stderr.read()
        assert daemon.wait() == 0
    finally:
        daemon.kill()
        daemon.wait()
        daemon.stderr.close()
    assert (state / "executor" / "executor.log").read_text() == ""
    assert not (state / "executor" / "executor").exists()
    assert state.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_had_and_a_policy_that_is_none_leave_nothing_behind(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
    state = tmp_path / "state"
    assert run(["serve", "--state", str(state), "--devices", "cpu:1", "--policy", "fifa"]) == 2
    assert capfd.readouterr().err == "carpool: unknown policy 'fifa'. Did you mean fifo?\n"
    assert not state.exists(), "a journal would begin with that policy"
    (tmp_path / "file").touch()
    assert run(["serve", "--state", str(tmp_path / "file" / "state"), "--devices", "cpu:1"]) == 2
    words = "cannot be written: Not a directory. Name another with --state."
    assert capfd.readouterr().err == f"carpool: {tmp_path}/file/state: {words}\n"
