"""Folder of a federation: its journal, the weights of its tasks, and updates that are not aggregated yet."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import numpy as np

from carpool.core.errors import InputError
from carpool.federated.aggregation import ServerModel
from carpool.federated.federation import DeviceName, Federation, TaskName
from carpool.federated.journal import JournalWriter, read_journal
from carpool.federated.messages import Record
from carpool.federated.updates import Weights, decode_weights, encode_weights

_PARTS = ("weights", "momentum", "variance")


class FederationStore:
    """Files are replaced whole, so that a process that is killed leaves either the old or the new one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._journal = folder / "journal.jsonl"

    @property
    def exists(self) -> bool:
        return self._journal.exists()

    @property
    def num_bytes(self) -> int:
        """The size of the journal."""
        return self._journal.stat().st_size

    def check_new(self) -> None:
        """InputError if the folder holds a federation already."""
        if self.exists:
            raise InputError(
                f"{self.folder} holds a federation already",
                way_out="Continue it with --resume, or name another folder with --out.",
            )

    @contextmanager
    def writer(self, federation: Federation) -> Iterator[JournalWriter]:
        """A journal writer; the header is written if there is none, and a last line that was cut is removed."""
        is_new = not self.exists
        if not is_new:
            data = self._journal.read_bytes()
            self._replace(self._journal, data[: data.rfind(b"\n") + 1])
        with self._journal.open("a", encoding="utf-8") as stream:
            yield JournalWriter(stream, federation if is_new else None)

    def read(self) -> tuple[Federation, list[Record]]:
        """The federation and its records; InputError if the folder holds none."""
        if not self.exists:
            raise InputError(f"{self.folder} holds no federation", way_out="Run it without --resume first.")
        with self._journal.open(encoding="utf-8") as stream:
            federation, records = read_journal(stream, str(self._journal))
            return federation, list(records)

    def save_model(self, task: TaskName, model: ServerModel) -> None:
        arrays = {f"{part}:{name}": value for part in _PARTS for name, value in getattr(model, part).items()}
        self._replace(self._model_path(task), encode_weights({**arrays, "rounds": np.array(model.rounds)}))

    def load_model(self, task: TaskName, trained: Iterable[str]) -> ServerModel | None:
        """The saved model of a task; None if there is none."""
        path = self._model_path(task)
        if not path.exists():
            return None
        arrays = decode_weights(path.read_bytes())
        rounds = int(arrays.pop("rounds"))
        found: dict[str, dict[str, np.ndarray]] = {part: {} for part in _PARTS}
        for key, value in arrays.items():
            part, _, name = key.partition(":")
            found[part][name] = value
        return ServerModel(found["weights"], frozenset(trained), rounds, found["momentum"], found["variance"])

    def save_update(self, cycle: int, device: DeviceName, task: TaskName, data: bytes) -> None:
        path = self._update_path(cycle, device, task)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._replace(path, data)

    def load_update(self, cycle: int, device: DeviceName, task: TaskName) -> Weights:
        return decode_weights(self._update_path(cycle, device, task).read_bytes())

    def drop_updates(self, before: int) -> None:
        """Delete the updates of cycles before this one."""
        for folder in (self.folder / "updates").glob("*"):
            if int(folder.name) < before:
                shutil.rmtree(folder)

    def _model_path(self, task: TaskName) -> Path:
        return self.folder / f"{quote(task, safe='')}.npz"

    def _update_path(self, cycle: int, device: DeviceName, task: TaskName) -> Path:
        return self.folder / "updates" / str(cycle) / f"{quote(device, safe='')}.{quote(task, safe='')}.npz"

    @staticmethod
    def _replace(path: Path, data: bytes) -> None:
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(data)
        part.replace(path)
