"""People see and touch what is theirs, a wish is granted once, and what they are shown is what holds."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from carpool.backends.ledger import Ledger
from carpool.core.errors import InputError
from carpool.core.estimates import Declared
from carpool.core.journal import Header
from carpool.core.model import JobId, JobSpec, Phase
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.fifo import Fifo
from carpool.runtime.jobfile import Listed
from carpool.runtime.jobfolder import JobFolder
from carpool.runtime.program import Program
from carpool.service.chronicle import Chronicle
from carpool.service.clerk import Clerk, NotThere, Premises, Refused
from carpool.service.daemon import Daemon
from carpool.service.feed import Feed
from carpool.service.people import Forbidden, Person, Role
from carpool.service.showing import Calendar
from carpool.service.spans import Spans
from carpool.service.store import Store
from carpool.testing.fake_link import FakeMachine

CLUSTER = Cluster.build([(1, 2, "cpu")])
CALENDAR = Calendar(1_000_000.0)
ADA, BEN = Person("ada"), Person("ben")
ADMIN, READER = Person("root", Role.ADMIN), Person("screen", Role.READER)


def job(name: str, **fields: object) -> Listed:
    spec = JobSpec(JobId(name), **fields)  # type: ignore[arg-type]
    return Listed(spec, Program(entry=f"{name}.py:main"))


async def inline(commit: Callable[[], None]) -> None:
    commit()


@asynccontextmanager
async def office(folder: Path, **steps: int) -> AsyncIterator[tuple[Clerk, FakeMachine]]:
    """A clerk over a daemon whose jobs need so many steps; at virtual instant 0."""
    machine = FakeMachine(steps)
    store = Store.open(folder / "store", Header("1", "fifo", CLUSTER))
    ledger, spans, feed = Ledger(), Spans(CLUSTER), Feed()
    chronicle = Chronicle(feed, CALENDAR.unix)
    scheduler = Scheduler(CLUSTER, Fifo(), observers=(store, ledger, spans, chronicle))

    def take(at: float, report: object) -> None:
        chronicle.hear(at, report)  # type: ignore[arg-type]

    daemon = Daemon(scheduler, store, machine, machine, take=take, commit=inline)
    premises = Premises(
        daemon, scheduler, ledger, Declared(), spans, chronicle, {}, lambda job: None, folder, {0: "cpu:0", 1: "cpu:1"},
        CALENDAR, machine.now, "1", lambda: "fifo",
    )  # fmt: skip
    running = asyncio.create_task(daemon.run())
    try:
        yield Clerk(premises), machine
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, AssertionError):
            await running
        store.close()


def test_a_submitted_job_is_shown_to_its_owner_and_to_those_who_see_all(tmp_path: Path) -> None:
    async def play() -> None:
        async with office(tmp_path, a=1000) as (clerk, _):
            assert await clerk.submit(ADA, [job("a")]) == (JobId("a"),)
            shown = clerk.job(ADA, "a")
            assert (shown.user, shown.phase, shown.submitted_at) == ("ada", Phase.RUNNING, 1_000_000.0)
            assert [each.name for each in shown.holds] == ["cpu:0"]
            assert clerk.jobs(READER).total == clerk.jobs(ADMIN).total == 1
            assert clerk.jobs(BEN).total == 0
            with pytest.raises(NotThere, match="no job 'a'"):
                clerk.job(BEN, "a")
            assert [each.residents[0].job for each in clerk.devices(BEN) if each.residents] == [""]
            assert [each.residents[0].job for each in clerk.devices(ADA) if each.residents] == ["a"]
            assert [span.job for span in clerk.timeline(BEN, 0.0, 2e6)] == [""]
            assert clerk.decisions(BEN)[0].reason == ""
            assert clerk.decisions(ADA)[0].reason != ""
            assert clerk.summary(ADA).held == 1.0

    asyncio.run(play())


def test_only_the_owner_and_the_admin_touch_a_job(tmp_path: Path) -> None:
    async def play() -> None:
        async with office(tmp_path, a=1000) as (clerk, _):
            await clerk.submit(ADA, [job("a")])
            with pytest.raises(NotThere):
                await clerk.cancel(BEN, "a")
            with pytest.raises(Forbidden, match="may only read"):
                await clerk.cancel(READER, "a")
            with pytest.raises(Forbidden, match="may only read"):
                await clerk.submit(READER, [job("b")])
            await clerk.pause(ADA, "a")
            assert clerk.job(ADA, "a").phase is Phase.PAUSED
            with pytest.raises(Refused, match="is paused"):
                await clerk.pause(ADA, "a")
            await clerk.resume(ADA, "a")
            await clerk.cancel(ADMIN, "a")
            assert clerk.job(ADA, "a").phase is Phase.CANCELLED
            with pytest.raises(Refused, match="is cancelled"):
                await clerk.cancel(ADA, "a")

    asyncio.run(play())


def test_a_taken_name_gets_a_number_and_those_after_it_follow(tmp_path: Path) -> None:
    async def play() -> None:
        async with office(tmp_path, **{"a": 1000, "a-2": 1000, "b": 1000}) as (clerk, _):
            await clerk.submit(ADA, [job("a")])
            names = await clerk.submit(BEN, [job("a"), job("b", after=(JobId("a"),))])
            assert names == ("a-2", "b")
            assert clerk.job(BEN, "b").after == ("a-2",)

    asyncio.run(play())


def test_the_same_key_is_the_same_wish(tmp_path: Path) -> None:
    async def play() -> None:
        async with office(tmp_path, **{"a": 1000, "a-2": 1000}) as (clerk, _):
            both = await asyncio.gather(*(clerk.submit(ADA, [job("a")], key="once") for _ in range(2)))
            assert both == [("a",), ("a",)]
            assert await clerk.submit(BEN, [job("a")], key="once") == ("a-2",)
            with pytest.raises(InputError, match="used for other jobs"):
                await clerk.submit(ADA, [job("b")], key="once")

    asyncio.run(play())


def test_keys_are_known_after_a_restart(tmp_path: Path) -> None:
    async def play() -> None:
        async with office(tmp_path, a=1000) as (clerk, _):
            await clerk.submit(ADA, [job("a")], key="once")
        store = Store.open(tmp_path / "store", Header("1", "fifo", CLUSTER))
        notes = {name: each["note"] for entry in store.entries() for name, each in entry.details.items()}
        store.close()
        assert notes[JobId("a")]["key"] == "once"
        async with office(tmp_path / "second", a=1000) as (clerk, _):
            after = Clerk(clerk._in, notes)
            assert await after.submit(ADA, [job("a")], key="once") == ("a",)
            assert after.jobs(ADA).total == 0

    asyncio.run(play())


def test_what_cannot_run_is_refused_before_it_is_accepted(tmp_path: Path) -> None:
    async def play() -> None:
        async with office(tmp_path) as (clerk, _):
            with pytest.raises(InputError, match="asks 9 devices"):
                await clerk.submit(ADA, [job("a", devices=9)])
            assert clerk.jobs(ADA).total == 0

    asyncio.run(play())


def test_logs_are_read_in_pieces_and_curves_are_thinned(tmp_path: Path) -> None:
    async def play() -> None:
        async with office(tmp_path, a=1000) as (clerk, _):
            await clerk.submit(ADA, [job("a")])
            assert clerk.log(ADA, "a").text == ""
            folder = JobFolder(tmp_path, "a").path
            folder.mkdir(parents=True)
            (folder / "log").write_text("one\ntwo\n", encoding="utf-8")
            piece = clerk.log(ADA, "a", most=4)
            assert (piece.text, piece.next, piece.is_over) == ("one\n", 4, False)
            assert clerk.log(ADA, "a", piece.next).text == "two\n"
            assert clerk.log(ADA, "a", -4).text == "two\n"
            rows = [{"at_s": float(n), "step": n, "loss": 1.0 / (n + 1), "steps_per_s": 2.0} for n in range(10)]
            text = "".join(json.dumps(row) + "\n" for row in rows) + '{"at_s": 1'
            (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
            points = clerk.measurements(ADA, "a", most=4)
            assert [point.step for point in points] == [0, 3, 6, 9]
            assert points[-1].at == 1_000_009.0

    asyncio.run(play())


def test_events_of_others_are_not_heard(tmp_path: Path) -> None:
    async def play() -> None:
        async with office(tmp_path, a=1000, b=1000) as (clerk, _):
            await clerk.submit(ADA, [job("a")])
            await clerk.submit(BEN, [job("b")])
            heard: dict[str, list[str]] = {}
            for who in (ADA, READER):
                stream = clerk.events(who, after=0)
                heard[who.name] = []
                async for event in stream:
                    heard[who.name].append(f"{event.kind} {event.job}".strip())
                    if event.number == clerk._in.chronicle.feed.last or len(heard[who.name]) == 4:
                        break
            assert heard["ada"] == ["submitted a", "decision", "phase a", "decision"]
            assert heard["screen"] == ["submitted a", "decision", "phase a", "submitted b"]

    asyncio.run(play())
