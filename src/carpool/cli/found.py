"""Where a job is that was named without a run: with the daemon here, or in a run of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from carpool.service.client import Client

Found = TypeVar("Found")


def from_daemon(job: str, ask: Callable[[Client, str], Found]) -> Found | None:
    """What the daemon says of a job; None where no daemon answers, or it has no such job."""
    from carpool.service.client import Client, Denied, Unreachable
    from carpool.service.config import read_settings

    settings = read_settings(os.environ)
    if not settings["server"] and not settings.socket.is_socket():
        return None
    try:
        with Client(timeout_s=10.0) as client:
            return ask(client, job)
    except Unreachable:
        return None
    except Denied as denied:
        if denied.status == 404:
            return None
        raise
