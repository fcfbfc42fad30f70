"""Progress in a growing log."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from carpool.jobs.progress_pattern import Progress, ProgressPattern
from carpool.runtime.process.progress_reader import LogTail, ProgressMeter, _found, _stop_match
from carpool.runtime.process.protocol import ProgressFound


def test_only_complete_lines_are_read_and_a_bar_ends_its_lines_with_a_carriage_return(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = LogTail(log, 4)
    assert tail.lines() == []
    log.write_bytes(b"old\none\rtw")
    assert tail.lines() == [b"one"]
    with log.open("ab") as file:
        file.write(b"o\n\xff" + b"x" * 3_000_000)
    lines = tail.lines()
    assert lines == []  # the newest megabyte has no end of line
    log.write_bytes(b"rotated\n")
    assert tail.lines() == [b"rotated"]


def test_rates_are_measured_and_rounds_are_added_up() -> None:
    times = iter([0.0, 1.0, 2.0, 3.0])
    meter = ProgressMeter(lambda: next(times))
    assert meter.update([Progress(10, 100, 0.5)]) == [ProgressFound(10, 100, 0.0, 0.5)]
    assert meter.update([Progress(30, 100)]) == [ProgressFound(30, 100, 20.0)]
    (third,) = meter.update([Progress(5, 100)])
    assert (third.done, third.total, third.steps_per_s > 20.0) == (105, None, True)


def test_bars_of_other_lengths_are_not_added() -> None:
    """Preparing data, then training with an evaluation and a saved model twice, as the Hugging Face trainer prints."""
    now = [0.0]
    meter = ProgressMeter(lambda: now[0])
    seen: list[ProgressFound] = []

    def look(*bars: Progress) -> None:
        now[0] += 1.0
        seen.extend(meter.update(bars))

    look(Progress(5000, 5000))
    for step in range(100, 1001, 100):
        look(Progress(step, 1000))
        if step % 500 == 0:
            look(Progress(10, 25), Progress(25, 25))
            look(Progress(0, 1), Progress(1, 1), Progress(step, 1000))
    assert seen[-1].done == 1000
    assert seen[-1].total == 1000
    counted = [each.done for each in seen if each.total == 1000]
    assert counted == sorted(counted)
    assert all(30.0 < each.steps_per_s <= 100.0 for each in seen[3:])


def test_rounds_of_nearly_the_same_length_are_added_up() -> None:
    now = [0.0]
    meter = ProgressMeter(lambda: now[0])
    seen: list[ProgressFound] = []
    for total in (100, 97, 101):
        for done in (50, total):
            now[0] += 1.0
            seen += meter.update([Progress(done, total)])
    assert seen[-1].done == 100 + 97 + 101


def test_a_pattern_that_takes_too_long_loses_the_line() -> None:
    before = signal.signal(signal.SIGALRM, _stop_match)
    try:
        pattern = ProgressPattern(r"step (\d+)|(?:a+)+b")
        assert _found(pattern, [b"step 4", b"a" * 60]) == [Progress(4)]
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("line", [b"", b"\x00" * 5000])
def test_other_lines_are_ignored(line: bytes) -> None:
    assert _found(ProgressPattern(r"step (\d+)"), [line]) == []


def test_every_loss_between_two_looks_is_found() -> None:
    lines = [f"epoch {number} loss 0.{number}".encode() for number in range(1, 4)]
    found = _found(ProgressPattern(r"epoch (?P<epoch>\d+) loss (?P<loss>\S+)"), [*lines[:2], b"saved", lines[2]])
    assert found == [Progress(1, None, 0.1), Progress(2, None, 0.2), Progress(3, None, 0.3)]
    times = iter([0.0, 1.0, 3.0])
    meter = ProgressMeter(lambda: next(times))
    meter.update(found[:1])
    assert [(each.done, each.loss) for each in meter.update(found[1:])] == [(2, 0.2), (3, 0.3)]


def test_the_progress_of_one_look_is_bounded_and_keeps_the_newest() -> None:
    found = _found(ProgressPattern(r"(\d+)"), [str(number).encode() for number in range(100)])
    assert [each.done for each in found] == list(range(92, 100))


def test_a_look_at_slow_lines_ends() -> None:
    times = iter([0.0, 0.5, 2.0])
    found = _found(ProgressPattern(r"(\d+)"), [b"1", b"2", b"3"], lambda: next(times))
    assert [each.done for each in found] == [2, 3]
