"""Mishaps from a file and at seeded rates."""

from pathlib import Path

import pytest

from carpool.core.errors import InputError
from carpool.core.messages import JobCrashed, NodeJoined, NodeLost, Record
from carpool.core.model import Phase
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.sim.failures import FailureEvent, RandomFailures, ScheduledFailures, read_failures
from carpool.sim.worlds.base import PlainWorld
from carpool.testing import drive
from carpool.testing.scenarios import job

TWO = Cluster.build([(2, 2, "V100")])


def written(folder: Path, text: str) -> Path:
    path = folder / "failures.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_good_file(tmp_path: Path) -> None:
    path = written(tmp_path, "at_s,event,target\n10,node-lost,n0\n12.5,job-crash,a\n20,node-back,n0\n")
    assert read_failures(path, TWO).failures == [
        FailureEvent(10.0, "node-lost", "n0"),
        FailureEvent(12.5, "job-crash", "a"),
        FailureEvent(20.0, "node-back", "n0"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "{path}: row 1: column 'at_s' is missing. A failure file starts with the line at_s,event,target."),
        ("at_s,event\n", "{path}: row 1: column 'target' is missing. A failure file"),
        ("at_s,event,target\n1,node-lost,n0\nsoon,node-lost,n0\n", "{path}: row 3: at_s is 'soon'. Give seconds"),
        ("at_s,event,target\n-1,node-lost,n0\n", "{path}: row 2: at_s is -1. Give seconds from 0 on."),
        ("at_s,event,target\ninf,node-lost,n0\n", "{path}: row 2: at_s is inf. Give seconds from 0 on."),
        ("at_s,event,target\nnan,node-lost,n0\n", "{path}: row 2: at_s is nan. Give seconds from 0 on."),
        ("at_s,event,target\n1,node-gone,n0\n", "{path}: row 2: unknown event 'node-gone'. Did you mean node-lost"),
        ("at_s,event,target\n1,node-lost,m0\n", "{path}: row 2: unknown node 'm0'. Did you mean n0"),
        ("at_s,event,target\n1,node-lost\n", "{path}: row 2: target is empty. Give at_s,event,target in every row."),
        ("at_s,event,target\n1,job-crash,\n", "{path}: row 2: target is empty. Give at_s,event,target in every row."),
        ("at_s,event,target\n1\n", "{path}: row 2: event is empty. Give at_s,event,target in every row."),
        ('at_s,event,target\n1,node-lost,"' + "x" * 200_000 + '"\n', "{path}: cannot be read: field larger than"),
    ],
)
def test_a_bad_file_is_named_with_row_and_value(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InputError) as refused:
        read_failures(path, TWO)
    assert str(refused.value).startswith(words.format(path=path))


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read: .*No such file"):
        read_failures(tmp_path / "none.csv", TWO)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="Give a UTF-8 CSV file"):
        read_failures(tmp_path / "bytes.csv", TWO)


def test_listed() -> None:
    failures = [
        FailureEvent(4.0, "node-lost", "n0"),
        FailureEvent(6.0, "node-back", "n0"),
        FailureEvent(7.0, "job-crash", "nobody"),
    ]
    run = drive(Fifo(), TWO, [job("a", 4)], PlainWorld(checkpoint_every=3.0), failures=[ScheduledFailures(failures)])
    assert run.outcome("a") is Phase.FINISHED
    assert run.records[-1].at == 6.0 + 7.0, "three units were kept"
    assert run.summary.preemptions == 1
    assert [
        type(fact) for record in run.records for fact in record.facts if isinstance(fact, NodeLost | NodeJoined)
    ] == [
        NodeLost,
        NodeJoined,
    ]


def test_a_job_that_ends_as_its_node_goes_has_ended() -> None:
    run = drive(Fifo(), TWO, [job("a", 2)], failures=[ScheduledFailures([FailureEvent(10.0, "node-lost", "n0")])])
    assert (run.outcome("a"), run.summary.preemptions) == (Phase.FINISHED, 0)


def failures_of(records: list[Record]) -> list[tuple[float, object]]:
    return [(r.at, fact) for r in records for fact in r.facts if isinstance(fact, NodeLost | NodeJoined | JobCrashed)]


def test_seeded_is_the_same_every_time_and_differs_by_seed() -> None:
    arrivals = [job(f"j{index}", 1 + index % 2, 50.0, at=5.0 * index) for index in range(12)]

    def run(seed: int) -> list[tuple[float, object]]:
        plan = RandomFailures(seed, node_mtbf_s=60.0, node_repair_s=10.0, job_mtbf_s=100.0)
        return failures_of(drive(Fifo(bypass=True), TWO, arrivals, failures=[plan]).records)

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert {type(fact) for _, fact in run(1)} == {NodeLost, NodeJoined, JobCrashed}


def test_seeded_rates_are_what_they_say() -> None:
    """One node for 100,000 s with a mean of 100 s up and 25 s down: 800 failures, give or take."""
    one = Cluster.build([(1, 1, "V100")])
    plan = RandomFailures(5, node_mtbf_s=100.0, node_repair_s=25.0)
    run = drive(Fifo(), one, [job("a", work=80_000.0)], failures=[plan])
    lost = [fact for _, fact in failures_of(run.records) if isinstance(fact, NodeLost)]
    assert 700 < len(lost) < 900


def test_crashes_hit_running_jobs_at_their_rate() -> None:
    """Four jobs for 5,000 s with a mean of 100 s between the crashes of each: 200 crashes, give or take."""
    plan = RandomFailures(5, job_mtbf_s=100.0)
    run = drive(Fifo(), TWO, [job(f"j{index}", work=5_000.0) for index in range(4)], failures=[plan])
    crashes = [fact for _, fact in failures_of(run.records) if isinstance(fact, JobCrashed)]
    assert 150 < len(crashes) < 250
    assert run.summary.finished == 4, "a crash with progress before it is not held against a job"
