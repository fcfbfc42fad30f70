"""Federation page: tasks and devices, a timeline of cycles with idle time, accuracy per task, bytes moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from carpool.backends.federation_store import FederationStore
from carpool.core.errors import InputError
from carpool.dashboard.chart import Chart, chart, time_ticks
from carpool.dashboard.results import STYLE_LINK
from carpool.dashboard.text_format import duration, exact_duration
from carpool.dashboard.time_window import Tick
from carpool.federated.federation import Federation
from carpool.federated.figures import CycleFigures, FederationFigures
from carpool.federated.messages import DeviceJoined, DeviceLost, EndTask, Evaluated, Outcome, Record
from carpool.service.service import NotFound

MAX_CYCLES = 40  # drawn on the timeline, the latest
MAX_DEVICES = 40  # rows of the timeline
MAX_JOURNAL_BYTES = 64 << 20  # read for a page


class Span(NamedTuple):
    """A bar of the timeline, in percent of its width: work, idle time at the barrier, or a device that was missing."""

    kind: str
    x: float
    width: float
    tip: str


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A device: whether it is there, its idle time, and its bars."""

    name: str
    is_present: bool
    idle_s: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task: its rounds, newest metrics, and the samples each device has processed of it."""

    name: str
    rounds: int
    num_rounds: int
    end: str
    failed: bool
    metrics: str
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FederationView:
    """All that the page shows."""

    name: str
    plan: str
    num_cycles: int
    seconds: float
    idle_s: float
    idle_part: float
    mismatch: float
    num_bytes: int
    refused: str
    is_over: bool
    tasks: tuple[TaskRow, ...]
    devices: tuple[DeviceRow, ...]
    num_devices: int
    ticks: tuple[Tick, ...]
    curves: tuple[tuple[str, Chart], ...]  # by metric
    moved: Chart


def draw_federation(name: str, federation: Federation, records: Iterable[Record]) -> FederationView:
    """Fold the records of a federation into its page."""
    figures = FederationFigures(federation)
    present: dict[str, bool] = {}
    metrics: dict[str, list[Evaluated]] = {task.name: [] for task in federation.tasks}
    ends: dict[str, EndTask] = {}
    for record in records:
        figures(record)
        for fact in record.facts:
            if isinstance(fact, DeviceJoined | DeviceLost):
                present[fact.device] = isinstance(fact, DeviceJoined)
            elif isinstance(fact, Evaluated) and fact.task in metrics:
                metrics[fact.task].append(fact)
        ends |= {order.task: order for order in record.orders if isinstance(order, EndTask)}
    shown = sorted(present)[:MAX_DEVICES]
    refused = {outcome: count for outcome, count in figures.outcomes.items() if outcome != Outcome.ACCEPTED}
    drawn = figures.cycles[-MAX_CYCLES:]
    return FederationView(
        name,
        federation.plan,
        len(figures.cycles),
        sum(each.seconds for each in figures.cycles),
        figures.idle_s,
        figures.idle_part,
        figures.mean_mismatch,
        sum(each.num_bytes for each in figures.cycles),
        ", ".join(f"{count} {outcome}" for outcome, count in sorted(refused.items())),
        len(ends) == len(federation.tasks),
        _task_rows(federation, figures.cycles, metrics, ends, shown),
        tuple(_device_row(device, present[device], figures.cycles, drawn) for device in shown),
        len(present),
        _ticks(drawn),
        _curves(metrics),
        chart([("MB", [(each.cycle, each.num_bytes / 1e6) for each in figures.cycles])], from_zero=True),
    )


def _task_rows(
    federation: Federation,
    cycles: Sequence[CycleFigures],
    metrics: dict[str, list[Evaluated]],
    ends: dict[str, EndTask],
    devices: Sequence[str],
) -> tuple[TaskRow, ...]:
    rounds: Counter[str] = Counter()
    samples: Counter[tuple[str, str]] = Counter()
    for cycle in cycles:
        rounds.update({task for worked in cycle.worked.values() for task in worked})
        for device, worked in cycle.worked.items():
            samples.update({(device, task): count for task, count in worked.items()})
    rows = []
    for task in federation.tasks:
        end, last = ends.get(task.name), metrics[task.name][-1:]
        words = ", ".join(f"{name} {value:.4g}" for each in last for name, value in each.metrics.items())
        counts = tuple(samples[device, task.name] for device in devices)
        reason, failed = (end.reason, end.failed) if end else ("", False)
        rows.append(TaskRow(task.name, rounds[task.name], task.rounds, reason, failed, words, counts))
    return tuple(rows)


def _device_row(
    name: str, is_present: bool, cycles: Sequence[CycleFigures], drawn: Sequence[CycleFigures]
) -> DeviceRow:
    idle = sum(value for cycle in cycles for device, value in cycle.idle.items() if device == name)
    return DeviceRow(name, is_present, idle, tuple(span for cycle in drawn for span in _spans(name, cycle, drawn)))


def _spans(name: str, cycle: CycleFigures, drawn: Sequence[CycleFigures]) -> list[Span]:
    """What a device did in a cycle; nothing if it did not take part."""
    began = drawn[0].started_at
    whole = max(drawn[-1].started_at + drawn[-1].seconds - began, 1e-9)

    def span(kind: str, since: float, seconds: float) -> Span:
        x, width = 100 * (since - began) / whole, 100 * seconds / whole
        return Span(kind, x, width, f"cycle {cycle.cycle}: {kind} {duration(seconds)}")

    idle = {str(device): value for device, value in cycle.idle.items()}.get(name)
    if idle is not None:
        worked = cycle.seconds - idle
        return [span("works", cycle.started_at, worked), span("idle", cycle.started_at + worked, idle)]
    return [span("missing", cycle.started_at, cycle.seconds)] if name in cycle.missing else []


def _ticks(drawn: Sequence[CycleFigures]) -> tuple[Tick, ...]:
    if not drawn:
        return ()
    since, until = drawn[0].started_at, drawn[-1].started_at + drawn[-1].seconds
    whole = max(until - since, 1e-9)
    ticks = [at for at in time_ticks(since, until, 6) if since <= at <= until]
    return tuple(Tick((at - since) / whole, exact_duration(at)) for at in ticks)


def _curves(metrics: dict[str, list[Evaluated]]) -> tuple[tuple[str, Chart], ...]:
    names = sorted({name for found in metrics.values() for each in found for name in each.metrics})
    return tuple(
        (
            name,
            chart(
                [
                    (task, [(each.rounds, each.metrics[name]) for each in found if name in each.metrics])
                    for task, found in metrics.items()
                ]
            ),
        )
        for name in names
    )


def federation_page(view: FederationView) -> str:
    """The page of a federation as one file that needs no server; it reloads itself until the federation is over."""
    from carpool.dashboard.routes import template_environment  # it imports this module

    style = resources.files("carpool.dashboard").joinpath("static", "dashboard.css").read_text(encoding="utf-8")
    page = template_environment(UTC).get_template("federation_file.html").render(view=view)
    return page.replace(STYLE_LINK, f"<style>{style}</style>", 1)


class Federations:
    """The federations whose folders lie in one folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def listed(self) -> list[str]:
        """Names, the newest first."""
        found = [(store.folder.stat().st_mtime, store.folder.name) for store in self._stores()]
        return [name for _, name in sorted(found, reverse=True)]

    def get(self, name: str) -> FederationView:
        """The page of one; NotFound if there is none, InputError if its journal cannot be read."""
        store = next((each for each in self._stores() if each.folder.name == name), None)
        if store is None:
            raise NotFound(f"unknown federation {name!r}")
        if store.num_bytes > MAX_JOURNAL_BYTES:
            raise InputError(
                f"{store.num_bytes:,} bytes of journal; at most {MAX_JOURNAL_BYTES:,} are shown", where=name
            )
        return draw_federation(name, *store.read())

    def _stores(self) -> list[FederationStore]:
        """Names are compared with those of folders and never joined to a path."""
        if self._folder is None or not self._folder.is_dir():
            return []
        found = [FederationStore(path) for path in self._folder.iterdir() if path.is_dir()]
        return [store for store in found if store.exists]
