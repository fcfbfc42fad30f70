"""SchedulerService: visibility by role, commands, idempotent submission, quotas, logs and curves."""

import asyncio
import json
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

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
from carpool.service.queries.present import TimeBase
from carpool.service.queries.views import ForeignProcessView
from carpool.service.service import Conflict, NotFound, SchedulerService
from carpool.service.store.store import Store
from tests.support.service_rig import TWO_CORES, listed, open_service

ADA, BEN = Principal("ada"), Principal("ben")
ADMIN, READER = Principal("root", Role.ADMIN), Principal("screen", Role.READER)


def test_owner_readers_and_admins_see_a_job_and_other_users_do_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path, a=1000) as rig:
            service = rig.service
            assert await service.submit(ADA, [listed("a")]) == (JobId("a"),)
            shown = service.job(ADA, "a")
            assert (shown.user, shown.phase, shown.submitted_at) == ("ada", Phase.RUNNING, 1_000_000.0)
            assert [each.name for each in shown.holds] == ["cpu:0"]
            assert service.jobs(READER).total == service.jobs(ADMIN).total == 1
            assert service.jobs(BEN).total == 0
            with pytest.raises(NotFound, match="'a'"):
                service.job(BEN, "a")
            assert [each.residents[0].job for each in service.devices(BEN) if each.residents] == [""]
            assert [each.residents[0].job for each in service.devices(ADA) if each.residents] == ["a"]
            assert [span.job for span in service.timeline(BEN, 0.0, 2e6)] == [""]
            assert service.decisions(BEN)[0].reason == ""
            assert service.decisions(ADA)[0].reason != ""
            assert service.summary(ADA).held == 1.0

    asyncio.run(scenario())


@dataclass(frozen=True, slots=True)
class Chatty(Fifo):
    """Fifo whose reason names every job."""

    def plan(self, view: Snapshot) -> Plan:
        plan = Fifo.plan(self, view)
        words = "; ".join(f"{job.id} came at {job.submitted_at:g}, as was due to {job.id}." for job in view.active())
        return replace(plan, reason=f"{len(plan.changes)} start in order; {words}")


def test_reasons_hide_the_names_of_jobs_of_other_users(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path, policy=Chatty()) as rig:
            service = rig.service
            await service.submit(BEN, [listed("secret-project.v2"), listed("b")])
            await service.submit(ADA, [listed("a")])
            await service.cancel(BEN, "b")
            redacted = "1 start in order; a came at 0, as was due to a."
            assert service.job(ADA, "a").reason == service.decisions(ADA)[0].reason == redacted
            assert service.jobs(ADA).jobs[0].reason == redacted
            last = service.story(ADA, "a")[-1].words
            assert "cpu:1" in last
            assert last.endswith(redacted)
            assert "secret-project.v2" in service.job(BEN, "secret-project.v2").reason
            assert "secret-project.v2" in service.job(ADMIN, "a").reason
            assert "secret-project.v2" in service.job(READER, "a").reason
            assert [decision.reason for decision in service.decisions(ADA)][1:] == [""]

    asyncio.run(scenario())


def test_why_keeps_the_wait_but_hides_the_names_of_jobs_of_other_users(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path) as rig:
            service = rig.service
            await service.submit(BEN, [listed("secret-project.v2", devices=2)])
            await service.submit(ADA, [listed("a")])
            told = service.why(ADA, "a")
            assert "secret" not in told
            assert "waits behind another user's job (" in told
            assert "then gets cpu:0" in told
            assert "secret-project.v2" in service.why(ADMIN, "a")

    asyncio.run(scenario())


def test_why_of_a_preempted_job_ends_with_what_its_executor_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path) as rig:
            service = rig.service
            await service.submit(ADA, [listed("a")])
            await service.pause(ADA, "a")
            rig.read_model.accounting.tell(rig.read_model.now(), JobId("a"), "parked: its processes are stopped")
            assert service.why(ADA, "a").endswith("; parked: its processes are stopped")

    asyncio.run(scenario())


