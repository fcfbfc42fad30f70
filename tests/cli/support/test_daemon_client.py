"""Verbs that ask a daemon: what they print, and how they end."""

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

from carpool.cli.main import run
from carpool.core.messages import ForeignProcess, JobFailed, OutsidersSeen
from carpool.core.model import DeviceId, JobId
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.executor.reports import Facts
from tests.support.http_rig import Served, serve_http


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CARPOOL_CONFIG", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with serve_http(tmp_path) as served:
        monkeypatch.setenv("CARPOOL_SERVER", f"unix:{served.socket}")
        yield served


def job_file(served: Served, *names: str, more: str = "") -> str:
    path = served.reception.folder / "jobs.toml"
    tables = [f'[[job]]\nname = "{name}"\nentry = "train.py:main"\n{more}' for name in names]
    path.write_text("\n".join(tables), encoding="utf-8")
    return str(path)


def write_log(served: Served, job: str, text: str) -> None:
    folder = JobFolder(served.reception.office.read_model.state, job).path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log").write_text(text, encoding="utf-8")


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert run(list(words)) == code
    return capsys.readouterr().out


MINE = """
from dataclasses import dataclass
from carpool.policies.baselines.nonpreemptive import Fifo


@dataclass(frozen=True)
class Mine(Fifo):
    def plan(self, view):
        return super().plan(view) if len(view.jobs) < 2 else {}["two"]
"""


