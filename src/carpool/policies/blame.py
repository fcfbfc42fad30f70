"""Whose fault it is when something goes wrong while a policy from somebody's own file decides."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from carpool.core.errors import InputError


@contextmanager
def blaming(policy: str, *, strictly: bool = False) -> Iterator[None]:
    """Tell of what a policy from a file raised as that file's fault; `policy` is as it was written.

    Strictly, only what came through the file itself is: around it, much else happens that may go wrong.
    """
    file, separator, _ = policy.partition(".py:")
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename) == Path(f"{file}.py").resolve()]
        if not separator or (strictly and not own):
            raise
        spot = own[-1] if strictly else frames[-1]
        raise InputError(
            f"{type(error).__name__}: {error} ({Path(spot.filename).name}, line {spot.lineno})",
            where=f"policy {policy!r} failed",
            way_out="Test it with carpool.testing.PolicyContract.",
        ) from error