def test_only_an_admin_drains_a_node_which_then_gets_no_job(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path, a=1000) as rig:
            service = rig.service
            (node,) = service.nodes(ADMIN)
            with pytest.raises(Forbidden):
                await service.drain(ADA, node.name)
            with pytest.raises(NotFound, match=node.name):
                await service.drain(ADMIN, "no-such-node")
            with pytest.raises(Conflict):
                await service.undrain(ADMIN, node.name)
            await service.submit(ADA, [listed("a")])
            await service.drain(ADMIN, node.name)
            (drained,) = service.nodes(ADMIN)
            assert (drained.is_drained, drained.is_lost, drained.held) == (True, False, 0)
            assert service.job(ADA, "a").phase is Phase.WAITING
            await service.undrain(ADMIN, node.name)
            assert not service.nodes(ADMIN)[0].is_drained
            assert service.job(ADA, "a").phase is Phase.RUNNING

    asyncio.run(scenario())


def test_only_the_owner_and_an_admin_change_a_job(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path, a=1000) as rig:
            service = rig.service
            await service.submit(ADA, [listed("a")])
            with pytest.raises(NotFound):
                await service.cancel(BEN, "a")
            with pytest.raises(Forbidden, match="read-only"):
                await service.cancel(READER, "a")
            with pytest.raises(Forbidden, match="read-only"):
                await service.submit(READER, [listed("b")])
            await service.pause(ADA, "a")
            assert service.job(ADA, "a").phase is Phase.PAUSED
            with pytest.raises(Conflict, match="is paused"):
                await service.pause(ADA, "a")
            await service.resume(ADA, "a")
            await service.cancel(ADMIN, "a")
            assert service.job(ADA, "a").phase is Phase.CANCELLED
            with pytest.raises(Conflict, match="is cancelled"):
                await service.cancel(ADA, "a")

    asyncio.run(scenario())


def test_a_taken_name_gets_a_number_and_dependencies_follow(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path) as rig:
            service = rig.service
            await service.submit(ADA, [listed("a")])
            names = await service.submit(BEN, [listed("a"), listed("b", after=(JobId("a"),))])
            assert names == ("a-2", "b")
            assert service.job(BEN, "b").after == ("a-2",)

    asyncio.run(scenario())


def test_requests_with_the_same_idempotency_key_submit_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path) as rig:
            service = rig.service
            both = await asyncio.gather(*(service.submit(ADA, [listed("a")], key="once") for _ in range(2)))
            assert both == [("a",), ("a",)]
            assert await service.submit(BEN, [listed("a")], key="once") == ("a-2",)
            with pytest.raises(InputError, match="'once'"):
                await service.submit(ADA, [listed("b")], key="once")

    asyncio.run(scenario())


def test_a_rejected_submission_frees_its_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path, a=1000) as rig:
            service = rig.service
            for _ in range(2):
                with pytest.raises(InputError, match="exists already"):
                    await service.submit(ADA, [listed("a"), listed("a")], key="once")
            assert await service.submit(ADA, [listed("c")], key="once") == ("c",)
            assert service.job(ADA, "c").phase is Phase.RUNNING

    asyncio.run(scenario())


def test_idempotency_keys_survive_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path, a=1000) as rig:
            service = rig.service
            await service.submit(ADA, [listed("a")], key="once")
        store = Store.open(tmp_path / "store", Header("1", "fifo", TWO_CORES))
        notes = {name: each["note"] for entry in store.entries() for name, each in entry.details.items()}
        store.close()
        assert notes[JobId("a")]["key"] == "once"
        async with open_service(tmp_path / "second", notes=notes) as rig:
            assert await rig.service.submit(ADA, [listed("a")], key="once") == ("a",)
            assert rig.service.jobs(ADA).total == 0

    asyncio.run(scenario())


def test_a_job_that_can_never_fit_is_rejected(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path) as rig:
            service = rig.service
            with pytest.raises(InputError, match="9 devices"):
                await service.submit(ADA, [listed("a", devices=9)])
            assert service.jobs(ADA).total == 0
            await service.submit(ADA, [listed("b")])
            with pytest.raises(InputError, match="9 devices"):
                await service.set_limits(ADA, "b", 9, 9)
            assert service.job(ADA, "b").max_devices == 1

    asyncio.run(scenario())


