"""State folders that carpool 0.1 wrote can be read, resumed and opened."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from carpool.backends.executors import LOCAL
from carpool.backends.run_folder import RunFolder
from carpool.cli.main import run
from carpool.core.messages import Assign
from carpool.core.model import JobId, Phase
from carpool.jobs.devices import LocalDevice, parse_devices
from carpool.service.daemon.batch_run import BatchRun, RunEnd, RunRequest
from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions
from carpool.service.store.journal_file import import_legacy_journal, is_unfinished, read_run_journal
from carpool.service.store.store import DATABASE, ExecutorMark, Store, has_store
from tests.support.fake_executor import FakeExecutor

DATA = Path(__file__).parents[2] / "data" / "state-0.1"
TWO = tuple(parse_devices("cpu:2", cores=(0, 1), gpus=()))
SHORT, LONG, ECHO = map(JobId, ("short", "long", "echo"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the data, to stand in: a run and a daemon that were interrupted in the middle of `long`."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
    (tmp_path / "train.py.txt").rename(tmp_path / "train.py")
    settings = tmp_path / "run" / "run.json"
    settings.write_text(settings.read_text(encoding="utf-8").replace("@FOLDER@", str(tmp_path)), encoding="utf-8")
    return tmp_path


def test_the_verbs_read_a_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "short", "--run", "run", "--json"]) == 0
    story = [line["what"] for line in json.loads(capsys.readouterr().out)["story"]]
    assert "finished" in story
    assert any("ready after" in what for what in story), "what the executor told is in it"
    assert run(["why", "long", "--run", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["why"]
    assert run(["replay", "run", "--json"]) == 0
    assert {job["name"] for job in json.loads(capsys.readouterr().out)["jobs"]} == {"short", "echo"}
    assert run(["get", "echo", "--run", "run", "--out", "taken"]) == 0
    assert (home / "taken" / "log").read_text() == "hello\n"
    assert not has_store(home / "run"), "reading changes nothing"


def test_a_run_is_resumed(home: Path) -> None:
    folder = RunFolder(home / "run")
    assert is_unfinished(folder)
    settings = folder.settings()
    machine = FakeExecutor({"long": 400}, start=100.0, kept={LONG: 43.0})

    async def start(devices: Sequence[LocalDevice], state: Path) -> FakeExecutor:
        return machine

    request = RunRequest(settings.name, settings.jobs, settings.devices, settings.policy, "0.2")
    sitting = BatchRun.open(request, folder, start, lambda at, begun_at: machine)
    try:
        assert asyncio.run(sitting.run()) is RunEnd.DONE
    finally:
        sitting.close()
    assert machine.introduced == {"long": True}
    assert [order.job for order in machine.orders if isinstance(order, Assign)] == ["long"]
    accounts = sitting.accounting.accounts
    assert {name: account.phase for name, account in accounts.items()} == dict.fromkeys(
        (SHORT, LONG, ECHO), Phase.FINISHED
    )
    outcome = accounts[SHORT].outcome
    assert outcome == folder.outcome(SHORT)
    assert outcome is not None
    assert outcome.steps == 20
    assert not is_unfinished(folder)
    assert len(read_run_journal(folder)[1]) > 5


def test_an_import_that_was_cut_short_is_made_again(home: Path) -> None:
    folder = RunFolder(home / "run")
    before = read_run_journal(folder)
    (home / "run" / DATABASE).write_bytes(b"half")  # moved in before the log, which says that the store is complete
    (home / "run" / "import.part").mkdir()
    import_legacy_journal(folder)
    assert read_run_journal(folder) == before
    with closing(Store.open(folder.path, before[0])) as store:
        assert store.findings.messages() == ()
        assert set(next(iter(store.entries())).details) == {"short", "long", "echo"}


def test_a_daemon_opens_its_state(home: Path) -> None:
    options = DaemonOptions(home / "daemon", TWO, "0.2")
    for _ in range(2):  # the second time it is a store of this version
        daemon = DaemonInstance.open(options)
        try:
            assert daemon.notices == []
            assert set(daemon.scheduler.jobs) == {LONG}
            assert daemon.scheduler.jobs[LONG].done == 49.0
            assert dict(daemon.scheduler.ended) == {SHORT: Phase.FINISHED, ECHO: Phase.FINISHED}
            assert daemon.recovered.programs[LONG].args == {"steps": 400, "pause": 0.05}
            assert daemon.store.mark.of(LOCAL) == ExecutorMark(1, daemon.store.mark.of(LOCAL).heard)
            assert daemon.store.mark.of(LOCAL).heard > 5
            outcome = daemon.observers.accounting.accounts[SHORT].outcome
            assert outcome is not None
            assert outcome.steps == 20
        finally:
            daemon.close()
