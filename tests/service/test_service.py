"""People see and touch what is theirs, a wish is granted once, and what they are shown is what holds."""

import asyncio
import json
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.core.host_resources import HostResources
from carpool.core.journal import Header
from carpool.core.messages import ForeignProcess, OutsidersSeen
from carpool.core.model import DeviceId, JobId, Phase
from carpool.core.policy import Plan, Snapshot
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.runtime.executor.job_folder import JobFolder
from carpool.service.admission import Quota, QuotaExceeded, Quotas
from carpool.service.auth import Forbidden, Principal, Role
from carpool.service.queries.present import TimeBase, read_log
from carpool.service.queries.views import ForeignProcessView
from carpool.service.service import Conflict, NotFound, SchedulerService
from carpool.service.store.store import Store
from tests.support.service_rig import TWO_CORES, listed, open_service

ADA, BEN = Principal("ada"), Principal("ben")
ADMIN, READER = Principal("root", Role.ADMIN), Principal("screen", Role.READER)


def test_a_submitted_job_is_shown_to_its_owner_and_to_those_who_see_all(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path, a=1000) as office:
            clerk = office.clerk
            assert await clerk.submit(ADA, [listed("a")]) == (JobId("a"),)
            shown = clerk.job(ADA, "a")
            assert (shown.user, shown.phase, shown.submitted_at) == ("ada", Phase.RUNNING, 1_000_000.0)
            assert [each.name for each in shown.holds] == ["cpu:0"]
            assert clerk.jobs(READER).total == clerk.jobs(ADMIN).total == 1
            assert clerk.jobs(BEN).total == 0
            with pytest.raises(NotFound, match="no job 'a'"):
                clerk.job(BEN, "a")
            assert [each.residents[0].job for each in clerk.devices(BEN) if each.residents] == [""]
            assert [each.residents[0].job for each in clerk.devices(ADA) if each.residents] == ["a"]
            assert [span.job for span in clerk.timeline(BEN, 0.0, 2e6)] == [""]
            assert clerk.decisions(BEN)[0].reason == ""
            assert clerk.decisions(ADA)[0].reason != ""
            assert clerk.summary(ADA).held == 1.0

    asyncio.run(play())


@dataclass(frozen=True, slots=True)
class Chatty(Fifo):
    """Serves in order, and tells of everybody by name."""

    def plan(self, view: Snapshot) -> Plan:
        plan = Fifo.plan(self, view)
        words = "; ".join(f"{job.id} came at {job.submitted_at:g}, as was due to {job.id}." for job in view.active())
        return replace(plan, reason=f"{len(plan.changes)} start in order; {words}")


def test_reasons_do_not_tell_the_names_of_others_jobs(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path, policy=Chatty()) as office:
            clerk = office.clerk
            await clerk.submit(BEN, [listed("secret-project.v2"), listed("b")])
            await clerk.submit(ADA, [listed("a")])
            await clerk.cancel(BEN, "b")
            told = "1 start in order; a came at 0, as was due to a."
            assert clerk.job(ADA, "a").reason == clerk.decisions(ADA)[0].reason == told
            assert clerk.jobs(ADA).jobs[0].reason == told
            assert [moment.words for moment in clerk.story(ADA, "a")][-1] == f"gets cpu:1: {told}"
            assert "secret-project.v2" in clerk.job(BEN, "secret-project.v2").reason
            assert "secret-project.v2" in clerk.job(ADMIN, "a").reason
            assert "secret-project.v2" in clerk.job(READER, "a").reason
            assert [decision.reason for decision in clerk.decisions(ADA)][1:] == [""]

    asyncio.run(play())


def test_only_the_owner_and_the_admin_touch_a_job(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path, a=1000) as office:
            clerk = office.clerk
            await clerk.submit(ADA, [listed("a")])
            with pytest.raises(NotFound):
                await clerk.cancel(BEN, "a")
            with pytest.raises(Forbidden, match="may only read"):
                await clerk.cancel(READER, "a")
            with pytest.raises(Forbidden, match="may only read"):
                await clerk.submit(READER, [listed("b")])
            await clerk.pause(ADA, "a")
            assert clerk.job(ADA, "a").phase is Phase.PAUSED
            with pytest.raises(Conflict, match="is paused, so it cannot be paused"):
                await clerk.pause(ADA, "a")
            await clerk.resume(ADA, "a")
            await clerk.cancel(ADMIN, "a")
            assert clerk.job(ADA, "a").phase is Phase.CANCELLED
            with pytest.raises(Conflict, match="is cancelled"):
                await clerk.cancel(ADA, "a")

    asyncio.run(play())


def test_a_taken_name_gets_a_number_and_those_after_it_follow(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path) as office:
            clerk = office.clerk
            await clerk.submit(ADA, [listed("a")])
            names = await clerk.submit(BEN, [listed("a"), listed("b", after=(JobId("a"),))])
            assert names == ("a-2", "b")
            assert clerk.job(BEN, "b").after == ("a-2",)

    asyncio.run(play())


