"""``carpool logs``, ``get``, ``explain`` and ``why`` of jobs of a daemon."""

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

from carpool.cli.main import run
from carpool.cli.verbs import job_output
from tests.support.cli_rig import job_file, stderr_of, stdout_of, write_log
from tests.support.http_rig import Served


def test_logs_prints_all_or_the_tail(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    run(["submit", "-d", job_file(served, "a")])
    write_log(served, "a", "one\ntwo\n")
    capsys.readouterr()
    assert stdout_of(capsys, "logs", "a") == "one\ntwo\n"
    assert stdout_of(capsys, "logs", "a", "--tail", "1") == "two\n"
    assert stdout_of(capsys, "logs", "a", "--tail", "9") == "one\ntwo\n"
    assert json.loads(stdout_of(capsys, "logs", "a", "-n", "1", "--json"))["text"] == "two\n"
    served.do(served.rig.backend.settle(1000.0))
    assert json.loads(stdout_of(capsys, "logs", "a", "--json"))["is_over"] is True


def test_the_daemon_answers_for_its_jobs(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CARPOOL_STATE", str(served.rig.backend.read_model.state))
    monkeypatch.chdir(tmp_path)
    run(["submit", "-d", job_file(served, "a")])
    write_log(served, "a", "one\n")
    capsys.readouterr()
    history = json.loads(stdout_of(capsys, "explain", "a", "--json"))["story"]
    assert history[0]["at_s"] == 0.0
    assert stdout_of(capsys, "why", "a").startswith("now: a ")
    assert stdout_of(capsys, "get", "a", "--out", "copy") == "copy/log\n"
    assert (tmp_path / "copy" / "log").read_text(encoding="utf-8") == "one\n"
    assert "'none'" in stderr_of(capsys, "explain", "none")


def test_get_of_a_job_without_files_says_that_it_waits(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CARPOOL_STATE", str(served.rig.backend.read_model.state))
    run(["submit", "-d", job_file(served, "a")])
    capsys.readouterr()
    said = stderr_of(capsys, "get", "a")
    assert "has no files yet" in said
    assert "carpool why a" in said


def test_get_why_and_explain_take_the_address_of_a_daemon(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run(["submit", "-d", job_file(served, "a")])
    write_log(served, "a", "one\n")
    state, server = served.rig.backend.read_model.state, f"unix:{served.socket}"
    monkeypatch.setenv("CARPOOL_STATE", str(tmp_path / "another"))
    monkeypatch.delenv("CARPOOL_SERVER")
    (state / "api.sock").symlink_to(served.socket)
    capsys.readouterr()
    assert stdout_of(capsys, "why", "a", "--server", server).startswith("now: a ")
    assert "was submitted" in stdout_of(capsys, "explain", "a", "--server", server)
    assert stdout_of(capsys, "get", "a", "--out", "copy", "--server", f"unix:{state}/api.sock") == "copy/log\n"
    for verb in ("why", "explain", "get"):
        said = stderr_of(capsys, verb, "aa", "--server", server)
        assert "Did you mean a?" in said, said


def test_files_of_a_daemon_on_another_machine_are_not_looked_for_here(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(["submit", "-d", job_file(served, "a")])
    monkeypatch.setenv("CARPOOL_TOKEN", served.tokens["root"])
    monkeypatch.setenv("CARPOOL_STATE", str(tmp_path / "another"))
    capsys.readouterr()
    assert f"machine of the daemon, {served.url}" in stderr_of(capsys, "get", "a", "--server", served.url)


def test_a_misspelled_variable_of_the_environment_is_named(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARPOOL_URL", served.url)
    assert run(["ps"]) == 0
    said = capsys.readouterr().err
    assert "CARPOOL_URL" in said
    assert "CARPOOL_SERVER" in said


def test_get_tries_again_when_a_running_job_replaces_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from carpool.runtime.state.checkpoint import Checkpoints

    kept = Checkpoints(tmp_path / "checkpoints", keep=1)
    kept.save(1, {"model": {"w": torch.ones(1)}})
    listed = [{"latest.pt": path} for path in kept.paths()]
    kept.save(2, {"model": {"w": torch.ones(1) * 2}})  # deletes the first
    found = job_output._checkpoints
    monkeypatch.setattr(job_output, "_checkpoints", lambda folder: listed.pop() if listed else found(folder))
    listed.append(listed[0])  # for the question whether there are any
    assert job_output._export(tmp_path, tmp_path) == ["latest.pt"]
    assert torch.load(tmp_path / "latest.pt")["w"] == 2


def test_the_tail_of_a_long_log_is_counted_in_lines(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    run(["submit", "-d", job_file(served, "a")])
    lines = [f"{number} {'é' * 50}\n" for number in range(20_000)]
    write_log(served, "a", "".join(lines))
    capsys.readouterr()
    assert stdout_of(capsys, "logs", "a", "--tail", "3000") == "".join(lines[-3000:])
