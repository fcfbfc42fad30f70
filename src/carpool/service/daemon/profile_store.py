"""Profile store: seeds the estimator with saved profiles and writes back what finished jobs measured.

Profiles lie beside the journal, one file for every entry with its arguments. They are no part of what is recovered: a
daemon without them decides as well as it did on its first day. Profiles that ``carpool profile`` saved in the folder of
a job are believed too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from carpool.backends.online_estimator import OnlineEstimator
from carpool.backends.profile_learner import ProfileLearner
from carpool.backends.profile_library import PROFILES, as_belief, entry_profile_path, merge_profiles, save_profile
from carpool.core.errors import InputError
from carpool.core.model import Job, JobId
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.predictors.profiles.profile import Profile, read_profile

PROFILE_FOLDER = "profiles"  # in the daemon's folder
_MOST_READ = 2000  # profiles that are remembered; the rest is read again when it is asked for


class ProfileStore:
    """Lets an estimator begin with what is known of a job, and writes down what was learned of it."""

    def __init__(self, state: Path, lessons: ProfileLearner, live: OnlineEstimator) -> None:
        self._folder = state / PROFILE_FOLDER
        self._lessons = lessons
        self._live = live
        self._read: dict[Path, tuple[int, Profile | None]] = {}  # by path: when it was written, and what it says

    def introduce(self, jobs: Iterable[ListedJob]) -> None:
        """Believe of jobs what is known of their trainings; of one whose file cannot be read, nothing."""
        for spec, program in jobs:
            with contextlib.suppress(OSError, InputError):
                found = self._known(program)
                belief = None if found is None else as_belief(found, program)
                if belief is not None:
                    self._live.believe(spec, belief)

    def go_on_with(self, jobs: Mapping[JobId, Job], programs: Mapping[JobId, Program]) -> None:
        """The same of jobs that an earlier daemon took in and that are not over; they are followed from here on."""
        self.introduce(ListedJob(job.spec, programs[job.id]) for job in jobs.values() if job.id in programs)
        self._lessons.go_on_with(jobs)

    def keep(self, job: JobId, program: Program | None) -> None:
        """Write down what was learned of a job; a full disk takes nothing from the job itself."""
        if program is None or not program.entry:
            return
        place = entry_profile_path(program.entry, program.args, self._folder)
        with contextlib.suppress(OSError, InputError):
            profile = self._lessons.profile(job, program, self._profile(place))
            if profile is not None:
                save_profile(profile, place)

    def close(self, job: JobId, program: Program | None) -> None:
        """A job is over: keep what was learned, and follow it no longer."""
        self.keep(job, program)
        self._lessons.forget(job)

    def _known(self, program: Program) -> Profile | None:
        """What was learned here, with what somebody has measured on purpose."""
        if not program.entry:
            return None
        folders = (self._folder, Path(program.folder) / PROFILES)
        found = [self._profile(entry_profile_path(program.entry, program.args, folder)) for folder in folders]
        return merge_profiles([profile for profile in found if profile is not None])

    def _profile(self, path: Path) -> Profile | None:
        """One profile; a damaged one is as good as none, because nobody asked for it by name."""
        try:
            written = path.stat().st_mtime_ns
        except OSError:
            return None
        if path not in self._read or self._read[path][0] != written:
            if len(self._read) >= _MOST_READ:
                self._read.clear()
            self._read[path] = (written, _read(path))
        return self._read[path][1]


def _read(path: Path) -> Profile | None:
    try:
        return read_profile(path)
    except InputError:
        return None
