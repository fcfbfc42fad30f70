"""What a state was made for: another training cannot go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from carpool.runtime.errors import CheckpointError
from carpool.runtime.training import Training


def made_for(training: Training, *, seed: int, shards: int | None, scaled: bool) -> dict[str, Any]:
    """What a state of a training says of it."""
    return {
        "seed": seed,
        "shards": shards,
        "num_samples": training.num_samples,
        "optimizer": type(training.optimizer).__name__,
        "schedule": None if training.schedule is None else type(training.schedule).__name__,
        "scaled": scaled,
        "state": sorted(training.state),
    }


def check_state(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a state of another version of carpool, or of another training than is wanted."""
    schema = state.get("schema")
    if schema != 1:
        raise CheckpointError(f"the state has schema {schema!r}; this version of carpool reads 1")
    for name, here in wanted.items():
        there = state["made_for"].get(name)
        if there != here:
            raise CheckpointError(
                f"the state was made with {name} {there!r}; this training has {here!r}. "
                "Resume with the same, or start anew."
            )
