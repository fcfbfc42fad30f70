"""Progress display of a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol, TextIO

import click

from carpool.backends.job_accounting import JobAccount
from carpool.cli.render.job_rows import short, span
from carpool.core.model import Allocation, JobId, Phase
from carpool.core.units import format_params
from carpool.jobs.untrusted_file import first_kept_byte, open_untrusted
from carpool.service.daemon.batch_run import BatchRun

if TYPE_CHECKING:
    from rich.console import RenderableType


_CHUNK_BYTES = 1 << 16
_PROGRESS_S = 10.0  # between plain lines about a running job


class RunDisplay(Protocol):
    """Shows a run while it is running."""

    def refresh(self) -> None:
        """Show the current state; called a few times a second."""

    def shown(self) -> AbstractContextManager[None]:
        """While entered, the display may take over the terminal."""


class NullDisplay:
    """Shows nothing, for --json."""

    def refresh(self) -> None:
        """Show nothing."""

    def shown(self) -> AbstractContextManager[None]:
        return nullcontext()


class LineDisplay:
    """Plain lines on stderr: every decision and ending, and progress now and then."""

    def __init__(self, run: BatchRun) -> None:
        self._run = run
        self._decisions: dict[JobId, int] = {}  # already printed
        self._messages: dict[JobId, int] = {}  # likewise
        self._over: set[JobId] = set()  # likewise
        self._progress_at: dict[JobId, float] = {}
        self._width = max((len(spec.id) for spec, _ in run.request.jobs), default=0)

    def refresh(self) -> None:
        """Print what is new, in order of time."""
        accounts = self._run.accounting.accounts
        news = [(at, job, words) for job, account in accounts.items() for at, words in self._news(job, account)]
        for at, job, words in sorted(news, key=lambda line: line[0]):
            click.echo(f"{at:9.1f} s  {job:<{self._width}}  {words}", err=True)

    def shown(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _news(self, job: JobId, account: JobAccount) -> Iterator[tuple[float, str]]:
        if job not in self._decisions and account.spec.params:
            yield account.submitted_at, format_params(account.spec.params)
        for given in account.decisions[self._decisions.get(job, 0) :]:
            what = "is preempted" if given.allocation is None else f"gets {held(given.allocation, self._run.names)}"
            yield given.at, f"{what}: {given.summary}"  # `carpool explain` has the whole reason
        self._decisions[job] = len(account.decisions)
        yield from account.story[self._messages.get(job, 0) :]
        self._messages[job] = len(account.story)
        if account.ended_at is not None:
            if job not in self._over:
                self._over.add(job)
                yield account.ended_at, ending(account)
        elif account.done and account.as_of - self._progress_at.get(job, account.submitted_at) >= _PROGRESS_S:
            self._progress_at[job] = account.as_of
            yield account.as_of, progress(account, self._run.estimator.total(job))


class JobOutput:
    """Prints the output of the jobs as they write it, and their decisions and ends on stderr."""

    def __init__(self, run: BatchRun, output: TextIO) -> None:
        self._lines = LineDisplay(run)
        self._folders = {spec.id: run.folder.job(spec.id) for spec, _ in run.request.jobs}
        logs = {job: folder / "log" for job, folder in self._folders.items()}
        self._printed = {job: log.stat().st_size if log.exists() else 0 for job, log in logs.items()}  # before
        self._output = output

    def refresh(self) -> None:
        self._lines.refresh()
        for job, folder in self._folders.items():
            with contextlib.suppress(OSError), os.fdopen(open_untrusted(folder / "log"), "rb") as file:
                self._printed[job] = file.seek(max(self._printed[job], first_kept_byte(file.fileno())))
                while done := self._write(job, file.read(_CHUNK_BYTES)):
                    self._printed[job] = file.seek(self._printed[job] + done)
        self._output.flush()

    def _write(self, job: JobId, chunk: bytes) -> int:
        """Print output, with the job's name before each line if there are several jobs. Returns the bytes printed."""
        if len(self._folders) == 1:
            return self._output.buffer.write(chunk)
        lines = chunk.splitlines(keepends=True)
        is_incomplete = len(chunk) < _CHUNK_BYTES and not (self._folders[job] / "outcome.json").is_file()
        if lines and not lines[-1].endswith(b"\n") and (len(lines) > 1 or is_incomplete):
            lines.pop()
        for line in lines:
            self._output.buffer.write(b"%s | %s\n" % (job.encode(), line.rstrip(b"\r\n")))
        return sum(map(len, lines))

    def shown(self) -> AbstractContextManager[None]:
        return nullcontext()


