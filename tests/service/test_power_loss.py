"""After a power loss nothing synced is lost where one copy is whole, what is lost is named, and a daemon starts."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from carpool.core.journal import Header
from carpool.jobs.devices import parse_devices
from carpool.service.auth import Principal, Role
from carpool.service.daemon.bootstrap import DaemonInstance, DaemonOptions
from carpool.service.store.store import LOG
from tests.support.power_loss import DAMAGES, Damage, SnapshotCommit, StoreSnapshot, examine, lay_out, strike
from tests.support.service_rig import TWO_CORES, listed, open_service

ADMIN = Principal("root", Role.ADMIN)
HEADER = Header("1", "fifo", TWO_CORES)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[StoreSnapshot, StoreSnapshot]]:
    """Pictures of a daemon's store while jobs come, run and end."""
    folder = tmp_path_factory.mktemp("rig")
    camera = SnapshotCommit(folder / "store")

    async def scenario() -> None:
        async with open_service(folder, commit=camera.commit) as rig:
            for number in range(6):
                jobs = [listed(f"job-{number}-{place}") for place in range(2)]
                await rig.service.submit(ADMIN, jobs, key=f"key-{number}")
                await rig.settle(400.0)
            await rig.service.cancel(ADMIN, "job-5-1")

    asyncio.run(scenario())
    found = camera.pairs()
    assert len(found) > 6
    assert len(found[-1][1].jobs) == 12
    return found


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name.replace(" ", "-"))
def test_nothing_is_lost_in_silence(
    damage: Damage, pairs: list[tuple[StoreSnapshot, StoreSnapshot]], tmp_path: Path
) -> None:
    chance = Random(damage.name)
    for _ in range(12):
        now, then = chance.choice([pair for pair in pairs if pair[0].jobs])
        folder = lay_out(damage.harm(chance, now, then), tmp_path / "store")
        verdict = examine(folder, HEADER, now, then)
        if damage is DAMAGES[-1]:  # up to 24 bits in a few kB: what can be said of what is lost depends on where
            assert not verdict.invented, verdict
            assert not verdict.told_again, verdict
        else:
            assert verdict.is_fine(damage), verdict


@pytest.mark.parametrize("damage", DAMAGES[-3:], ids=lambda damage: damage.name.replace(" ", "-"))
def test_a_daemon_opens_and_says_what_it_found(
    damage: Damage, pairs: list[tuple[StoreSnapshot, StoreSnapshot]], tmp_path: Path
) -> None:
    chance = Random(damage.name)
    now, then = pairs[-1]
    house = DaemonInstance.open(
        DaemonOptions(lay_out(damage.harm(chance, now, then), tmp_path), tuple(parse_devices("cpu:2")), "1", "fifo")
    )
    try:
        known = set(house.observers.accounting.accounts)
        named = {job for _, jobs in house.store.findings.lost for job in jobs}
        assert now.jobs <= known | named
        assert bool(house.notices) == bool(house.store.findings.messages())
        assert all(job in " ".join(house.notices) for job in named)
    finally:
        house.close()


def test_a_job_that_is_lost_is_named(pairs: list[tuple[StoreSnapshot, StoreSnapshot]], tmp_path: Path) -> None:
    now, then = pairs[-1]
    verdict = examine(lay_out(strike(Random(3), now, 1, 4), tmp_path), HEADER, now, then)
    assert (verdict.named, verdict.unnamed_jobs) == (1, frozenset())
    [message] = [message for message in verdict.told if "Record 1 is lost" in message]
    assert "'job-0-0'" in message
    assert "'job-0-1'" in message


def test_an_altered_line_ending_loses_nothing_while_the_database_is_whole(
    pairs: list[tuple[StoreSnapshot, StoreSnapshot]], tmp_path: Path
) -> None:
    now, then = pairs[-1]
    for old, new in ((b"\n", b"\x0b"), (b"J", b"\n")):  # the second puts a line ending where there is none
        files = {**now.files, LOG: now.files[LOG].replace(old, new, 1)}
        verdict = examine(lay_out(files, tmp_path), HEADER, now, then)
        assert (verdict.kept, verdict.named) == (len(now.accepted), 0)
        assert not any("is lost" in words for words in verdict.told)