def test_the_same_key_is_the_same_wish(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path) as office:
            clerk = office.clerk
            both = await asyncio.gather(*(clerk.submit(ADA, [listed("a")], key="once") for _ in range(2)))
            assert both == [("a",), ("a",)]
            assert await clerk.submit(BEN, [listed("a")], key="once") == ("a-2",)
            with pytest.raises(InputError, match="used for other jobs"):
                await clerk.submit(ADA, [listed("b")], key="once")

    asyncio.run(play())


def test_a_key_of_a_wish_that_was_refused_can_be_used_again(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path, a=1000) as office:
            clerk = office.clerk
            for _ in range(2):
                with pytest.raises(InputError, match="exists already"):
                    await clerk.submit(ADA, [listed("a"), listed("a")], key="once")
            assert await clerk.submit(ADA, [listed("c")], key="once") == ("c",)
            assert clerk.job(ADA, "c").phase is Phase.RUNNING

    asyncio.run(play())


def test_keys_are_known_after_a_restart(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path, a=1000) as office:
            clerk = office.clerk
            await clerk.submit(ADA, [listed("a")], key="once")
        store = Store.open(tmp_path / "store", Header("1", "fifo", TWO_CORES))
        notes = {name: each["note"] for entry in store.entries() for name, each in entry.details.items()}
        store.close()
        assert notes[JobId("a")]["key"] == "once"
        async with open_service(tmp_path / "second", notes=notes) as office:
            assert await office.clerk.submit(ADA, [listed("a")], key="once") == ("a",)
            assert office.clerk.jobs(ADA).total == 0

    asyncio.run(play())


def test_what_cannot_run_is_refused_before_it_is_accepted(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path) as office:
            clerk = office.clerk
            with pytest.raises(InputError, match="asks 9 devices"):
                await clerk.submit(ADA, [listed("a", devices=9)])
            assert clerk.jobs(ADA).total == 0

    asyncio.run(play())


def test_logs_are_read_in_pieces_and_curves_are_thinned(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path, a=1000) as office:
            clerk = office.clerk
            await clerk.submit(ADA, [listed("a")])
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
            points = await clerk.measurements(ADA, "a", most=4)
            assert [point.step for point in points] == [0, 3, 6, 9]
            assert points[-1].at == 1_000_009.0

    asyncio.run(play())


@dataclass(frozen=True, slots=True)
class Watching(TimeBase):
    """A calendar that says in which threads it was asked."""

    threads: set[int] = field(default_factory=set)

    def unix(self, at: float) -> float:
        self.threads.add(threading.get_ident())
        return TimeBase.unix(self, at)


def test_a_curve_with_torn_lines_is_shown_and_read_where_it_holds_nobody_up(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path, a=1000) as office:
            await office.clerk.submit(ADA, [listed("a")])
            folder = JobFolder(tmp_path, "a").path
            folder.mkdir(parents=True)
            torn = b'{"at_s": 1.0, "st{"at_s": 2.0, "step": 2}\n', b"\xff\n", b"[]\n", b'{"step": 3}\n', b"\0\0\n"
            rows = [json.dumps({"at_s": n, "step": n}).encode() + b"\n" for n in (0, 9)]
            (folder / "metrics.jsonl").write_bytes(b"".join([rows[0], *torn, rows[1]]))
            calendar = Watching(1_000_000.0)
            clerk = SchedulerService(replace(office.read_model, calendar=calendar))
            assert [point.step for point in await clerk.measurements(ADA, "a")] == [0, 9]
            assert threading.get_ident() not in calendar.threads

    asyncio.run(play())


def test_events_of_others_are_not_heard(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path, a=1000, b=1000) as office:
            clerk = office.clerk
            await clerk.submit(ADA, [listed("a")])
            await clerk.submit(BEN, [listed("b")])
            heard: dict[str, list[str]] = {}
            for who in (ADA, READER):
                stream = clerk.events(who, after=0)
                heard[who.name] = []
                async for event in stream:
                    heard[who.name].append(f"{event.kind} {event.job}".strip())
                    if event.number == office.read_model.events.feed.last or len(heard[who.name]) == 4:
                        break
            assert heard["ada"] == ["submitted a", "decision", "phase a", "decision"]
            assert heard["screen"] == ["submitted a", "decision", "phase a", "submitted b"]

    asyncio.run(play())


def test_who_has_too_much_is_refused_until_some_of_it_is_over(tmp_path: Path) -> None:
    async def play() -> None:
        allowances = Quotas(Quota(jobs=2), {"ben": Quota(devices=1, weight=3.0)})
        async with open_service(tmp_path, allowances=allowances) as office:
            clerk = office.clerk
            await clerk.submit(ADA, [listed("a"), listed("b")])
            with pytest.raises(
                QuotaExceeded, match="'ada' would have 3 jobs in jobs that are not over; the allowance is 2"
            ):
                await clerk.submit(ADA, [listed("c")])
            await clerk.cancel(ADA, "a")
            await clerk.submit(ADA, [listed("c")])
            with pytest.raises(QuotaExceeded, match="2 devices"):
                await clerk.submit(BEN, [listed("d", devices=2)])
            await clerk.submit(BEN, [listed("e", weight=2.0)])
            assert clerk.job(BEN, "e").weight == 6.0

    asyncio.run(play())


