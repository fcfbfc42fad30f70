"""Policy registry: names, parsing of ``NAME[:key=value]…``, policies from files and their errors."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from carpool.core.errors import InputError, UnknownName, place_of
from carpool.core.policy import Cadence, Policy


@contextmanager
def attribute_errors(policy: str, *, strictly: bool = False) -> Iterator[None]:
    """Report an exception raised by a policy file as an InputError that names the file; `policy` is its text.

    With `strictly`, only exceptions that passed through the file itself.
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


class PolicyEntry(NamedTuple):
    """A policy's module and its one-line summary."""

    module: str
    summary: str


POLICIES: dict[str, PolicyEntry] = {
    "carpool": PolicyEntry(
        "market.policy", "default: each device goes to the job whose weighted completion time it shortens most"
    ),
    "antman": PolicyEntry(
        "sharing.antman", "guaranteed jobs run at full speed, opportunistic jobs in their idle cycles (AntMan)"
    ),
    "competitive": PolicyEntry(
        "sharing.competitive", "jobs share a GPU; SM shares are searched, measured and kept if better"
    ),
    "iadeep": PolicyEntry(
        "iadeep.policy", "co-locates jobs where they slow each other least, tunes batch sizes online (IADeep)"
    ),
    "iadeep-literal": PolicyEntry(
        "iadeep.literal", "IADeep as published: least added degradation, no caps or moves, tunes the newest job"
    ),
    "kernel-est": PolicyEntry(
        "sharing.static_admission", "co-locates jobs where SM and memory use predict little interference"
    ),
    "mps-equal": PolicyEntry(
        "sharing.static_admission", "equal fixed MPS slots on every device, first fit by memory, no migration"
    ),
    "fifo": PolicyEntry(
        "baselines.nonpreemptive", "first come, first served; the head of the queue blocks unless bypass=true"
    ),
    "sjf": PolicyEntry(
        "baselines.nonpreemptive", "shortest job first, non-preemptive; the head of the queue blocks unless bypass=true"
    ),
    "multifactor": PolicyEntry(
        "baselines.multifactor", "age, fair share, size and priority, with conservative backfill (as in Slurm)"
    ),
    "srtf": PolicyEntry("baselines.srtf", "shortest remaining time first; gang-scheduled, preemptive"),
    "wsrtf": PolicyEntry("baselines.srtf", "shortest remaining time over weight first; gang-scheduled, preemptive"),
    "las": PolicyEntry("baselines.las", "least attained service, in queues (Tiresias-L); gang-scheduled, preemptive"),
    "afs": PolicyEntry("baselines.afs", "elastic: the next device goes where it shortens completion times most (AFS)"),
    "allox": PolicyEntry(
        "baselines.allox", "matches jobs to slots on heterogeneous devices by completion time (AlloX)"
    ),
    "hare": PolicyEntry(
        "hare.policy", "job values and device prices from an LP; top jobs hold devices, others fill gaps (Hare)"
    ),
    "hare-literal": PolicyEntry(
        "hare.literal", "Hare as published: jobs in the LP's order, each on the first free devices"
    ),
    "elastic": PolicyEntry(
        "market.policy", "elastic: device counts and types by weighted completion time (extends AFS)"
    ),
    "loss-phase": PolicyEntry(
        "loss_phase.policy", "elastic: devices by the loss reduction that each loss curve still predicts"
    ),
    "loss-phase-literal": PolicyEntry(
        "loss_phase.literal", "two jobs: three quarters of the devices to the one whose loss falls more slowly"
    ),
    "optimus": PolicyEntry(
        "baselines.optimus", "elastic: one device per job, then one more where it saves most time (Optimus)"
    ),
    "pollux": PolicyEntry(
        "baselines.pollux", "elastic device counts and batch sizes by goodput, maximizes mean speedup (Pollux)"
    ),
    "sched-homo": PolicyEntry(
        "baselines.nonpreemptive", "shortest time over weight first; takes all device types to be equally fast"
    ),
    "themis": PolicyEntry(
        "baselines.themis", "leases devices to the jobs with the worst finish-time fairness (Themis)"
    ),
    "gavel": PolicyEntry(
        "gavel.policy", "time shares of device types from an LP: max-min, ftf, makespan, throughput (Gavel)"
    ),
    "gavel-fifo": PolicyEntry(
        "gavel.fifo", "first come, first served on the fastest free device type; jobs may migrate"
    ),
}

