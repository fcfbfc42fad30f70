"""A job file as it is sent to a daemon: its tables as JSON, and the folder that its paths are seen from."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError, cause


def submission(jobs: Path | str | Mapping[str, Any], folder: Path | str = "") -> dict[str, Any]:
    """What is sent to submit a job file, or tables; relative paths are seen from the file, or from `folder`."""
    if isinstance(jobs, Mapping):
        return {**jobs, "folder": str(Path(folder).absolute())}
    path = Path(jobs)
    try:
        data = json.loads(
            json.dumps(tomllib.loads(path.read_text(encoding="utf-8")), allow_nan=False, default=_as_text)
        )
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {cause(error)}", where=str(path), way_out="Name a job file.") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"is not TOML: {error}", where=str(path), way_out="Mend that line.") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"has values that cannot be sent: {error}", where=str(path)) from None
    return {**data, "folder": str(Path(folder or path.parent).absolute())}


def _as_text(value: object) -> str:
    """A moment as JSON can have it; one that does not say where is here."""
    if isinstance(value, datetime):
        return value.astimezone().isoformat()
    raise TypeError(f"{value!r} is a {type(value).__name__}")
