"""A store says after a restart what it was told before, whatever of it a balance stands for by now."""

import asyncio
from contextlib import closing
from pathlib import Path

from carpool.backends.ledger import Ledger
from carpool.backends.lessons import Lessons
from carpool.backends.live import Live
from carpool.core.journal import Header
from carpool.core.model import JobId, JobSpec
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.fifo import Fifo
from carpool.runtime.jobfile import Listed
from carpool.runtime.program import Program
from carpool.service.chronicle import Chronicle
from carpool.service.daemon import Daemon
from carpool.service.feed import Feed
from carpool.service.host import Host
from carpool.service.recovery import Followers, recover_followers, recover_scheduler
from carpool.service.spans import Spans
from carpool.service.store import Store
from carpool.testing.fake_link import FakeMachine
from carpool.testing.office import at_once

HEADER = Header("1", "fifo", Cluster.build([(1, 1, "cpu")]))
JOB = JobId("a")


def followers() -> Followers:
    cluster = HEADER.cluster
    return Followers(Ledger(), Live(cluster), Spans(cluster), Chronicle(Feed()), Lessons(cluster, "1"))


def test_what_a_training_said_of_itself_outlives_the_record_it_was_said_in(tmp_path: Path) -> None:
    async def play(store: Store) -> None:
        machine, learned = FakeMachine({"a": 100}, batch=(8, 64)), followers()
        scheduler = Scheduler(HEADER.cluster, Fifo(), observers=(store, learned))
        host = Host(take=learned.take, sized=learned.lessons.sized)
        daemon = Daemon(scheduler, store, machine, machine, host, commit=at_once)
        machine.at(5.0, lambda: daemon.stop(leave_running=True))
        running = asyncio.create_task(daemon.run())
        await daemon.submit([Listed(JobSpec(JOB), Program(entry="digits.py:mlp"))])
        await running
        daemon.keep_balance()

    with closing(Store.open(tmp_path, HEADER)) as store:
        asyncio.run(play(store))
        store.forget_before(1 << 30)
    with closing(Store.open(tmp_path, HEADER)) as store:
        assert not list(store.entries())
        scheduler, learned = Scheduler(HEADER.cluster, Fifo()), followers()
        recover_scheduler(store, scheduler)
        recover_followers(store, scheduler, learned)
        assert learned.live.total(JOB) == 100.0
        assert learned.live.own_batch(JobSpec(JOB)) == 8
        assert learned.lessons.sized(JOB) is not None, "so that the next balance knows it too"
        [(_, account)] = learned.ledger.accounts.items()
        assert account.held == scheduler.jobs[JOB].desired
        assert [span.job for span in learned.spans.between(0.0, 9.0)] == [JOB]
