"""Idempotency keys: the same key with the same jobs is the same wish, and is granted once."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from carpool.core.errors import InputError
from carpool.core.journal import spec_to_json
from carpool.core.model import JobId
from carpool.runtime.jobfile import Listed


class Keys:
    """What everybody asked under which key, and the jobs that became of it; `notes` are kept with jobs in the store."""

    def __init__(self, notes: Mapping[JobId, Mapping[str, Any]]) -> None:
        self._asked: dict[tuple[str, str], tuple[str, list[JobId]]] = {}  # (user, key): fingerprint, jobs
        for job, note in notes.items():
            if "key" in note:
                self._asked.setdefault((note["user"], note["key"]), (note["body"], []))[1].append(job)

    def granted(self, user: str, key: str, body: str) -> tuple[JobId, ...] | None:
        """The jobs of the same wish, where it was made before; InputError where the key was used for another."""
        before, names = self._asked.get((user, key), ("", []))
        if not names:
            return None
        if before != body:
            raise InputError(
                f"idempotency key {key!r} was used for other jobs before", way_out="Use a key for one wish only."
            )
        return tuple(names)

    async def keep(self, user: str, key: str, body: str, names: Sequence[JobId], granting: Awaitable[None]) -> None:
        """Wait until a wish is granted, and remember it; one that is refused can be made again under its key.

        It is known from now on, so that the same wish, made twice at a time, is one. Whoever goes away while it is
        being granted has not taken it back.
        """
        self._asked[user, key] = body, list(names)
        try:
            await granting
        except Exception:
            del self._asked[user, key]
            raise


def fingerprint(jobs: Sequence[Listed]) -> str:
    """What was asked, in a few bytes; a deadline counts from when it was asked, so it is no part of that."""
    asked = [[spec_to_json(replace(spec, deadline_s=0.0)), program.as_json()] for spec, program in jobs]
    return sha256(json.dumps(asked, sort_keys=True, default=list).encode()).hexdigest()
