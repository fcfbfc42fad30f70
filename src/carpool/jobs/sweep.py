"""Sweep of a job table: parameter values to trials, and ``{name}`` in a command to a trial's values.

    [job.sweep]
    lr = { min = 1e-4, max = 0.1, log = true }      # a range, drawn at random
    width = [64, 128]                               # a list
    samples = 20                                    # trials to draw; without it, every combination of the lists
    seed = 1
    at_most = 4
    halving = { metric = "val_acc", mode = "max", eta = 3, min_steps = 100 }

A parameter may be called `samples`, `seed` or `at_most`: a list or a range is always a parameter.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, isfinite, log, prod
from random import Random
from typing import Any, NamedTuple

from carpool.core.errors import InputError
from carpool.core.model import HalvingRule, Param
from carpool.jobs.toml_table import Table

MAX_TRIALS = 10_000
_OPTIONS = ("samples", "seed", "at_most")
_MAX_FILLED = 1 << 16  # characters that the values may add to one job
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_DIGITS = 4  # significant ones of a drawn number
JOB = "job"  # placeholder of the job's own name


class Range(NamedTuple):
    """Numbers between two bounds, both included."""

    low: float
    high: float
    is_log: bool = False  # drawn evenly in the logarithm
    is_whole: bool = False

    @classmethod
    def read(cls, given: object, where: str) -> Range:
        table = Table(given, where)
        table.only(["min", "max", "log"])
        low, high, is_log = table.values.get("min", ""), table.values.get("max", ""), table.flag("log")
        if not _is_number(low) or not _is_number(high) or not low < high:
            raise InputError(
                f"min is {low!r}, max is {high!r}", where=where, way_out="Write two numbers, min below max."
            )
        if is_log and low <= 0:
            raise InputError(f"min is {low!r} with log = true", where=where, way_out="Write a min above 0.")
        return cls(low, high, is_log, isinstance(low, int) and isinstance(high, int))

    def draw(self, random: Random) -> float:
        part = random.random()
        if self.is_whole and not self.is_log:
            return int(self.low) + int(part * (self.high - self.low + 1))
        value = self.low + part * (self.high - self.low)
        if self.is_log:
            value = exp(log(self.low) + part * (log(self.high) - log(self.low)))
        value = round(value) if self.is_whole else float(f"{value:.{_DIGITS}g}")
        return min(max(value, self.low), self.high)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The trials of one job table."""

    params: Mapping[str, Sequence[Any] | Range] = field(default_factory=dict)
    samples: int = 0  # 0: every combination
    seed: int = 0
    at_most: int = 0
    halving: HalvingRule | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any], where: str) -> Sweep:
        """Parse a ``sweep`` table; InputError names the key, its value and what to write."""
        table = Table(given, where)
        options = {key: given[key] for key in _OPTIONS if key in given and isinstance(given[key], int)}
        halving = given.get("halving")
        is_rule = isinstance(halving, Mapping) and not {"min", "max"} <= halving.keys()
        params = {
            key: _values(key, value, where)
            for key, value in given.items()
            if key not in options and not (key == "halving" and is_rule)
        }
        sweep = cls(
            params,
            table.whole("samples", 0) if "samples" in options else 0,
            table.whole("seed", 0, least=0) if "seed" in options else 0,
            table.whole("at_most", 0, least=0) if "at_most" in options else 0,
            _halving(halving, where) if is_rule else None,
        )
        sweep._check(where)
        return sweep

    def _check(self, where: str) -> None:
        ranges = [name for name, values in self.params.items() if isinstance(values, Range)]
        if ranges and not self.samples:
            raise InputError(f"{ranges[0]} is a range", where=where, way_out="Add samples = 20, or write a list.")
        if not self.params and (self.samples or self.at_most or self.halving is not None):
            raise InputError("has no parameter", where=where, way_out="Add one: lr = [0.1, 0.01].")
        if self.num_trials > MAX_TRIALS:
            raise InputError(
                f"has {self.num_trials} trials; the limit is {MAX_TRIALS}", where=where, way_out="Add samples = 100."
            )

    @property
    def _num_combinations(self) -> int:
        return prod(len(values) for values in self.params.values() if not isinstance(values, Range))

    @property
    def num_trials(self) -> int:
        if not self.params:
            return 0
        has_ranges = any(isinstance(values, Range) for values in self.params.values())
        return self.samples if has_ranges else min(self.samples or self._num_combinations, self._num_combinations)

    def trials(self) -> Iterator[dict[str, Any]]:
        """The values of each trial: all combinations or `samples` random ones; these differ unless there are ranges."""
        random = Random(self.seed)
        if not self.samples:
            lists = [values for values in self.params.values() if not isinstance(values, Range)]
            for values in itertools.product(*lists):
                yield dict(zip(self.params, values, strict=True))
        elif any(isinstance(values, Range) for values in self.params.values()):
            for _ in range(self.samples):
                yield {name: _drawn(values, random) for name, values in self.params.items()}
        else:
            for place in random.sample(range(self._num_combinations), self.num_trials):
                yield self._combination(place)

    def _combination(self, place: int) -> dict[str, Any]:
        """A combination by its place in the grid."""
        found: dict[str, Any] = {}
        for name in reversed(list(self.params)):
            values = self.params[name]
            assert not isinstance(values, Range)
            place, index = divmod(place, len(values))
            found[name] = values[index]
        return {name: found[name] for name in self.params}