def test_a_policy_that_fails_is_told_of(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    mine = served.reception.folder / "mine.py"
    mine.write_text(MINE, encoding="utf-8")
    assert printed(capsys, "policy", f"{mine}:Mine") == f"{mine}:Mine decides from now on\n"
    printed(capsys, "submit", "-d", job_file(served, "a", "b"))
    fault = "policy Mine failed: KeyError: 'two' (mine.py, line 9)"
    assert printed(capsys, "policy") == f"fifo:bypass=true decides\nThat is since {fault}\n"
    assert json.loads(printed(capsys, "policy", "--json"))["fault"] == fault
    assert fault in printed(capsys, "why", "a")
    assert run(["policy", f"{mine}:Mine"]) == 2
    assert fault in capsys.readouterr().err


def test_jobs_are_submitted_listed_and_steered(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "submit", "-d", job_file(served, "a", "b", "c")) == "a\nb\nc\n"
    lines = printed(capsys, "ps").splitlines()
    assert lines[0].split() == ["JOB", "USER", "PHASE", "DEVICES", "STEP", "LOSS", "STEPS/S", "LEFT"]
    assert [line.split()[:4] for line in lines[1:]] == [
        ["c", "owner", "waiting"],
        ["b", "owner", "running", "cpu:1"],
        ["a", "owner", "running", "cpu:0"],
    ]
    assert printed(capsys, "pause", "a") == "a is paused\n"
    assert printed(capsys, "resume", "a", "none", code=2) == "a is waiting\n"
    assert printed(capsys, "weight", "b", "2.5") == "b is running with weight 2.5\n"
    assert printed(capsys, "limit", "b", "1", "2") == "b is running with 1 to 2 devices\n"
    assert json.loads(printed(capsys, "cancel", "a", "b", "--json"))["jobs"][0]["phase"] == "cancelled"
    assert json.loads(printed(capsys, "ps", "--json"))["total"] == 1
    assert len(printed(capsys, "ps", "--all").splitlines()) == 4
    assert "unknown phase" in run_err(capsys, "ps", "--phase", "wating")


def run_err(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(list(words)) == 2
    return capsys.readouterr().err


def test_top_shows_devices_and_jobs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    run(["submit", "-d", job_file(served, "mlp")])
    text = printed(capsys, "top", "--once")
    assert "1 running" in text
    assert "cpu:0" in text
    seen = json.loads(printed(capsys, "top", "--json"))
    assert seen["active"] == len(seen["jobs"]) == 1
    run(["submit", "-d", job_file(served, f"{'long-' * 18}name")])
    text = printed(capsys, "top", "--once")
    assert "long-long-lo…g-long-name" in text
    assert "steps/s  left" in text, "a name takes no room from figures"


def test_a_sweep_is_one_line_and_is_steered_by_its_name(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = "sweep = { lr = [1, 2, 3, 4, 5] }\nat_most = 2"
    assert printed(capsys, "submit", "-d", job_file(served, "lr", more=sweep)).split() == [
        f"lr-{n}" for n in range(1, 6)
    ]
    assert printed(capsys, "submit", "-d", job_file(served, "lr", more=sweep)).split()[:2] == ["lr.2-1", "lr.2-2"]
    names = [line.split()[0] for line in printed(capsys, "ps").splitlines()[1:]]
    assert names == ["lr.2[3-5]", "lr.2[1-2]", "lr[3-5]", "lr-2", "lr-1"]
    assert printed(capsys, "pause", "lr") == "lr-1 is paused\nlr-2 is paused\n"
    paused = json.loads(printed(capsys, "ps", "--phase", "paused", "--json"))["jobs"]
    assert {(job["array"], job["at_most"]) for job in paused} == {("lr", 2)}
    assert len(printed(capsys, "resume", "lr").splitlines()) == 2
    assert [line.split()[-1] for line in printed(capsys, "cancel", "lr").splitlines()] == ["cancelled"] * 5
    assert "there is no job 'lr-9'" in run_err(capsys, "cancel", "lr-9")


def test_ps_shows_priorities_and_deadlines_where_there_are_some(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["submit", "-d", job_file(served, "a")])
    run(["submit", "-d", job_file(served, "b", more='priority = "high"\ndeadline = 2999-01-01T00:00:00')])
    capsys.readouterr()
    head, *rows = printed(capsys, "ps").splitlines()
    assert head.split()[-2:] == ["PRIORITY", "DEADLINE"]
    assert "high" in rows[0]
    assert " in " in rows[0]
    assert rows[1].endswith("normal")


def test_ps_and_top_show_processes_that_are_no_jobs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    seen = OutsidersSeen(DeviceId(1), (ForeignProcess(4123, "ben", "python", 3 << 30),))
    served.do(served.reception.office.loop.apply(seen))
    run(["submit", "-d", job_file(served, "a", "b")])
    capsys.readouterr()
    lines = printed(capsys, "ps").splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["b", "owner", "waiting"], ["a", "owner", "running"]]
    assert lines[-3:-2] == ["not carpool's:"]
    assert lines[-1].split() == ["cpu:1", "4123", "ben", "python", "3.0", "GiB", "kept", "free", "for", "it"]
    (outsider,) = json.loads(printed(capsys, "ps", "--json"))["outsiders"]
    assert (outsider["pid"], outsider["device"]) == (4123, "cpu:1")
    assert "(process 4123 ben)" in printed(capsys, "top", "--once")
    assert "is left to process 4123 of ben" in printed(capsys, "why", "b")


def submitted_and_watched(
    served: Served, capsys: pytest.CaptureFixture[str], *words: str, end: object
) -> tuple[int, str]:
    """Submit in a thread, let the jobs print and end, and see how the command ended."""
    codes: list[int] = []
    watching = Thread(target=lambda: codes.append(run(["submit", *words])))
    watching.start()
    feed = served.reception.office.read_model.events.feed

    async def happen() -> None:
        async for event in feed.listen(0):
            if event.kind == "decision":
                break
        for name in ("a", "b"):
            write_log(served, name, "one\ntwo\n")
        if end is not None:
            served.reception.office.machine.say(Facts((end,)))  # type: ignore[arg-type]
        await served.reception.office.settle(1000.0)

    served.do(happen())
    watching.join(30)
    return codes[0], capsys.readouterr().out


def test_submit_shows_the_log_and_ends_as_the_job_ends(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert submitted_and_watched(served, capsys, job_file(served, "a"), end=None) == (0, "one\ntwo\n")


def test_a_failed_commands_code_is_submits_code(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    end = JobFailed(JobId("a"), 1, "the command ended with exit code 7")
    assert submitted_and_watched(served, capsys, job_file(served, "a"), end=end) == (7, "one\ntwo\n")


def pressed(seconds: float) -> None:
    """What a wait comes to when somebody presses Ctrl-C."""
    raise KeyboardInterrupt


def test_who_leaves_a_submission_is_told_how_to_end_its_jobs(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.cli.verbs.submit.time.sleep", pressed)
    assert run(["submit", job_file(served, "a", "b")]) == 130
    assert "the jobs go on; end them with: carpool cancel a b" in capsys.readouterr().err


def test_top_is_left_by_ctrl_c(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.cli.verbs.status.time.sleep", pressed)
    assert run(["top"]) == 0
    assert capsys.readouterr().err == ""


def test_several_jobs_are_told_apart(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = submitted_and_watched(served, capsys, job_file(served, "a", "b"), end=None)
    assert (code, sorted(text.splitlines())) == (0, ["a | one", "a | two", "b | one", "b | two"])


def test_logs_are_printed_and_followed(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    run(["submit", "-d", job_file(served, "a")])
    write_log(served, "a", "one\ntwo\n")
    capsys.readouterr()
    assert printed(capsys, "logs", "a") == "one\ntwo\n"
    assert printed(capsys, "logs", "a", "--tail", "4") == "two\n"
    served.do(served.reception.office.settle(1000.0))
    assert json.loads(printed(capsys, "logs", "a", "--json"))["is_over"] is True


def test_stories_reasons_and_files_come_from_the_daemon_where_it_has_the_job(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CARPOOL_STATE", str(served.reception.office.read_model.state))
    monkeypatch.chdir(tmp_path)
    run(["submit", "-d", job_file(served, "a")])
    write_log(served, "a", "one\n")
    capsys.readouterr()
    assert "was submitted" in printed(capsys, "explain", "a")
    assert printed(capsys, "why", "a").startswith("now: a holds 1 device")
    assert printed(capsys, "get", "a", "--out", "copy") == "copy/log\n"
    assert (tmp_path / "copy" / "log").read_text(encoding="utf-8") == "one\n"
    assert "job 'none', and there are no runs" in run_err(capsys, "explain", "none")


def test_without_a_daemon_verbs_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARPOOL_SERVER", f"unix:{tmp_path}/none")
    (tmp_path / "jobs.toml").write_text('[[job]]\nname = "a"\ncommand = ["true"]\n', encoding="utf-8")
    assert run(["submit", str(tmp_path / "jobs.toml")]) == 125
    assert run(["submit", str(tmp_path / "none.toml")]) == 2
    capsys.readouterr()
    assert run(["ps"]) == 2
    words = f"no daemon answers at unix:{tmp_path}/none: No such file or directory. Start one with: carpool serve"
    assert capsys.readouterr().err == f"carpool: {words}\n"


def test_tokens_are_made_listed_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ("--state", str(tmp_path))
    token = printed(capsys, "token", "add", "ada", "--role", "admin", *state).strip()
    assert token.startswith("carpool_")
    listed = printed(capsys, "token", "list", *state)
    assert listed.splitlines()[1].split()[:3] == ["ada-1", "ada", "admin"]
    assert token not in listed
    assert printed(capsys, "token", "remove", "ada-1", *state) == "ada-1 is removed\n"
    assert printed(capsys, "token", "list", *state) == "no tokens\n"
    assert "unknown token" in run_err(capsys, "token", "remove", "ada-1", *state)


def test_settings_are_shown_with_where_they_are_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CARPOOL_PORT", "8000")
    monkeypatch.setenv("CARPOOL_TOKEN", "carpool_secret")
    text = printed(capsys, "config", "show")
    assert [line.split()[1:4] for line in text.splitlines() if line.startswith("port")] == [
        ["8000", "environment", "CARPOOL_PORT"]
    ]
    shown = json.loads(printed(capsys, "config", "show", "--json"))
    assert {row["name"]: row["from"] for row in shown["settings"]}["host"] == "default"
    assert "carpool_secret" not in text + json.dumps(shown)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "_CARPOOL_COMPLETE" in printed(capsys, "completion", shell)


def test_names_of_jobs_are_completed(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["submit", "-d", job_file(served, "mlp", "cnn")])
    capsys.readouterr()
    monkeypatch.setenv("_CARPOOL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "carpool cancel m")
    monkeypatch.setenv("COMP_CWORD", "2")
    run([])
    assert capsys.readouterr().out == "plain,mlp\n"


def test_a_name_that_is_nearly_one_is_asked_back(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    run(["submit", "-d", job_file(served, "mlp-wide")])
    assert "there is no job 'mlp-wid'. Did you mean mlp-wide?" in run_err(capsys, "pause", "mlp-wid")
    assert "there is no job 'x'. All there are: carpool ps --all" in run_err(capsys, "pause", "x")
    assert "there is no job 'mlp-wid'. Did you mean mlp-wide?" in run_err(capsys, "logs", "mlp-wid")


def test_the_policy_is_told_and_changed(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "policy") == "fifo decides\n"
    assert printed(capsys, "policy", "las") == "las decides from now on\n"
    assert json.loads(printed(capsys, "policy", "--json"))["policy"] == "las"
    assert "Did you mean las" in run_err(capsys, "policy", "lass")


def test_figures_that_no_job_can_have_are_named_with_what_there_is(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["submit", "-d", job_file(served, "a")])
    for weight in ("-3", "0", "2e6"):
        assert f"{float(weight)} is not in the range 1e-06<=x<=1000000.0" in run_err(capsys, "weight", "a", weight)
    assert "invalid value for 'MOST': 1 is less than 9, the least. See: carpool limit --help" in run_err(
        capsys, "limit", "a", "9", "1"
    )
