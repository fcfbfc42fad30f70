"""``carpool backup``, ``restore``, ``token`` and ``config``."""

import json
from pathlib import Path

import pytest

from carpool.cli.main import run
from tests.support.cli_rig import stderr_of, stdout_of


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    (folder / "jobs" / "a").mkdir(parents=True)
    (folder / "jobs" / "a" / "log").write_text("hello\n", encoding="utf-8")
    return folder


def test_backup_and_restore(tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backup, target = str(tmp_path / "b.tar"), tmp_path / "restored"
    assert json.loads(stdout_of(capsys, "backup", backup, "--state", str(state), "--json"))["files"] == 1
    assert json.loads(stdout_of(capsys, "restore", backup, "--check", "--json"))["state"] is None
    assert json.loads(stdout_of(capsys, "restore", backup, "--state", str(target), "--json"))["state"] == str(target)
    assert (target / "jobs" / "a" / "log").read_text(encoding="utf-8") == "hello\n"
    assert str(target) in stderr_of(capsys, "restore", backup, "--state", str(target)), "it is not empty"


def test_tokens_are_created_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ("--state", str(tmp_path))
    token = stdout_of(capsys, "token", "add", "ada", "--role", "admin", *state).strip()
    assert token.startswith("carpool_")
    listed = stdout_of(capsys, "token", "list", *state)
    assert listed.splitlines()[1].split()[:3] == ["ada-1", "ada", "admin"]
    assert token not in listed
    assert run(["token", "remove", "ada-1", *state]) == 0
    capsys.readouterr()
    assert json.loads(stdout_of(capsys, "token", "list", "--json", *state))["tokens"] == []
    assert "'ada-1'" in stderr_of(capsys, "token", "remove", "ada-1", *state)


def test_config_shows_values_with_their_origins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CARPOOL_PORT", "8000")
    monkeypatch.setenv("CARPOOL_TOKEN", "carpool_secret")
    text = stdout_of(capsys, "config", "show")
    (port,) = [line.split() for line in text.splitlines() if line.startswith("port")]
    assert port[1:4] == ["8000", "environment", "CARPOOL_PORT"]
    document = json.loads(stdout_of(capsys, "config", "show", "--json"))
    assert {row["name"]: row["from"] for row in document["settings"]}["host"] == "default"
    assert "carpool_secret" not in text + json.dumps(document)
