"""The verb demo: simulated, and the real one on a pretended machine."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from carpool.backends.executors import ExecutorPort
from carpool.cli.main import run
from carpool.cli.support import demo_by_hand
from carpool.cli.support.demo_by_hand import HandRun, run_at_once, run_in_turn
from carpool.cli.support.demo_runs import JOBS, demo_jobs, show_live_demo
from carpool.core.errors import CarpoolError
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice, parse_devices
from carpool.runtime.executor.reports import Outcome, Report
from tests.support.fake_executor import FakeExecutor

TWO = parse_devices("cpu:2", cores=(0, 1), gpus=())


def test_the_simulated_one_leaves_a_page_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--simulated", "--out", str(tmp_path / "shown"), "--jobs", "60"]) == 0
    assert {path.name for path in (tmp_path / "shown").iterdir()} == {"demo.csv", "demo.html", "demo.svg"}
    printed = capsys.readouterr().out
    assert "60/60" in printed


def by_hand(devices: Sequence[LocalDevice], effort: float) -> dict[str, HandRun]:
    return {"one after another": HandRun({"mlp": 10.0, "cnn": 30.0})}


async def start(devices: Sequence[LocalDevice], state: Path) -> ExecutorPort:
    return FakeExecutor(dict.fromkeys(JOBS, 10), at_once=True)


def test_the_real_one_compares_and_leaves_timelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # a second demo takes the place of the first
        assert show_live_demo(tmp_path, TWO, start, quiet=True, by_hand=by_hand) == 0
    printed = capsys.readouterr().out
    assert printed.count("identical, bit for bit") == 8
    assert re.search(r"plain PyTorch, one after another +30\.0 s +20\.0 s", printed)
    svg = (tmp_path / "demo.svg").read_text(encoding="utf-8")
    assert all(word in svg for word in ("one after another", "shared", "cpu:1", *JOBS))
    assert "shared" in (tmp_path / "demo.html").read_text(encoding="utf-8")


class Careless(FakeExecutor):
    """Trains one job to other weights."""

    def say(self, report: Report) -> None:
        if isinstance(report, Outcome) and report.job == "cnn":
            report = Outcome(JobId("cnn"), 10, 1, 0.1, {}, "another digest")
        super().say(report)


def test_other_weights_are_told_and_are_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def first_well(devices: Sequence[LocalDevice], state: Path) -> ExecutorPort:
        kind = FakeExecutor if state.name == "one-after-another" else Careless
        return kind(dict.fromkeys(JOBS, 10), at_once=True)

    assert show_live_demo(tmp_path, TWO, first_well, quiet=True, by_hand=by_hand) == 1
    assert capsys.readouterr().out.count("DIFFERENT") == 1


@pytest.mark.parametrize("way", [run_in_turn, run_at_once])
def test_baselines_train_every_job_in_plain_processes(way: Callable[..., HandRun]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    ends = way(("mlp", "cnn"), ["cpu"], 1, 1).ends_s
    assert list(ends) == ["mlp", "cnn"]
    assert min(ends.values()) > 0.0
    assert way is run_at_once or ends["cnn"] > ends["mlp"]


def test_an_attempt_that_is_slower_than_the_one_before_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from carpool.runtime import demo_trainings

    told: list[dict[str, object]] = []
    monkeypatch.setattr(demo_trainings, "_say", told.append)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    demo_trainings.train_by_hand(("mlp",), "cpu", 1, 10**9, {"mlp": 0.0})  # would take years
    assert [message.get("job") for message in told] == [None, "mlp"]


def test_a_baseline_that_fails_is_an_error() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(CarpoolError):
        run_in_turn(("unknown",), ["cpu"], 1, 1)


@pytest.mark.parametrize(("devices", "shards", "widest"), [(1, 2, 1), (2, 2, 2), (3, 4, 3), (4, 4, 4), (16, 8, 8)])
def test_jobs_may_use_what_their_shards_allow(devices: int, shards: int, widest: int) -> None:
    for rigid in (True, False):
        for spec, program in demo_jobs(devices, rigid=rigid):
            assert program.shards == shards
            assert (spec.narrowest, spec.widest) == (widest if rigid else 1, widest)
    assert [spec.after for spec, _ in demo_jobs(devices, rigid=True)] == [(), ("mlp",), ("cnn",), ("resnet",)]


def test_of_two_attempts_the_faster_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {1: {"a": 3.0, "b": 2.0}, 2: {"a": 1.0, "b": 5.0}}  # by number of threads

    class Attempt:
        def __init__(self, loops: demo_by_hand._Loops) -> None:
            self.loops = loops

        def __enter__(self) -> Attempt:
            return self

        def __exit__(self, *_: object) -> None: ...

        def start(self) -> None: ...

        def results(self) -> Iterator[tuple[str, float]]:
            yield from took[self.loops.threads].items()

    monkeypatch.setattr(demo_by_hand, "_Process", Attempt)
    assert demo_by_hand.run_in_turn(["a", "b"], ["cpu"], 2, None).ends_s == {"a": 1.0, "b": 3.0}
