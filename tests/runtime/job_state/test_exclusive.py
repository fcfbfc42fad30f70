"""Exclusive access: for a step that ran out of memory, and for probes."""

from __future__ import annotations

import re

import pytest

from carpool.core.messages import JobFailed, ProgressReported
from carpool.runtime.job_state.actions import (
    MicroBatchLimit,
)
from carpool.runtime.process.protocol import (
    Ready,
    Stepped,
)
from tests.runtime.job_state.events import happen, options, started
from tests.runtime.job_state.harness import BATCH, TOTAL, Harness


def test_a_step_out_of_memory_is_retried_with_exclusive_access() -> None:
    harness = started(False, 0)
    happen(harness, "both", 4)
    harness.alive_workers[0].short = True
    while not harness.exclusive:
        happen(harness, "both", 1)
    assert harness.exclusive == 1
    harness.run()
    harness.check_finish()
    assert not any("micro-batches" in text for text in harness.notes)


def test_a_step_out_of_memory_with_exclusive_access_is_split_until_it_fits() -> None:
    harness = started(False, 0)
    happen(harness, "both", 6)
    step = harness.alive_workers[0].step
    harness.alive_workers[0].short_above = 10
    harness.run()
    harness.check_finish()
    assert [re.findall(r"(\d) micro-batches of (\d+)", text) for text in harness.notes if "micro" in text] == [
        [("2", "18")],
        [("4", "9")],
    ]
    splits = [what for what in harness.records if isinstance(what, MicroBatchLimit)]
    assert splits == [MicroBatchLimit(step, 18), MicroBatchLimit(step, 9)]
    assert harness.epochs[max(harness.epochs)][0].limits == ((step, 18), (step, 9))


def test_micro_batches_survive_a_resume() -> None:
    harness = Harness(options(False), micro_batch_limits=[MicroBatchLimit(3, 9)])
    harness.order(0)
    while not harness.alive_workers or harness.alive_workers[0].proceed is None:
        happen(harness, "both", 1)
    harness.run()
    assert harness.epochs[min(harness.epochs)][0].limits == ((3, 9),)
    assert not harness.notes


@pytest.mark.parametrize(
    ("exact", "batch_norm", "fits", "reason"),
    [
        (True, False, 10, "bits of an exact job: lower batch_size (36)"),
        (False, True, 10, "BatchNorm: lower batch_size (36)"),
        (False, False, 0, "Not even one sample fits"),
    ],
)
def test_a_job_that_must_not_be_split_fails_with_the_reason(
    exact: bool, batch_norm: bool, fits: int, reason: str
) -> None:
    harness = started(exact, 0)
    harness.run_actions(
        harness.machine.message(0.0, 1, Ready("initial", 64, BATCH, TOTAL, 100, has_batch_norm=batch_norm))
    )
    harness.alive_workers[0].at = "resting"
    harness.alive_workers[0].short_above = fits
    harness.run()
    assert isinstance(harness.facts[-1], JobFailed)
    error = harness.facts[-1].error
    assert all(part in error for part in ("step 1", "36 samples", "cpu:0", "2.0 GiB", "never enough"))
    assert reason in harness.facts[-1].error


def test_a_probe_is_not_measured_again_after_a_loss() -> None:
    harness = Harness(options(False))
    harness.order(0, probe=4)
    happen(harness, "both", 4)
    happen(harness, "grant", 0)
    happen(harness, "both", 4)
    harness.alive_workers[0].alive = False
    happen(harness, "both", 4)
    happen(harness, "both", 4)
    harness.run_actions(
        harness.machine.message(harness.at, harness.alive_workers[0].id, Stepped(8, 0, 0.5, 1.0, 1.0, probed=True))
    )
    harness.alive_workers[0].alive = False
    harness.run()
    assert [proceeds[0].probe for _, proceeds in sorted(harness.epochs.items())] == [4, 4, 0]
    harness.check_finish()


def test_a_probe_is_measured_with_exclusive_access() -> None:
    harness = Harness(options(False))
    harness.order(0)
    happen(harness, "both", 12)
    harness.order(0, probe=4)
    happen(harness, "both", 4)
    assert (harness.exclusive, harness.state.is_idle) == (1, True)  # it waits for them
    happen(harness, "grant", 0)
    happen(harness, "both", 2)
    assert (harness.exclusive, harness.state.is_idle) == (1, False)
    harness.run_actions(
        harness.machine.message(harness.at, harness.alive_workers[0].id, Stepped(20, 0, 0.5, 1.0, 3.0, probed=True))
    )
    assert harness.exclusive == 0
    (probe,) = [fact for fact in harness.facts if isinstance(fact, ProgressReported) and fact.alone]
    assert probe.rate == 3.0
    harness.run()
    harness.check_finish()


@pytest.mark.parametrize("instead", [(), (0,), (1,)])
def test_a_cancelled_probe_releases_the_device(instead: tuple[int, ...]) -> None:
    harness = Harness(options(False))
    harness.order(0, probe=4)
    happen(harness, "both", 4)
    assert harness.exclusive == 1
    harness.order(*instead)
    happen(harness, "both", 30)
    assert harness.exclusive == 0


def test_a_job_paused_for_a_probe_keeps_its_memory() -> None:
    harness = started(False, 0)
    happen(harness, "both", 12)
    harness.run_actions(harness.machine.pause(harness.at, paused=True, free_memory=False))
    for _ in range(12):
        happen(harness, "rounds", 1)
    assert (harness.state.is_idle, harness.state.has_released_memory) == (True, False)


def test_a_job_paused_for_memory_frees_its_own() -> None:
    harness = started(False, 0, 1)
    happen(harness, "both", 12)
    harness.run_actions(harness.machine.pause(harness.at, paused=True))
    seen: list[tuple[bool, bool]] = []  # is idle, has released its memory
    for _ in range(12):
        happen(harness, "rounds", 1)
        seen.append((harness.state.is_idle, harness.state.has_released_memory))
    assert list(dict.fromkeys(seen)) == [(False, False), (True, False), (True, True)]
    harness.run_actions(harness.machine.pause(harness.at, paused=False))
    harness.run()
    harness.check_finish()
