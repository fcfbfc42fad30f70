"""Saved profiles: found by entry and arguments, doubted where something has changed, written back by runs."""

import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.backends.profile_learner import StepSetting, StepTimes, updated_profile
from carpool.backends.profile_library import ProfileLibrary, profile_path, save_profile
from carpool.core.model import JobId, Kind
from carpool.core.topology import Placement
from carpool.jobs.entry_file import source_digest
from carpool.jobs.program import Program
from carpool.predictors.profiles.profile import Costs, Measurement, Profile, write_profile
from carpool.runtime.executor.reports import Sized

ONE = Placement(((Kind("cpu1"), 1),))


@pytest.fixture
def program(tmp_path: Path) -> Program:
    (tmp_path / "net.py").write_text("def net(lr=0.1): ...\n")
    return Program("net.py:net", {"lr": 0.2}, folder=str(tmp_path))


@pytest.fixture
def profile(program: Program, tmp_path: Path) -> Profile:
    source = source_digest(program.entry, tmp_path)
    seen = (Measurement("cpu1", 1, 8, step_s=0.1, peak_bytes=100, device_use=0.5),)
    return Profile("net.py:net", {"lr": 0.2}, source, 8, 80, 50, None, seen, machine=platform.node())


def test_a_profile_is_found_by_entry_and_arguments(program: Program, profile: Profile, tmp_path: Path) -> None:
    root = tmp_path / "root"
    save_profile(profile, profile_path(profile, root / "profiles"))
    shelf = ProfileLibrary(root)
    found = shelf.belief(program)
    assert found is not None
    assert (found.profile, found.doubt) == (profile, "")
    assert shelf.belief(replace(program, args={})) is None
    assert shelf.belief(Program(command=("ls",))) is None
    save_profile(replace(profile, measurements=()), profile_path(profile, root / "profiles"))
    assert ProfileLibrary(root).belief(program) is None  # nothing was measured
    assert profile_path(profile).name.startswith("net-net-")


def test_another_file_or_machine_is_a_reason_to_doubt(program: Program, profile: Profile, tmp_path: Path) -> None:
    save_profile(replace(profile, machine="elsewhere"), profile_path(profile, tmp_path / "profiles"))
    (tmp_path / "net.py").write_text("def net(lr=0.1): pass\n")
    found = ProfileLibrary(tmp_path).belief(program)
    assert found is not None
    assert found.doubt == "of an older file on another machine"


def test_made_profiles_come_before_those_of_runs_and_damaged_ones_count_for_nothing(
    program: Program, profile: Profile, tmp_path: Path
) -> None:
    older, by_run = (tmp_path / "runs" / run / "jobs" / "a" / "profile.json" for run in ("z", "jobs"))
    write_profile(profile, older)
    os.utime(older, (0, 0))
    write_profile(replace(profile, version="run"), by_run)
    damaged = tmp_path / "profiles" / "x.json"
    damaged.parent.mkdir()
    damaged.write_text("{")
    found = ProfileLibrary(tmp_path).find(program.entry, program.args)
    assert found is not None
    assert found[1] == by_run
    made = save_profile(profile, profile_path(profile, tmp_path / "profiles"))
    os.utime(made, (0, 0))  # older, and still first
    found = ProfileLibrary(tmp_path).find(program.entry, program.args)
    assert found is not None
    assert found[1] == made


def test_jobs_of_the_same_training_learn_from_each_other(program: Program, profile: Profile, tmp_path: Path) -> None:
    """Two jobs of one run, one on each kind of device, each with a profile of its own."""
    newest, older, elsewhere = (tmp_path / "runs" / "r" / "jobs" / job / "profile.json" for job in "abc")
    two = Measurement("cpu2", 1, 8, step_s=0.3)
    write_profile(replace(profile, end_s=4.0), newest)
    same_but_slower = replace(profile.measurements[0], step_s=9.0)
    write_profile(replace(profile, measurements=(same_but_slower, two), start_s=2.0, end_s=5.0), older)
    write_profile(replace(profile, measurements=(Measurement("cpu4", 1, 8, step_s=1.0),), machine="other"), elsewhere)
    for age, path in enumerate((newest, older, elsewhere)):
        os.utime(path, (1000 - age, 1000 - age))
    found = ProfileLibrary(tmp_path).find(program.entry, program.args)
    assert found is not None
    assert found[1] == newest
    assert {each.kind: each.step_s for each in found[0].measurements} == {"cpu1": 0.1, "cpu2": 0.3}
    assert found[0].costs == Costs(2.0, None, 4.0)


def times(step_s: float, steps: int = 10) -> StepTimes:
    timed = StepTimes()
    timed.add(steps, steps * step_s)
    return timed


SIZED = Sized(JobId("a"), 50, 8, 80)


def test_a_run_writes_down_how_fast_it_was_and_what_moves_cost(program: Program, profile: Profile) -> None:
    two, shared = Placement(((Kind("cpu1"), 2),)), Placement(((Kind("cpu1"), 1),), 0.5)
    unlike = Placement(((Kind("cpu1"), 1), (Kind("cpu2"), 1)))
    timed = {
        StepSetting(ONE): times(0.05),
        StepSetting(two): times(0.04),
        StepSetting(shared, ("dir/other.py:main",)): times(0.2),
        StepSetting(shared, ("a", "b")): times(9.0),  # a profile has no words for two neighbours,
        StepSetting(unlike): times(9.0),  # or unlike devices
    }
    new = updated_profile(None, program, SIZED, timed, Costs(0.5, None, 0.25))
    assert (new.key, new.total_steps(), new.costs) == (profile.key, 50, Costs(0.5, None, 0.25))
    seen = [(each.devices, each.share, each.beside, each.step_s) for each in new.measurements]
    assert seen == [(1, 1.0, "", 0.05), (2, 1.0, "", 0.04), (1, 0.5, "other.py:main", 0.2)]


def test_what_was_known_counts_by_its_steps_and_keeps_what_only_a_profiler_sees(
    program: Program, profile: Profile
) -> None:
    (first,) = profile.measurements
    before = replace(profile, measurements=(replace(first, steps=30),), start_s=7.0, resize_s=3.0)
    kept = updated_profile(before, program, SIZED, {StepSetting(ONE): times(0.02, 10)}, Costs(start_s=1.0))
    (each,) = kept.measurements
    assert each.step_s == pytest.approx(0.08)
    assert (each.steps, each.peak_bytes) == (40, 100)
    assert kept.costs == Costs(1.0, 3.0, None)


def test_a_profile_of_another_file_is_not_mixed_with_this_one(program: Program, profile: Profile) -> None:
    old = replace(profile, source="older", start_s=9.0)
    new = updated_profile(old, program, SIZED, {StepSetting(ONE): times(0.05)}, Costs())
    assert (new.measurements[0].peak_bytes, new.start_s) == (None, None)
