"""Whose fault it is when something goes wrong while a policy from somebody's own file decides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from carpool.core.errors import InputError, place_of


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
        own = Path(f"{file}.py").resolve()
        spot = place_of(error, lambda other: Path(other) == own) if strictly else place_of(error)
        if not separator or not spot:
            raise
        raise InputError(
            f"{type(error).__name__}: {error}{spot}",
            where=f"policy {policy!r} failed",
            way_out="Test it with carpool.testing.PolicyContract.",
        ) from error
