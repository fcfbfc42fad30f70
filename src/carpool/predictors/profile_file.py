"""Profiles on disk: one JSON file each, with the fitted models beside the measurements for whoever reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError
from carpool.predictors.memory import MemoryModel
from carpool.predictors.profile import Measurement, NoiseSeen, Profile

SCHEMA = 1


def write_profile(profile: Profile, path: Path) -> None:
    """Whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.part")
        draft.write_text(json.dumps(profile_to_json(profile), indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise InputError(
            f"the profile cannot be written: {error.strerror}", where=str(path), way_out="Name another place."
        ) from None


def read_profile(path: Path) -> Profile:
    """Read and check a file; the models are fitted anew."""
    try:
        return profile_from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror}", where=str(path), way_out="Make one with carpool profile."
        ) from None
    except UnicodeDecodeError:
        raise InputError("is no text", where=str(path), way_out="Make a profile with carpool profile.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"is no profile: {type(error).__name__}: {error}", where=str(path), way_out="Make one with carpool profile."
        ) from None


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """A profile as plain JSON values."""
    own = {spot.name: getattr(profile, spot.name) for spot in fields(profile) if spot.name not in _NESTED}
    return {
        "schema": SCHEMA,
        **own,
        "noise": None if profile.noise is None else asdict(profile.noise),
        "models": {kind: _models(profile, kind) for kind in profile.kinds},
        "measurements": [{**asdict(each), "samples_per_s": each.samples_per_s} for each in profile.measurements],
    }


_NESTED = ("noise", "measurements")


def _models(profile: Profile, kind: str) -> dict[str, Any]:
    step = profile.step_time(kind)
    return {
        "step_time": None
        if step is None
        else {"fixed_s": step.fixed_s_, "per_sample_s": step.per_sample_s_, "error": step.error_},
        "memory": _memory(profile.memory(kind)),
        "held": _memory(profile.held(kind)),
        "memory_limit_batch": profile.memory_limit(kind),
        "exact_price": profile.exact_price(kind),
    }


def _memory(model: MemoryModel | None) -> dict[str, Any] | None:
    if model is None:
        return None
    return {"coefficients": model.coefficients_.tolist(), "error": model.error_, "margin": model.margin_}


def profile_from_json(data: Mapping[str, Any], where: str) -> Profile:
    """The inverse of `profile_to_json`."""
    if data["schema"] > SCHEMA:
        raise InputError(
            f"schema {data['schema']} is newer than this carpool reads ({SCHEMA})", where=where, way_out="Update it."
        )
    spots = {spot.name for spot in fields(Profile)} - set(_NESTED)
    seen = {spot.name for spot in fields(Measurement)}
    return Profile(
        **{name: value for name, value in data.items() if name in spots},
        noise=None if data["noise"] is None else NoiseSeen(**data["noise"]),
        measurements=tuple(
            Measurement(**{name: value for name, value in each.items() if name in seen})
            for each in data["measurements"]
        ),
    )
