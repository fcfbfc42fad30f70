"""``carpool policy`` and ``carpool policies``: the daemon's policy, its fallback, and the list of policies."""

import json

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

from carpool.cli.main import run
from tests.support.cli_rig import job_file, stderr_of, stdout_of
from tests.support.http_rig import Served

FAILING_POLICY = """
from dataclasses import dataclass
from carpool.policies.baselines.nonpreemptive import Fifo


@dataclass(frozen=True)
class Mine(Fifo):
    def plan(self, view):
        return super().plan(view) if len(view.jobs) < 2 else {}["two"]
"""


def test_show_and_change(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert stdout_of(capsys, "policy") == "policy fifo\n"
    assert "las" in stdout_of(capsys, "policy", "las")
    assert json.loads(stdout_of(capsys, "policy", "--json"))["policy"] == "las"
    assert "Did you mean las" in stderr_of(capsys, "policy", "lass")


def test_a_policy_that_fails_is_replaced_and_its_error_is_shown(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    path = served.rig.folder / "mine.py"
    path.write_text(FAILING_POLICY, encoding="utf-8")
    stdout_of(capsys, "policy", f"{path}:Mine")
    stdout_of(capsys, "submit", "-d", job_file(served, "a", "b"))
    error = "KeyError: 'two' (mine.py, line 9)"
    first, second = stdout_of(capsys, "policy").splitlines()
    assert first == "policy fifo:bypass=true"
    assert error in second
    assert error in json.loads(stdout_of(capsys, "policy", "--json"))["fault"]
    assert error in stdout_of(capsys, "why", "a")
    assert error in stderr_of(capsys, "policy", f"{path}:Mine")


def test_policies_lists_all_and_describes_one(capsys: pytest.CaptureFixture[str]) -> None:
    names = [row["name"] for row in json.loads(stdout_of(capsys, "policies", "--json"))["policies"]]
    assert names == sorted(names)
    assert "fifo" in names
    assert "bypass=false" in stdout_of(capsys, "policies", "fifo")
    described = stdout_of(capsys, "policies", "las").splitlines()
    assert not any(line.startswith(" ") for line in described[:4]), "the docstring's indentation is removed"
    assert run(["policies", "fifa"]) == 2
