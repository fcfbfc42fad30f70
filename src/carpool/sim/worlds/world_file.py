"""TOML reader of the parametric world; errors name file, key and value."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from carpool.core.errors import InputError, UnknownName, cause
from carpool.core.units import parse_bytes
from carpool.sim.worlds.contention import Contention
from carpool.sim.worlds.traits import ChangeCosts, KindTraits, ModelTraits, ValueRange, number

_T = TypeVar("_T")
_IN_BYTES = frozenset({"memory", "memory_per_sample"})
DEFAULT = "default"  # the model table with the defaults of all others and of models that are not listed


@dataclass(frozen=True, slots=True)
class TopLevelKeys:
    """The keys outside the tables."""

    reference: str = ""  # device type that work is counted on; empty: the first [kind] of the file
    node_size: int = number(8, low=1)  # devices per node of the reference
    checkpoint_every: float = number(0.0, low=0.0)  # units of work; 0: nothing is lost in a crash
    noise: float = number(0.0, low=0.0)  # relative error of the estimator
    seed: int = 0  # of that error


@dataclass(frozen=True, slots=True)
class WorldFile:
    """The contents of a file."""

    setting: TopLevelKeys = field(default_factory=TopLevelKeys)
    prices: ChangeCosts = field(default_factory=ChangeCosts)
    contention: Contention = field(default_factory=Contention)
    models: Mapping[str, ModelTraits] = field(default_factory=dict)
    kinds: Mapping[str, KindTraits] = field(default_factory=dict)


def read_world(path: Path) -> WorldFile:
    """Read and check a file."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {cause(error)}", where=str(path), way_out="Name a TOML file.") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"is not TOML: {error}", where=str(path), way_out="See docs/worlds.md.") from None
    tables = {name: _table(data.pop(name, {}), f"{path}: [{name}]") for name in ("prices", "contention")}
    models = _table(data.pop("model", {}), f"{path}: [model]")
    kinds = _table(data.pop("kind", {}), f"{path}: [kind]")
    base = _model(ModelTraits(), models.pop(DEFAULT, {}), f"{path}: [model.{DEFAULT}]")
    setting = _filled(TopLevelKeys(), data, str(path))
    known = {name: _filled(KindTraits(), table, f"{path}: [kind.{name}]") for name, table in kinds.items()}
    if setting.reference and setting.reference not in known:
        raise UnknownName("kind", setting.reference, known, where=f"{path}: reference")
    return WorldFile(
        setting,
        _filled(ChangeCosts(), tables["prices"], f"{path}: [prices]"),
        _filled(Contention(), tables["contention"], f"{path}: [contention]"),
        {DEFAULT: base} | {name: _model(base, table, f"{path}: [model.{name}]") for name, table in models.items()},
        known,
    )


def _model(base: ModelTraits, table: object, where: str) -> ModelTraits:
    traits = _filled(base, table, where)
    if len(traits.loss) != 3 or not traits.loss[0] > traits.loss[1] > traits.loss[2]:
        raise InputError(
            f"loss is {list(traits.loss)}",
            where=where,
            way_out="Give start, end and floor, each below the one before: loss = [2.3, 0.1, 0.0].",
        )
    if len(traits.noise_scale) != 2:
        raise InputError(
            f"noise_scale is {list(traits.noise_scale)}",
            where=where,
            way_out="Give the first and the last value: noise_scale = [256, 4096].",
        )
    return traits


def _table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"is {value!r}, not a table", where=where, way_out="See docs/worlds.md for the format.")
    return value


def _filled(base: _T, table: object, where: str) -> _T:
    kind = type(base)
    hints = get_type_hints(kind)
    spots = {spot.name: spot for spot in fields(kind)}  # type: ignore[arg-type]  # only dataclasses come here
    given = {name: getattr(base, name) for name in spots}
    for key, value in _table(table, where).items():
        if key not in spots:
            raise UnknownName("key", key, spots, where=where)
        limits = spots[key].metadata.get("limits", ValueRange())
        given[key] = _value(key, value, hints[key], limits, where)
    return kind(**given)


def _value(key: str, value: object, hint: Any, limits: ValueRange, where: str) -> Any:
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise InputError(f"{key} is {value!r}", where=where, way_out="Give a list of numbers in square brackets.")
        return tuple(_value(key, item, float, limits, where) for item in value)
    if hint is not str and hint not in (int, float):
        table = _table(value, f"{where}: {key}")
        return {name: _value(f"{key}.{name}", item, float, limits, where) for name, item in table.items()}
    if hint is str:
        if not isinstance(value, str):
            raise InputError(f"{key} is {value!r}", where=where, way_out="Give text in quotes.")
        return value
    if key in _IN_BYTES:
        return parse_bytes(value, f"{where}: {key}")
    allowed = int if hint is int else int | float
    if isinstance(value, bool) or not isinstance(value, allowed) or not (isfinite(value) and limits.admit(value)):
        what = "a whole number" if hint is int else "a number"
        bounds = "" if limits == ValueRange() else f" {limits}"
        raise InputError(f"{key} is {value!r}", where=where, way_out=f"Give {what}{bounds}.")
    return hint(value)
