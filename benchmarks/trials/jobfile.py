"""Writes job files of stamped trainings, and reads the stories of runs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measured import ROOT
from trials.stamped import ENTRY
from zoo import ENTRIES, MODELS

BATCH = 128
_BATCHES = {"transformer": 32}


def entry_of(model: str) -> dict[str, Any]:
    """A model's entry and arguments: of the zoo by its name, of a file by its path."""
    if ":" in model:
        path, _, function = model.partition(":")
        return {"entry": f"{Path(path).name}:{function}", "folder": str((ROOT / path).parent), "args": {}}
    args: dict[str, Any] = {"batch_size": _BATCHES.get(model, BATCH)}
    if "stem" in inspect.signature(MODELS[model]).parameters:
        args |= {"stem": "imagenet", "channels_last": True}
    return {"entry": f"{ENTRIES}:{model}", "args": args}


def job_file(folder: Path, jobs: Mapping[str, str], **given: Any) -> Path:
    """Jobs by name and model; each writes a stamp into the folder, in a file of its name."""
    tables = []
    for name, model in jobs.items():
        args = _toml({**entry_of(model), "out": str(folder / name), **given})
        tables.append(f'[[job]]\nname = "{name}"\nentry = "{ENTRY}"\nmax_devices = 1\nargs = {args}\n')
    path = folder / "jobs.toml"
    path.write_text("\n".join(tables), encoding="utf-8")
    return path


def story(state: Path, job: str) -> list[str]:
    """What the executor told of a job."""
    path = state / "jobs" / job / "story.jsonl"
    if not path.exists():
        return []
    return [json.loads(line)["what"] for line in path.read_text(encoding="utf-8").splitlines()]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)
