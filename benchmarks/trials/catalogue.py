"""Example jobs that take a second or two, and what is special about each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carpool.jobs.program import Program

ENTRY = f"{Path(__file__).resolve().with_name('paced.py')}:paced"
SHARDS = 8


@dataclass(frozen=True, slots=True)
class Example:
    """A training of examples/ with tiny arguments."""

    entry: str
    what: str
    args: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)  # more arguments, that make a step the same however it is cut

    def arguments(self, steps: int, pause_s: float, record: str = "", *, plain: bool = False) -> dict[str, Any]:
        """What the entry takes; ``plain``: without dropout, whose masks depend on how a step is cut."""
        args = {**self.args, **self.plain} if plain else self.args
        return {"example": self.entry, "args": args, "steps": steps, "pause_s": pause_s, "record": record}


EXAMPLES = {
    "mlp": Example("digits:mlp", "dropout and Adam", {"hidden": 32}, {"dropout": 0.0}),
    "cnn": Example("digits:cnn", "BatchNorm, SGD with momentum, a schedule", {"channels": 4}),
    "ncf": Example("ncf:ncf", "embeddings and Adam", {"users": 60, "items": 80, "batch_size": 256}),
    "bert": Example(
        "bert_qa:bert",
        "transformer with dropout, AdamW, clipped",
        {"dim": 16, "layers": 1, "heads": 2, "samples": 400, "dropout": 0.1},
        {"dropout": 0.0},
    ),
    "lstm": Example(
        "lstm_language_model:lstm", "LSTM with dropout, clipped", {"hidden": 16, "length": 16}, {"dropout": 0.0}
    ),
}


def program(args: dict[str, Any], folder: Path, **what: Any) -> Program:
    """What a worker has to know of an example."""
    return Program(**{"entry": ENTRY, "args": args, "folder": str(folder), "shards": SHARDS, **what})
