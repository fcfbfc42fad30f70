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
    """Tell of what a policy from a file raised as that file's fault; `policy` is as it was written.

    Strictly, only what came through the file itself is: around it, much else happens that may go wrong.
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
    """Where a policy lives and what it does, in one line."""

    module: str
    summary: str


POLICIES: dict[str, PolicyEntry] = {
    "carpool": PolicyEntry(
        "market.policy", "the default: every device goes where it saves most weighted completion time"
    ),
    "antman": PolicyEntry(
        "sharing.antman", "guaranteed jobs at full speed, opportunistic ones in the idle cycles (AntMan)"
    ),
    "competitive": PolicyEntry(
        "sharing.competitive", "virtual shares of one device, searched, measured and kept if better"
    ),
    "iadeep": PolicyEntry(
        "iadeep.policy", "jobs share where they add least time; all batch sizes tuned by measuring (IADeep)"
    ),
    "kernel-est": PolicyEntry(
        "sharing.static_admission", "jobs share a device where SM and memory use predict little slowdown"
    ),
    "mps-equal": PolicyEntry(
        "sharing.static_admission", "equal fixed slots on every device, first fit by memory, never moved"
    ),
    "fifo": PolicyEntry(
        "baselines.nonpreemptive", "in order of submission; the head of the queue blocks unless bypass=true"
    ),
    "sjf": PolicyEntry(
        "baselines.nonpreemptive",
        "shortest job first, without preemption; the head of the queue blocks unless bypass=true",
    ),
    "srtf": PolicyEntry("baselines.srtf", "shortest remaining time first; gangs, preemptive"),
    "wsrtf": PolicyEntry("baselines.srtf", "least remaining time over weight first; gangs, preemptive"),
    "las": PolicyEntry("baselines.las", "least attained service in queues (Tiresias-L); gangs, preemptive"),
    "afs": PolicyEntry("baselines.afs", "elastic: the next device goes where it shortens completion times most (AFS)"),
    "allox": PolicyEntry("baselines.allox", "matching of jobs to places on unlike devices by completion time (AlloX)"),
    "hare": PolicyEntry(
        "hare.policy", "worths and prices from a relaxation; top jobs hold devices, others fill gaps (Hare)"
    ),
    "hare-literal": PolicyEntry("hare.literal", "the relaxation's order, each job on the first devices that are free"),
    "elastic": PolicyEntry(
        "market.policy", "elastic: numbers and kinds of devices by weighted completion time (AFS, carried on)"
    ),
    "loss-phase": PolicyEntry("loss_phase.policy", "elastic: devices by what each loss curve says is left to learn"),
    "loss-phase-literal": PolicyEntry(
        "loss_phase.literal", "two jobs: three quarters to the one whose loss falls less"
    ),
    "optimus": PolicyEntry(
        "baselines.optimus", "elastic: one device each, then one more where it saves most time (Optimus)"
    ),
    "pollux": PolicyEntry("baselines.pollux", "elastic devices and batch sizes by goodput, mean of speed-ups (Pollux)"),
    "sched-homo": PolicyEntry(
        "baselines.nonpreemptive", "shortest over weight first with the speeds of all kinds averaged"
    ),
    "themis": PolicyEntry(
        "baselines.themis", "devices go to the jobs that are treated worst (finish-time fairness), on leases"
    ),
    "gavel": PolicyEntry(
        "gavel.policy", "shares of time over unlike kinds from a linear program: max-min, ftf, makespan, throughput"
    ),
    "gavel-fifo": PolicyEntry(
        "gavel.fifo", "in order of submission, each on the fastest kind with room; jobs may move"
    ),
}

_registered: dict[str, type[Policy]] = {}
_P = TypeVar("_P", bound=type[Policy])


def register(name: str) -> Callable[[_P], _P]:
    """Class decorator: file a policy under a name (which the static table must list too)."""

    def file(policy: _P) -> _P:
        _registered[name] = policy
        return policy

    return file


def registered() -> dict[str, type[Policy]]:
    """Import every policy of the static table; what the decorators filed."""
    for listing in POLICIES.values():
        importlib.import_module(f"carpool.policies.{listing.module}")
    return dict(_registered)


def policy_class(name: str) -> type[Policy]:
    """The policy class filed under a name."""
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
            raise InputError(f"{value!r} is not true or false", where=where)
        return value.lower() == "true"
    if hint is str:
        return value
    if hint in (int, float):
        try:
            return hint(value)
        except ValueError:
            kind = "a whole number" if hint is int else "a number"
            raise InputError(f"{value!r} is not {kind}", where=where) from None
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, part, where) for part in value.split("/") if part)
    raise InputError(f"a parameter of type {hint} cannot be given as text", where=where)


def _from_file(path: Path, name: str) -> type[Policy]:
    """A policy class from a Python file outside the package."""
    if not path.is_file():
        raise InputError(
            f"there is no file {str(path)!r}", way_out="Give the path of a Python file with a policy in it."
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
            way_out=f"Mend it until `python {path.name}` runs.",
        ) from error
    known = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Policy) and not inspect.isabstract(value)
    }
    if name not in known:
        raise UnknownName("policy class", name, known, where=str(path))
    if not is_dataclass(known[name]):
        raise InputError(
            f"class {name} is no dataclass, so that its parameters cannot be found",
            where=str(path),
            way_out="Write @dataclass(frozen=True, slots=True) above it, and its parameters as fields.",
        )
    return known[name]
