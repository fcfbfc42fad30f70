"""``carpool ps`` and ``carpool top``: listed jobs, sweeps, deadlines and foreign processes."""

import json

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

from carpool.cli.main import run
from carpool.core.messages import ForeignProcess, NodeDrained, NodeJoined, OutsidersSeen
from carpool.core.model import DeviceId, NodeId
from tests.support.cli_rig import job_file, stderr_of, stdout_of
from tests.support.http_rig import Served


def test_ps_lists_active_jobs_newest_first(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert stdout_of(capsys, "submit", "-d", job_file(served, "a", "b", "c")) == "a\nb\nc\n"
    heading, *rows = stdout_of(capsys, "ps").splitlines()
    assert heading.split() == ["JOB", "USER", "PHASE", "DEVICES", "STEP", "LOSS", "STEPS/S", "LEFT", "AGE"]
    assert [row[: heading.index("STEP")].split() for row in rows] == [
        ["c", "owner", "waiting"],
        ["b", "owner", "running", "cpu:1"],
        ["a", "owner", "running", "cpu:0"],
    ]
    stdout_of(capsys, "cancel", "a", "b")
    assert json.loads(stdout_of(capsys, "ps", "--json"))["total"] == 1
    assert len(stdout_of(capsys, "ps", "--all").splitlines()) == 4
    assert "Did you mean waiting" in stderr_of(capsys, "ps", "--phase", "wating")


def test_ps_folds_a_sweep_into_one_line_per_phase(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = "sweep = { lr = [1, 2, 3, 4, 5] }\nat_most = 2"
    names = stdout_of(capsys, "submit", "-d", job_file(served, "lr", extra=sweep)).split()
    assert names == [f"lr-{n}" for n in range(1, 6)]
    assert stdout_of(capsys, "submit", "-d", job_file(served, "lr", extra=sweep)).split()[:2] == ["lr.2-1", "lr.2-2"]
    listed = [line.split()[0] for line in stdout_of(capsys, "ps").splitlines()[1:]]
    assert listed == ["lr.2[3-5]", "lr.2[1-2]", "lr[3-5]", "lr-2", "lr-1"]


def test_ps_has_columns_for_priority_and_deadline_if_a_job_has_one(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["submit", "-d", job_file(served, "a")])
    run(["submit", "-d", job_file(served, "b", extra='priority = "high"\ndeadline = 2999-01-01T00:00:00')])
    capsys.readouterr()
    heading, first, second = stdout_of(capsys, "ps").splitlines()
    assert heading.split()[-2:] == ["PRIORITY", "DEADLINE"]
    assert "high" in first
    assert " in " in first
    assert second.endswith("normal")


def test_foreign_processes_are_listed(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    seen = OutsidersSeen(DeviceId(1), (ForeignProcess(4123, "ben", "python", 3 << 30),))
    served.do(served.rig.backend.loop.apply(seen))
    run(["submit", "-d", job_file(served, "a", "b")])
    capsys.readouterr()
    lines = stdout_of(capsys, "ps").splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["b", "owner", "waiting"], ["a", "owner", "running"]]
    assert lines[-1].split()[:6] == ["cpu:1", "4123", "ben", "python", "3.0", "GiB"]
    (process,) = json.loads(stdout_of(capsys, "ps", "--json"))["outsiders"]
    assert (process["pid"], process["device"], process["keeps_free"]) == (4123, "cpu:1", True)
    assert "(process 4123 ben)" in stdout_of(capsys, "top", "--once")
    assert "4123" in stdout_of(capsys, "why", "b")


def test_top_shows_devices_and_jobs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    run(["submit", "-d", job_file(served, "mlp")])
    text = stdout_of(capsys, "top", "--once")
    assert "1 running" in text
    assert "cpu:0" in text
    state = json.loads(stdout_of(capsys, "top", "--json"))
    assert state["active"] == len(state["jobs"]) == 1


def test_nodes_are_listed_where_there_are_several(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    loop = served.rig.backend.loop
    assert "box2" not in stdout_of(capsys, "top", "--once")
    served.do(loop.apply(NodeJoined("box2", (("cpu1", 3, 0),))))
    served.do(loop.apply(NodeDrained(NodeId(1))))
    for command in (("top", "--once"), ("ps",)):
        (row,) = [line for line in stdout_of(capsys, *command).splitlines() if "3 cpu1" in line]
        assert row.split() == ["box2", "3", "cpu1", "0", "drained"]
    assert [node["is_drained"] for node in json.loads(stdout_of(capsys, "top", "--json"))["nodes"]] == [False, True]


def test_top_shortens_long_names(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    run(["submit", "-d", job_file(served, f"{'long-' * 18}name")])
    text = stdout_of(capsys, "top", "--once")
    assert "long-long-lo…g-long-name" in text
    assert "steps/s  left" in text, "the other columns keep their width"


def test_ctrl_c_ends_top(served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("carpool.cli.verbs.status.time.sleep", interrupt)
    assert run(["top"]) == 0
    assert capsys.readouterr().err == ""


def test_hyper_parameters_are_listed(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    path = job_file(served, "a", extra="sweep = { lr = [0.1, 0.2, 0.3, 0.4] }\nat_most = 1")
    run(["submit", "-d", path, "--sweep", "lr=1,2,3,4,5"])
    capsys.readouterr()
    heading, *lines = stdout_of(capsys, "ps").splitlines()
    assert heading.endswith("PARAMETERS")
    assert [line.partition("lr=")[2] for line in lines] == ["2,3,4,…", "1"]
    listed = json.loads(stdout_of(capsys, "ps", "--json"))["jobs"]
    assert [job["params"] for job in listed][-1] == {"lr": 1}
    assert "lr=1" in stdout_of(capsys, "top", "--once")
    assert "lr=1" in stdout_of(capsys, "explain", "a-1")
