"""``carpool submit``: followed output, exit codes, interruption, and no daemon."""

from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

from carpool.cli.main import run
from carpool.cli.support.daemon_client import connect
from carpool.cli.verbs import submit
from carpool.core.messages import JobFailed
from carpool.core.model import JobId
from carpool.runtime.executor.reports import Facts
from tests.support.cli_rig import job_file, stderr_of, write_log
from tests.support.http_rig import Served


def submit_and_follow(
    served: Served, capsys: pytest.CaptureFixture[str], *args: str, end: JobFailed | None = None
) -> tuple[int, str]:
    """Submit in a thread, let the jobs write logs and end; exit code and output of the command."""
    codes: list[int] = []
    following = Thread(target=lambda: codes.append(run(["submit", *args])))
    following.start()
    feed = served.rig.backend.read_model.events.feed

    async def run_jobs() -> None:
        async for event in feed.listen(0):
            if event.kind == "decision":
                break
        for name in ("a", "b"):
            write_log(served, name, "one\ntwo\n")
        if end is not None:
            served.rig.backend.executor.say(Facts((end,)))
        await served.rig.backend.settle(1000.0)

    served.do(run_jobs())
    following.join(30)
    return codes[0], capsys.readouterr().out


def test_prints_the_log_until_the_job_ends(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit_and_follow(served, capsys, job_file(served, "a")) == (0, "one\ntwo\n")


def test_prefixes_lines_with_the_name_for_several_jobs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = submit_and_follow(served, capsys, job_file(served, "a", "b"))
    assert (code, sorted(text.splitlines())) == (0, ["a | one", "a | two", "b | one", "b | two"])


def test_returns_the_exit_code_of_a_failed_command(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    end = JobFailed(JobId("a"), 1, "the command ended with exit code 7")
    assert submit_and_follow(served, capsys, job_file(served, "a"), end=end) == (7, "one\ntwo\n")


def test_ctrl_c_leaves_the_jobs_running_and_names_the_command_to_cancel_them(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("carpool.cli.verbs.submit.time.sleep", interrupt)
    assert "carpool cancel a b" in stderr_of(capsys, "submit", job_file(served, "a", "b"), code=130)


def test_no_daemon_at_a_given_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARPOOL_SERVER", f"unix:{tmp_path}/none")
    (tmp_path / "jobs.toml").write_text('[[job]]\nname = "a"\ncommand = ["true"]\n', encoding="utf-8")
    assert run(["submit", str(tmp_path / "jobs.toml")]) == 125
    assert run(["submit", str(tmp_path / "none.toml")]) == 2
    capsys.readouterr()
    error = stderr_of(capsys, "ps")
    assert f"unix:{tmp_path}/none: No such file or directory" in error
    assert "carpool serve" in error


def test_no_daemon_is_started_where_an_address_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARPOOL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("CARPOOL_URL", "http://carpool.lab:7637")
    (tmp_path / "jobs.toml").write_text('[[job]]\nname = "a"\ncommand = ["true"]\n', encoding="utf-8")
    assert "CARPOOL_SERVER" in stderr_of(capsys, "submit", str(tmp_path / "jobs.toml"))
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_a_long_log_is_printed_without_waiting_for_output(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    text = "x" * 2_500_000 + "\nlast\n"
    assert run(["submit", "-d", job_file(served, *names)]) == 0
    for name in names:
        write_log(served, name, text)
    served.do(served.rig.backend.settle(1000.0))
    capsys.readouterr()
    pauses: list[float] = []
    monkeypatch.setattr("carpool.cli.verbs.submit.time.sleep", pauses.append)
    with connect("") as client:
        assert submit.follow(client, names, as_json=False) == 0
    assert max(pauses) < submit.LOG_POLL_S
    printed = capsys.readouterr().out
    assert printed.count("x") == len(names) * 2_500_000
    assert printed.count("last\n") == len(names)