_registered: dict[str, type[Policy]] = {}
_P = TypeVar("_P", bound=type[Policy])


def register(name: str) -> Callable[[_P], _P]:
    """Class decorator: register a policy under a name that `POLICIES` lists too."""

    def file(policy: _P) -> _P:
        _registered[name] = policy
        return policy

    return file


def registered() -> dict[str, type[Policy]]:
    """Import every policy of the table; their classes by name."""
    for listing in POLICIES.values():
        importlib.import_module(f"carpool.policies.{listing.module}")
    return dict(_registered)


def policy_class(name: str) -> type[Policy]:
    """The policy class registered under a name."""
    listing = POLICIES.get(name)
    if listing is None:
        raise UnknownName("policy", name, POLICIES)
    importlib.import_module(f"carpool.policies.{listing.module}")
    return _registered[name]


def parse_policy(text: str) -> Policy:
    """``NAME[:key=value]…`` or ``FILE.py:Class[:key=value]…`` as a policy object."""
    head, *rest = text.split(":")
    if head.endswith(".py"):
        if not rest:
            raise InputError(f"policy {text!r} names no class", way_out="Write FILE.py:Class.")
        kind = _from_file(Path(head), rest.pop(0))
    else:
        kind = policy_class(head)
    return _build(kind, text, rest)


def parameters(kind: type[Policy]) -> dict[str, Field[Any]]:
    """The parameters a policy takes, by name."""
    return {spot.name: spot for spot in fields(kind) if spot.init}  # type: ignore[arg-type]  # policies are dataclasses


def _build(kind: type[Policy], text: str, settings: list[str]) -> Policy:
    spots = parameters(kind)
    hints = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"{setting!r} in policy {text!r} is not key=value", way_out=_usage(spots))
        if key not in spots:
            raise UnknownName("parameter", key, spots, where=f"policy {text!r}")
        given[key] = _convert(hints[key], value, f"policy {text!r}: {key}")
    try:
        policy = kind(**given)
    except (TypeError, ValueError) as error:
        raise InputError(str(error), where=f"policy {text!r}", way_out=_usage(spots)) from None
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{type(error).__name__}: {error}", where=f"policy {text!r}") from error
    if not isinstance(policy.cadence, Cadence):
        raise InputError(f"cadence is {policy.cadence!r}", where=f"policy {text!r}", way_out="Set it to a Cadence.")
    return policy


def _usage(spots: dict[str, Field[Any]]) -> str:
    known = [name if spot.default is MISSING else f"{name}={spot.default}" for name, spot in spots.items()]
    return f"Parameters: {', '.join(known) or 'none'}."


def _convert(hint: Any, value: str, where: str) -> Any:
    """A parameter's text as the type its field declares."""
    if hint is bool:
        if value.lower() not in ("true", "false"):
            raise InputError(f"{value!r} is not true or false", where=where, way_out="Write true or false.")
        return value.lower() == "true"
    if hint is str:
        return value
    if hint in (int, float):
        try:
            number = hint(value)
            if number != number:  # NaN compares with nothing
                raise ValueError
            return number
        except ValueError:
            kind = "a whole number" if hint is int else "a number"
            raise InputError(f"{value!r} is not {kind}", where=where, way_out=f"Write {kind}: key=2.") from None
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, part, where) for part in value.split("/") if part)
    raise InputError(f"a parameter of type {hint} cannot be set on the command line", where=where)


def _from_file(path: Path, name: str) -> type[Policy]:
    """A policy class from a Python file outside the package."""
    if not path.is_file():
        raise InputError(
            f"policy file {str(path)!r} does not exist", way_out="Give the path of a Python file that defines a policy."
        )
    spec = importlib.util.spec_from_file_location(f"carpool_policy_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their annotations up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"cannot be imported: {type(error).__name__}: {error}",
            where=str(path),
            way_out=f"Fix it until `python {path.name}` runs.",
        ) from error
    known = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Policy) and not inspect.isabstract(value)
    }
    if not known:
        raise InputError(
            "defines no policy",
            where=str(path),
            way_out="Write a dataclass derived from carpool.core.policy.Policy, and name it: FILE.py:Class.",
        )
    if name not in known:
        raise UnknownName("policy class", name, known, where=str(path))
    if not is_dataclass(known[name]):
        raise InputError(
            f"class {name} is not a dataclass, so its parameters are unknown",
            where=str(path),
            way_out="Decorate it with @dataclass(frozen=True, slots=True) and declare its parameters as fields.",
        )
    return known[name]
