"""Federations in real processes, all forked from one fork server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from carpool.backends.federation_devices import Devices
from carpool.backends.federation_run import FederationRun, TaskSummary
from carpool.backends.federation_store import FederationStore
from carpool.federated.federation import TaskName
from carpool.federated.federation_file import FederationFile
from carpool.federated.messages import Record
from carpool.runtime.process.forkserver import ForkServer

T = TypeVar("T")
_STALLED_S = 120.0  # after which a federation counts as stalled


class Runs:
    """Runs federations of one fork server: importing torch takes longer than they do."""

    def __init__(self, runner: asyncio.Runner, forks: ForkServer) -> None:
        self._runner = runner
        self.forks = forks

    def __call__(
        self,
        file: FederationFile,
        folder: Path,
        *,
        resume: bool = False,
        crash_at: int | None = None,
        devices: Devices | None = None,
    ) -> tuple[dict[TaskName, TaskSummary], list[Record]]:
        records: list[Record] = []

        def observe(record: Record) -> None:
            records.append(record)
            if len(records) == crash_at:
                raise ConnectionAbortedError

        folder.mkdir(exist_ok=True)
        federation = FederationRun(file, FederationStore(folder), [observe], resume=resume)
        return self.do(federation.run(self.forks, devices)), records

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something in the loop of the fork server."""
        return self._runner.run(asyncio.wait_for(work, _STALLED_S))
