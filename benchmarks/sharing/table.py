"""Result rows: printed and written as they come, with the measures of the text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from typing import Any

from measured import conditions


def total(rates: Sequence[float], alone: Sequence[float]) -> float:
    """Σ P / P(alone): one after another is 1, no interference at all would be the number of jobs."""
    return sum(rate / whole for rate, whole in zip(rates, alone, strict=True))


def fair(rates: Sequence[float], base: Sequence[float]) -> float:
    """Geometric mean of P / P(base)."""
    return exp(sum(log(max(rate, 1e-9) / b) for rate, b in zip(rates, base, strict=True)) / len(rates))


def raw(rates: Sequence[float], base: Sequence[float]) -> float:
    """Σ P / Σ P(base)."""
    return sum(rates) / sum(base)


class Table:
    """All rows of a run."""

    def __init__(self, path: Path, more: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}  # what does not belong to a row
        self._head = {"schema": 2, "benchmark": "gpu_sharing", **conditions(), **more}

    def add(
        self,
        stage: str,
        mix: str,
        mode: str,
        rates: Sequence[float],
        alone: Sequence[float] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """A way of running the jobs of a mix; samples per second of each."""
        row: dict[str, Any] = {"stage": stage, "mix": mix, "mode": mode, **more, "rates": [round(r, 1) for r in rates]}
        told = " ".join(f"{rate:9,.0f}" for rate in rates)
        if alone is not None:
            row |= {"sum": round(total(rates, alone), 4), "fair": round(fair(rates, alone), 4)}
            told += f"  Σ {row['sum']:.3f}  fair {row['fair']:.3f}"
        self.rows.append(row)
        self.save()
        print(f"{mix:12} {mode:34} {told}", flush=True)
        return row

    def note(self, stage: str, found: Mapping[str, Any]) -> None:
        """Something that is no rate."""
        self.rows.append({"stage": stage, **found})
        self.save()
        print(f"{stage}: {dict(found)}", flush=True)

    def fail(self, stage: str, error: BaseException) -> None:
        """A stage that did not come to its end."""
        self.rows.append({"stage": stage, "error": f"{type(error).__name__}: {error}"[:500]})
        self.save()
        print(f"{stage}: {type(error).__name__}: {error}", flush=True)

    def save(self) -> None:
        """One line for each row."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in self._head.items())
        rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in self.rows)
        text = f'{{\n{head},\n "facts": {json.dumps(self.facts)},\n "results": [\n{rows}\n ]\n}}\n'
        self.path.write_text(text, encoding="utf-8")