def test_limits_cannot_be_raised_beyond_what_somebody_may_have(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path, allowances=Quotas(Quota(devices=2))) as office:
            clerk = office.clerk
            await clerk.submit(ADA, [listed("a"), listed("b")])
            for who in (ADA, ADMIN):
                with pytest.raises(QuotaExceeded, match="'ada' would have 3 devices in jobs that are not over"):
                    await clerk.limit(who, "a", 2, 2)
            await clerk.limit(ADA, "a", 1, 2)
            await clerk.cancel(ADA, "b")
            await clerk.limit(ADA, "a", 2, 2)
            await clerk.limit(ADA, "a", 1, 1)

    asyncio.run(play())


@given(text=st.text(), most=st.integers(1, 9))
def test_a_log_read_in_pieces_is_the_log(tmp_path_factory: pytest.TempPathFactory, text: str, most: int) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_bytes(text.encode("utf-8", "replace"))
    most = max(most, 4)  # the longest character
    for is_over in (True, False):
        start, read = 0, ""
        while (piece := read_log(path, start, most, is_over=is_over)).text:
            assert piece.next > start
            start, read = piece.next, read + piece.text
        assert read == path.read_bytes().decode()
        assert piece.is_over == is_over


def test_a_character_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes("ä".encode() + "ö".encode()[:1])
    assert read_log(path, 0, 99, is_over=False).text == "ä"
    assert read_log(path, 0, 99, is_over=True).text == "ä\N{REPLACEMENT CHARACTER}"


def test_nodes_are_shown_with_what_is_left_of_their_supplies_and_a_job_waits_for_them(tmp_path: Path) -> None:
    supplied = Cluster(tuple(replace(node, supplies=HostResources(4, 8 << 30)) for node in TWO_CORES.nodes))

    async def play() -> None:
        async with open_service(tmp_path, cluster=supplied) as office:
            clerk = office.clerk
            await clerk.submit(ADA, [listed("a", cpus=3), listed("b", cpus=3)])
            (node,) = clerk.nodes(ADA)
            assert (node.supplies.cpus, node.taken.cpus, node.supplies.disk_bytes) == (4, 3, 0)
            assert clerk.job(ADA, "b").phase is Phase.WAITING
            assert clerk.why(ADA, "b").endswith("node n0 has 1 of 4 cores left, 3 needed")
            with pytest.raises(InputError, match="asks 5 cores for a device"):
                await clerk.submit(ADA, [listed("much", cpus=5)])

    asyncio.run(play())


def test_others_on_a_device_are_shown_with_its_node(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_service(tmp_path) as office:
            clerk = office.clerk
            await office.loop.apply(
                OutsidersSeen(DeviceId(1), (ForeignProcess(7, "ben", "python", 5),), keeps_free=False)
            )
            (node,) = clerk.nodes(BEN)
            assert node.outsiders == (ForeignProcessView("cpu:1", 7, "ben", "python", 5, False),)
            assert [device.outsiders for device in clerk.devices(BEN)] == [(), node.outsiders]
            await office.loop.apply(OutsidersSeen(DeviceId(1)))
            assert clerk.nodes(BEN)[0].outsiders == ()

    asyncio.run(play())


def test_priorities_and_deadlines_are_shown_capped_and_told(tmp_path: Path) -> None:
    async def play() -> None:
        allowances = Quotas(named={"ben": Quota(priority="normal")})
        async with open_service(tmp_path, allowances=allowances, a=1000) as office:
            clerk = office.clerk
            await clerk.submit(ADA, [listed("a", priority=1, weight=8.0, deadline_s=5.0)], key="once")
            assert await clerk.submit(ADA, [listed("a", priority=1, weight=8.0, deadline_s=4.0)], key="once") == ("a",)
            shown = clerk.job(ADA, "a")
            assert (shown.priority, shown.deadline, shown.is_late) == ("high", 1_000_005.0, False)
            await clerk.reweigh(ADA, "a", 2.0)
            assert clerk.job(ADA, "a").weight == 16.0
            with pytest.raises(QuotaExceeded, match="priority high; the highest allowed is normal"):
                await clerk.submit(BEN, [listed("b", priority=1)])
            await office.settle(6.0)
            await office.settle(0.1)
            assert clerk.job(ADA, "a").is_late
            assert any("missed its deadline" in moment.words for moment in clerk.story(ADA, "a"))
            assert clerk.job(ADA, "a").phase is Phase.RUNNING

    asyncio.run(play())
