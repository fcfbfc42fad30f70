"""Profile store: seeds the estimator with saved profiles and writes back what jobs measured.

Profiles are not part of recovery: without them a daemon decides as at its very first start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from carpool.backends.online_estimator import OnlineEstimator
from carpool.backends.profile_learner import ProfileLearner
from carpool.backends.profile_library import PROFILES, as_belief, entry_profile_path, merge_profiles
from carpool.backends.run_folder import BELIEVED, PROFILE, RunFolder
from carpool.core.errors import InputError
from carpool.core.model import JobId
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.predictors.profiles.profile import Profile, read_profile, write_profile
from carpool.predictors.profiles.rate_model import ProfileRateModel

PROFILE_FOLDER = "profiles"  # in the daemon's state folder
_MAX_CACHED = 2000  # profiles


class ProfileSource(Protocol):
    """Source and destination of jobs' profiles."""

    def belief(self, job: ListedJob) -> ProfileRateModel | None:
        """What is known about a job before it runs."""

    def saved(self, job: JobId, program: Program) -> Profile | None:
        """The profile to add measurements to."""

    def save(self, job: JobId, program: Program, profile: Profile) -> None: ...


class ProfileStore:
    """Seeds an estimator with known profiles, and saves the measurements of a learner."""

    def __init__(self, source: ProfileSource, learner: ProfileLearner, estimator: OnlineEstimator) -> None:
        self._source = source
        self._learner = learner
        self._estimator = estimator

    def introduce(self, jobs: Iterable[ListedJob]) -> None:
        """Seed the estimator; unreadable profiles are skipped."""
        for job in jobs:
            with contextlib.suppress(OSError, InputError):
                belief = self._source.belief(job)
                if belief is not None:
                    self._estimator.believe(job.spec, belief)

    def save(self, job: JobId, program: Program | None) -> None:
        """Save the measurements of a job; skipped if the disk is full."""
        if program is None or not program.entry:
            return
        with contextlib.suppress(OSError, InputError):
            profile = self._learner.profile(job, program, self._source.saved(job, program))
            if profile is not None:
                self._source.save(job, program, profile)

    def close(self, job: JobId, program: Program | None) -> None:
        self.save(job, program)
        self._learner.forget(job)


class SharedProfiles:
    """One profile for each entry and its arguments, in the state folder; ``carpool profile``'s are read too."""

    def __init__(self, state: Path) -> None:
        self._folder = state / PROFILE_FOLDER
        self._cache: dict[Path, tuple[int, Profile | None]] = {}  # with the modification time

    def belief(self, job: ListedJob) -> ProfileRateModel | None:
        program = job.program
        if not program.entry:
            return None
        folders = (self._folder, Path(program.folder) / PROFILES)
        found = [self._profile(entry_profile_path(program.entry, program.args, folder)) for folder in folders]
        profile = merge_profiles([each for each in found if each is not None])
        return None if profile is None else as_belief(profile, program)

    def saved(self, job: JobId, program: Program) -> Profile | None:
        return self._profile(self._path(program))

    def save(self, job: JobId, program: Program, profile: Profile) -> None:
        write_profile(profile, self._path(program))

    def _path(self, program: Program) -> Path:
        return entry_profile_path(program.entry, program.args, self._folder)

    def _profile(self, path: Path) -> Profile | None:
        """A profile; None where it is missing or damaged."""
        try:
            written = path.stat().st_mtime_ns
        except OSError:
            return None
        if path not in self._cache or self._cache[path][0] != written:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            self._cache[path] = (written, _read(path))
        return self._cache[path][1]


class RunProfiles:
    """Profiles in the job folders of a run: those it started with, and those it measured."""

    def __init__(self, folder: RunFolder, beliefs: Mapping[JobId, ProfileRateModel]) -> None:
        self._folder = folder
        self._beliefs = beliefs

    def write_beliefs(self) -> None:
        for job, belief in self._beliefs.items():
            with contextlib.suppress(InputError):  # a full disk does not fail the run
                write_profile(belief.profile, self._folder.job(job) / BELIEVED)

    def belief(self, job: ListedJob) -> ProfileRateModel | None:
        return self._beliefs.get(job.spec.id)

    def saved(self, job: JobId, program: Program) -> Profile | None:
        belief = self._beliefs.get(job)
        return _read(self._folder.job(job) / PROFILE) or (None if belief is None else belief.profile)

    def save(self, job: JobId, program: Program, profile: Profile) -> None:
        write_profile(profile, self._folder.job(job) / PROFILE)


def _read(path: Path) -> Profile | None:
    try:
        return read_profile(path) if path.is_file() else None
    except InputError:
        return None