def test_logs_are_read_in_chunks_and_curves_are_thinned(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path, a=1000) as rig:
            service = rig.service
            await service.submit(ADA, [listed("a")])
            assert service.log(ADA, "a").text == ""
            folder = JobFolder(tmp_path, "a").path
            folder.mkdir(parents=True)
            (folder / "log").write_text("one\ntwo\n", encoding="utf-8")
            chunk = service.log(ADA, "a", most=4)
            assert (chunk.text, chunk.next, chunk.is_over) == ("one\n", 4, False)
            assert service.log(ADA, "a", chunk.next).text == "two\n"
            assert service.log(ADA, "a", -4).text == "two\n"
            rows = [{"at_s": float(n), "step": n, "loss": 1.0 / (n + 1), "steps_per_s": 2.0} for n in range(10)]
            text = "".join(json.dumps(row) + "\n" for row in rows) + '{"at_s": 1'
            (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
            points = await service.measurements(ADA, "a", most=4)
            assert [point.step for point in points] == [0, 3, 6, 9]
            assert points[-1].at == 1_000_009.0

    asyncio.run(scenario())


@dataclass(frozen=True, slots=True)
class ThreadRecorder(TimeBase):
    """A time base that records the threads it is called in."""

    threads: set[int] = field(default_factory=set)

    def unix(self, at: float) -> float:
        self.threads.add(threading.get_ident())
        return TimeBase.unix(self, at)


def test_a_curve_skips_damaged_lines_and_is_read_in_another_thread(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path, a=1000) as rig:
            await rig.service.submit(ADA, [listed("a")])
            folder = JobFolder(tmp_path, "a").path
            folder.mkdir(parents=True)
            damaged = b'{"at_s": 1.0, "st{"at_s": 2.0, "step": 2}\n', b"\xff\n", b"[]\n", b'{"step": 3}\n', b"\0\0\n"
            rows = [json.dumps({"at_s": n, "step": n}).encode() + b"\n" for n in (0, 9)]
            (folder / "metrics.jsonl").write_bytes(b"".join([rows[0], *damaged, rows[1]]))
            time_base = ThreadRecorder(1_000_000.0)
            service = SchedulerService(replace(rig.read_model, calendar=time_base))
            assert [point.step for point in await service.measurements(ADA, "a")] == [0, 9]
            assert threading.get_ident() not in time_base.threads

    asyncio.run(scenario())


def test_users_get_no_events_of_other_users_jobs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path, a=1000, b=1000) as rig:
            service = rig.service
            await service.submit(ADA, [listed("a")])
            await service.submit(BEN, [listed("b")])
            received: dict[str, list[str]] = {}
            for who in (ADA, READER):
                stream = service.events(who, after=0)
                received[who.name] = []
                async for event in stream:
                    received[who.name].append(f"{event.kind} {event.job}".strip())
                    if event.number == rig.read_model.events.feed.last or len(received[who.name]) == 4:
                        break
            assert received["ada"] == ["submitted a", "decision", "phase a", "decision"]
            assert received["screen"] == ["submitted a", "decision", "phase a", "submitted b"]

    asyncio.run(scenario())


def test_a_quota_counts_active_jobs(tmp_path: Path) -> None:
    async def scenario() -> None:
        quotas = Quotas(Quota(jobs=2), {"ben": Quota(devices=1, weight=3.0)})
        async with open_service(tmp_path, quotas=quotas) as rig:
            service = rig.service
            await service.submit(ADA, [listed("a"), listed("b")])
            with pytest.raises(QuotaExceeded, match=r"'ada' .* 3 jobs .* 2"):
                await service.submit(ADA, [listed("c")])
            await service.cancel(ADA, "a")
            await service.submit(ADA, [listed("c")])
            with pytest.raises(QuotaExceeded, match="2 devices"):
                await service.submit(BEN, [listed("d", devices=2)])
            await service.submit(BEN, [listed("e", weight=2.0)])
            assert rig.read_model.scheduler.jobs[JobId("e")].spec.weight == 6.0
            await service.set_weight(BEN, "e", service.job(BEN, "e").weight)
            assert service.job(BEN, "e").weight == 2.0
            assert rig.read_model.scheduler.jobs[JobId("e")].spec.weight == 6.0

    asyncio.run(scenario())