def _drawn(values: Sequence[Any] | Range, random: Random) -> Any:
    return values.draw(random) if isinstance(values, Range) else values[int(random.random() * len(values))]


def _values(name: str, value: object, where: str) -> Sequence[Any] | Range:
    if isinstance(value, Mapping):
        return Range.read(value, f"{where}.{name}")
    if not isinstance(value, list) or not value:
        raise InputError(
            f"{where.rpartition(': ')[2]}.{name} is {value!r}",
            where=where.rpartition(": ")[0],
            way_out="Write a list of values, or a range { min = 0.001, max = 0.1 }.",
        )
    return value


def _halving(given: object, where: str) -> HalvingRule:
    table = Table(given, f"{where}.halving")
    table.only(["metric", "mode", "eta", "min_steps"])
    metric = table.text("metric")
    if not metric:
        raise InputError("has no metric", where=table.where, way_out='Add one: metric = "val_acc".')
    steps = table.whole("min_steps", 0)
    if not steps:
        raise InputError("has no min_steps", where=table.where, way_out="Add one: min_steps = 100.")
    return HalvingRule(metric, table.choice("mode", ("max", "min")) == "max", table.whole("eta", 3, least=2), steps)


def as_params(values: Mapping[str, Any]) -> tuple[tuple[str, Param], ...]:
    """A trial's values for its spec; lists and tables as JSON text."""
    return tuple((name, value if isinstance(value, Param) else json.dumps(value)) for name, value in values.items())


def filled_command(table: Table, values: Mapping[str, Any], job: str) -> Table:
    """A command's table with the trial's values in ``command``, ``environment`` and ``metrics``.

    InputError for an unknown name, for a parameter that neither command nor environment uses, and for lone braces.
    """
    filler = _Filler({JOB: job, **values}, table.where)
    command = [filler.fill(word, "command") for word in table.texts("command")]
    variables = {name: filler.fill(text, "environment") for name, text in table.settings("environment").items()}
    if unused := [name for name in values if name not in filler.used]:
        raise InputError(
            f"sweep.{unused[0]} is not used by the command",
            where=table.where,
            way_out=f'Write {{{unused[0]}}} where its value belongs: ["python", "train.py", "{{{unused[0]}}}"].',
        )
    files = [filler.fill(pattern, "metrics") for pattern in table.texts("metrics")]
    given = {"command": command, "environment": variables, "metrics": files}
    return Table({**table.values, **{key: value for key, value in given.items() if key in table.values}}, table.where)


class _Filler:
    """Replaces ``{name}`` by a value, ``{{`` and ``}}`` by braces, and remembers which names it met."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.used: set[str] = set()
        self._values = values
        self._where = where
        self._left = _MAX_FILLED

    def fill(self, text: str, key: str) -> str:
        return _PLACEHOLDER.sub(lambda found: self._replacement(found, key), text)

    def _replacement(self, found: re.Match[str], key: str) -> str:
        if found[0] in ("{{", "}}"):
            return found[0][0]
        name, where = found[1], f"{self._where}: {key}"
        if name is None:
            raise InputError(f"has a single {found[0]!r}", where=where, way_out="Write {{ or }} for a brace.")
        if name not in self._values:
            known = ", ".join(self._values)
            raise InputError(
                f"{{{name}}} is not a parameter of the sweep",
                where=where,
                way_out=f"Known: {known}. Write {{{{ and }}}} for braces.",
            )
        self.used.add(name)
        text = _as_text(self._values[name])
        self._left -= len(text)
        if self._left < 0:
            raise InputError(
                f"the values of the sweep take more than {_MAX_FILLED} characters",
                where=where,
                way_out="Move large values into a file that the command reads.",
            )
        return text


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def parse_sweep_options(given: Sequence[str]) -> dict[str, list[Any]]:
    """Values of ``--sweep lr=0.1,0.01``: numbers, true and false as such, anything else as text."""
    sweep: dict[str, list[Any]] = {}
    for text in given:
        name, sign, values = text.partition("=")
        if not name or not sign or not values:
            raise InputError(f"--sweep is {text!r}", way_out="Write a name and its values: --sweep lr=0.1,0.01.")
        if name in sweep:
            raise InputError(f"--sweep names {name!r} twice", way_out=f"Write all values at once: --sweep {name}=1,2.")
        sweep[name] = [_parsed(value) for value in values.split(",")]
    return sweep


def _parsed(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, bool) or _is_number(value) else text


def add_sweep(data: Mapping[str, Any], sweep: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The content of a job file with these parameters in every job's sweep; they replace those of the same name."""
    tables = data.get("job")
    if not sweep or not isinstance(tables, list):
        return data
    for table in tables:
        if isinstance(table, Mapping) and not isinstance(table.get("sweep", {}), Mapping):
            raise InputError(
                f"sweep is {table['sweep']!r}", where=where, way_out="Write a table: { lr = [0.1, 0.01] }."
            )
    jobs = [
        {**table, "sweep": {**table.get("sweep", {}), **sweep}} if isinstance(table, Mapping) else table
        for table in tables
    ]
    return {**data, "job": jobs}
