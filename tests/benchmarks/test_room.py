"""Trainings on seats: what becomes of the others when one of them fails."""

from __future__ import annotations

import importlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@dataclass(frozen=True)
class Named:
    """As much of a training as a room asks for."""

    name: str
    batch: int = 4


class PretendedSeat:
    """Answers every question in order; what is asked of the training called ``bad`` cannot be done."""

    def __init__(self, share: int, environment: object, device: str) -> None:
        self.share = share
        self.process = SimpleNamespace(kill=lambda: None)
        self._answers: deque[dict[str, Any]] = deque()
        self._name = ""

    def ask(self, command: str, *words: Any) -> None:
        if command == "load":
            self._name = words[0].name
            self._answers.append({"graph": True, "sms": self.share, "of": self._name})
        elif command == "run":
            self._answers.append({"error": "no"} if self._name == "bad" else {"steps_per_s": 1.0 if words[1] else 2.0})
        else:
            self._answers.append({})

    def answer(self, limit_s: float) -> dict[str, Any]:
        return self._answers.popleft()


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("sharing.room")
    monkeypatch.setattr(module, "Seat", PretendedSeat)
    return module


def test_one_that_fails_leaves_and_the_others_answer_what_they_are_asked(room: ModuleType) -> None:
    bad, good, later = (room.Guest(Named(name), 50) for name in ("bad", "good", "later"))
    ours = room.Room({}, "cpu")
    ours.invite([bad, good])
    with pytest.raises(room.Gone, match="bad at 50 %: no"):
        ours.run([bad, good], 0.01, eager=True)
    assert ours.run([good], 0.01) == [8.0]
    ours.invite([good, later])
    assert ours.run([good, later], 0.01) == [8.0, 8.0]