class LiveTable:
    """A live table on the terminal."""

    def __init__(self, run: BatchRun) -> None:
        from rich.console import Console
        from rich.live import Live

        self._run = run
        self._live = Live(console=Console(stderr=True), auto_refresh=False)

    def refresh(self) -> None:
        self._live.update(self._drawn(), refresh=True)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the table on the terminal; its last state stays."""
        with self._live:
            yield
            self.refresh()

    def _drawn(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table as Grid
        from rich.text import Text

        run = self._run
        if not run.has_begun:
            jobs = len(run.request.jobs)
            return Text(f"starting {jobs} job{'s' if jobs != 1 else ''}; importing torch takes seconds", style="dim")
        grid = Grid(box=None, pad_edge=False, header_style="dim")
        accounts = run.accounting.accounts
        has_params = any(account.spec.params for account in accounts.values())
        for heading in ("job", *(["parameters"] if has_params else []), "state", "devices"):
            grid.add_column(heading, no_wrap=True)
        for heading in ("step", "loss", "steps/s", "left"):
            grid.add_column(heading, justify="right", no_wrap=True)
        for job, account in accounts.items():
            name, *cells = row(job, account, run.estimator.total(job), run.names)
            params = [format_params(account.spec.params)] if has_params else []
            grid.add_row(name, *params, *cells, style=_STYLES.get(account.phase, ""))
        busy = {device for account in accounts.values() if account.held for device in account.held.devices()}
        devices = ", ".join(f"{device.name} ({device.kind})" for device in run.devices)
        foot = Text(f"{len(busy)} of {len(run.devices)} devices busy: {devices}", style="dim")
        return Group(grid, foot, Text(run.accounting.reason.partition("; ")[0], style="italic"))


_STYLES = {Phase.FINISHED: "green", Phase.FAILED: "red", Phase.WAITING: "dim", Phase.BLOCKED: "dim"}


def row(job: JobId, account: JobAccount, total: float | None, names: Mapping[int, str]) -> tuple[str, ...]:
    """A job's cells: name, state, devices, step, loss, rate, time left."""
    loss = account.outcome.loss if account.outcome is not None else account.loss
    where = held(account.held, names) if account.held is not None else ""
    step = f"{account.steps}" + (f"/{total:.0f}" if total else "")
    left = (total - account.done) / account.rate if total and account.rate > 0 else None
    return (
        short(job),
        str(account.phase),
        where,
        step if account.steps or total else "",
        "" if loss is None else f"{loss:.4f}",
        f"{account.rate:.1f}" if account.rate else "",
        _time_left(account, left),
    )


def _time_left(account: JobAccount, left_s: float | None) -> str:
    if account.ended_at is not None or account.held is None:
        return ""
    return "?" if left_s is None else span(max(0.0, left_s))


def progress(account: JobAccount, total: float | None) -> str:
    """A job's progress as text."""
    words = f"step {account.steps}" + (f" of {total:.0f}" if total else "")
    if account.loss is not None:
        words += f", loss {account.loss:.4f}"
    return f"{words}, {account.phase}" if account.held is None else f"{words}, {account.rate:.1f} steps/s"


def ending(account: JobAccount) -> str:
    """A job's end as text."""
    if account.phase is not Phase.FINISHED:
        if account.is_stopped:
            return account.error
        return f"{account.phase}: {account.error}" if account.error else str(account.phase)
    outcome = account.outcome
    words = f"finished after {account.jct_s:.1f} s"
    if outcome is None:
        return words
    words += f": {outcome.reason}" if outcome.reason else ""
    words += f", loss {outcome.loss:.4f}" if outcome.loss is not None else ""
    return words + "".join(f", {name} {value:.4g}" for name, value in account.last_metrics.items())


def held(allocation: Allocation, names: Mapping[int, str]) -> str:
    """Devices by name, with the share where it is not whole."""
    fractions = allocation.fractions
    part = "" if fractions == (1.0,) else f" at {'/'.join(f'{fraction:.0%}' for fraction in fractions)}"
    return ",".join(names.get(device, str(device)) for device in allocation.devices()) + part
