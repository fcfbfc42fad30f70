"""Profile library: finds, merges and saves profiles on disk."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError
from carpool.core.model import JobId
from carpool.jobs.entry_file import source_digest
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.predictors.profiles.profile import (
    Profile,
    merge_measurements,
    profile_key,
    read_profile,
    short_entry,
    write_profile,
)
from carpool.predictors.profiles.rate_model import ProfileRateModel

ROOT = Path(".carpool")
PROFILES = ROOT / "profiles"
RUN_PROFILES = "runs/*/jobs/*/profile.json"  # measured by runs


class ProfileLibrary:
    """All profiles under a folder: those of ``carpool profile``, then those of runs, newest first."""

    def __init__(self, root: Path = ROOT) -> None:
        self._paths = [*_newest(root, "profiles/*.json"), *_newest(root, RUN_PROFILES)]
        self._read: dict[Path, Profile | None] = {}

    def find(self, entry: str, args: Mapping[str, Any]) -> tuple[Profile, Path] | None:
        """The first profile of an entry with these arguments, merged with others of the same file and machine."""
        key = profile_key(entry, args)
        found = [(profile, path) for path in self._paths if (profile := self._profile(path)) and profile.key == key]
        if not found:
            return None
        profile = merge_profiles([each for each, _ in found])
        assert profile is not None
        return profile, found[0][1]

    def belief(self, program: Program) -> ProfileRateModel | None:
        found = self.find(program.entry, program.args) if program.entry else None
        return None if found is None else as_belief(found[0], program)

    def beliefs(self, jobs: Sequence[ListedJob]) -> dict[JobId, ProfileRateModel]:
        found = {spec.id: self.belief(program) for spec, program in jobs}
        return {job: belief for job, belief in found.items() if belief is not None}

    def _profile(self, path: Path) -> Profile | None:
        """A profile; None where it is damaged."""
        if path not in self._read:
            try:
                self._read[path] = read_profile(path)
            except InputError:
                self._read[path] = None
        return self._read[path]


def merge_profiles(found: Sequence[Profile]) -> Profile | None:
    """The first of several profiles of one training, completed by others of the same file and machine."""
    alike = [each for each in found if (each.source, each.machine) == (found[0].source, found[0].machine)]
    return reduce(_with, alike) if alike else None


def as_belief(profile: Profile, program: Program) -> ProfileRateModel | None:
    """The rate model of a profile, with its doubts (older file, other machine); None without measurements."""
    doubts = []
    if profile.source and profile.source != source_digest(program.entry, Path(program.folder)):
        doubts.append("of an older file")
    if profile.machine and profile.machine != platform.node():
        doubts.append("on another machine")
    belief = ProfileRateModel.of(profile, doubt=" ".join(doubts), exact=program.exact)
    return belief if belief.kinds else None


def _with(first: Profile, other: Profile) -> Profile:
    measurements = merge_measurements(other.measurements, first.measurements)
    start_s, resize_s, end_s = first.costs.over(other.costs)
    noise = first.noise or other.noise
    return replace(first, measurements=measurements, noise=noise, start_s=start_s, resize_s=resize_s, end_s=end_s)


def profile_path(profile: Profile, folder: Path = PROFILES) -> Path:
    """The path of a profile."""
    return entry_profile_path(profile.entry, profile.args, folder)


def entry_profile_path(entry: str, args: Mapping[str, Any], folder: Path = PROFILES) -> Path:
    """The path of an entry's profile: its readable name and its key."""
    readable = re.sub(r"[^\w.]+", "-", short_entry(entry).replace(".py:", "-")).strip("-")
    return folder / f"{readable}-{profile_key(entry, args)}.json"


def save_profile(profile: Profile, path: Path | None = None) -> Path:
    """Write a profile to its default path or another one. Returns the path."""
    path = path or profile_path(profile)
    write_profile(profile, path)
    return path


def _newest(root: Path, pattern: str) -> list[Path]:
    return sorted(root.glob(pattern), key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)
