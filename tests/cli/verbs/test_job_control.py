"""``carpool cancel``, ``pause``, ``resume``, ``weight`` and ``limit``, with completion of job names."""

import json

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

from carpool.cli.main import run
from tests.support.cli_rig import job_file, stderr_of, stdout_of
from tests.support.http_rig import Served


def test_each_verb_prints_the_new_phase(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    run(["submit", "-d", job_file(served, "a", "b", "c")])
    capsys.readouterr()
    assert stdout_of(capsys, "pause", "a") == "a is paused\n"
    assert stdout_of(capsys, "resume", "a", "none", code=2) == "a is waiting\n"
    assert stdout_of(capsys, "weight", "b", "2.5") == "b is running with weight 2.5\n"
    assert stdout_of(capsys, "limit", "b", "1", "2") == "b is running with 1 to 2 devices\n"
    assert json.loads(stdout_of(capsys, "cancel", "a", "b", "--json"))["jobs"][0]["phase"] == "cancelled"


def test_the_name_of_a_sweep_stands_for_its_jobs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    run(["submit", "-d", job_file(served, "lr", extra="sweep = { lr = [1, 2, 3, 4, 5] }\nat_most = 2")])
    capsys.readouterr()
    assert stdout_of(capsys, "pause", "lr") == "lr-1 is paused\nlr-2 is paused\n"
    paused = json.loads(stdout_of(capsys, "ps", "--phase", "paused", "--json"))["jobs"]
    assert {(job["array"], job["at_most"]) for job in paused} == {("lr", 2)}
    assert len(stdout_of(capsys, "resume", "lr").splitlines()) == 2
    assert [line.split()[-1] for line in stdout_of(capsys, "cancel", "lr").splitlines()] == ["cancelled"] * 5
    assert run(["cancel", "lr"]) == 0
    assert "'lr' has no job left to cancel" in capsys.readouterr().err
    assert "'lr-9'" in stderr_of(capsys, "cancel", "lr-9")


def test_an_unknown_job_gets_suggestions(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    run(["submit", "-d", job_file(served, "mlp-wide")])
    capsys.readouterr()
    for verb in ("pause", "logs"):
        error = stderr_of(capsys, verb, "mlp-wid")
        assert "'mlp-wid'" in error
        assert "Did you mean mlp-wide?" in error
    assert "carpool ps --all" in stderr_of(capsys, "pause", "x")


def test_weights_and_limits_out_of_range_are_rejected(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    run(["submit", "-d", job_file(served, "a")])
    capsys.readouterr()
    for weight in ("-3", "0", "2e6"):
        error = stderr_of(capsys, "weight", "a", weight)
        assert f"{float(weight)} is not in the range 1e-06<=x<=1000000.0" in error
    error = stderr_of(capsys, "limit", "a", "9", "1")
    assert "'MAX'" in error
    assert "carpool limit --help" in error


def test_the_shell_completes_job_names(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["submit", "-d", job_file(served, "mlp", "cnn")])
    capsys.readouterr()
    monkeypatch.setenv("_CARPOOL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "carpool cancel m")
    monkeypatch.setenv("COMP_CWORD", "2")
    run([])
    assert capsys.readouterr().out == "plain,mlp\n"