def test_limits_cannot_be_raised_above_the_quota(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path, quotas=Quotas(Quota(devices=2))) as rig:
            service = rig.service
            await service.submit(ADA, [listed("a"), listed("b")])
            for who in (ADA, ADMIN):
                with pytest.raises(QuotaExceeded, match=r"'ada' .* 3 devices"):
                    await service.set_limits(who, "a", 2, 2)
            await service.set_limits(ADA, "a", 1, 2)
            await service.cancel(ADA, "b")
            await service.set_limits(ADA, "a", 2, 2)
            await service.set_limits(ADA, "a", 1, 1)

    asyncio.run(scenario())


def test_nodes_show_host_resources_and_jobs_wait_for_them(tmp_path: Path) -> None:
    supplied = Cluster(tuple(replace(node, resources=HostResources(4, 8 << 30)) for node in TWO_CORES.nodes))

    async def scenario() -> None:
        async with open_service(tmp_path, cluster=supplied) as rig:
            service = rig.service
            await service.submit(ADA, [listed("a", cpus=3), listed("b", cpus=3)])
            (node,) = service.nodes(ADA)
            assert (node.supplies.cpus, node.taken.cpus, node.supplies.disk_bytes) == (4, 3, 0)
            assert service.job(ADA, "b").phase is Phase.WAITING
            assert "cores" in service.why(ADA, "b")
            with pytest.raises(InputError, match="5 cores"):
                await service.submit(ADA, [listed("much", cpus=5)])

    asyncio.run(scenario())


def test_foreign_processes_are_shown_with_device_and_node(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_service(tmp_path) as rig:
            service = rig.service
            await rig.loop.apply(OutsidersSeen(DeviceId(1), (ForeignProcess(7, "ben", "python", 5),), keeps_free=False))
            (node,) = service.nodes(BEN)
            assert node.outsiders == (ForeignProcessView("cpu:1", 7, "ben", "python", 5, False),)
            assert [device.outsiders for device in service.devices(BEN)] == [(), node.outsiders]
            await rig.loop.apply(OutsidersSeen(DeviceId(1)))
            assert service.nodes(BEN)[0].outsiders == ()

    asyncio.run(scenario())


def test_priorities_are_capped_and_missed_deadlines_shown(tmp_path: Path) -> None:
    async def scenario() -> None:
        quotas = Quotas(by_user={"ben": Quota(priority="normal")})
        async with open_service(tmp_path, quotas=quotas, a=1000) as rig:
            service = rig.service
            await service.submit(ADA, [listed("a", priority=1, weight=8.0, deadline_s=5.0)], key="once")
            assert await service.submit(ADA, [listed("a", priority=1, weight=8.0, deadline_s=4.0)], key="once") == (
                "a",
            )
            shown = service.job(ADA, "a")
            assert (shown.priority, shown.deadline, shown.is_late) == ("high", 1_000_005.0, False)
            assert shown.weight == 1.0
            await service.set_weight(ADA, "a", 2.0)
            assert service.job(ADA, "a").weight == 2.0
            assert rig.read_model.scheduler.jobs[JobId("a")].spec.weight == 16.0
            with pytest.raises(QuotaExceeded, match=r"high.*normal"):
                await service.submit(BEN, [listed("b", priority=1)])
            await rig.settle(6.0)
            await rig.settle(0.1)
            assert service.job(ADA, "a").is_late
            assert any("deadline" in event.words for event in service.story(ADA, "a"))
            assert service.job(ADA, "a").phase is Phase.RUNNING

    asyncio.run(scenario())
