"""Nothing acknowledged is lost: both copies, damage to either, and by name what damage to both has taken."""

import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carpool.backends.executors import LOCAL
from carpool.core.errors import JournalError
from carpool.core.journal import Header
from carpool.core.messages import JobCancelled, JobSubmitted, Record
from carpool.core.model import JobId, JobSpec
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.service.store.accept_log import read_log
from carpool.service.store.database import MIGRATIONS
from carpool.service.store.store import (
    DATABASE,
    LOG,
    CommitMark,
    ExecutorMark,
    Store,
    StoredReport,
    StoredSnapshot,
    snapshot_text,
)

HEADER = Header("1", "fifo", Cluster.build([(1, 2, "cpu")]))
NUM_RECORDS = 12


def submission(number: int) -> Record:
    return Record(float(number), (JobSubmitted(JobSpec(JobId(f"job-{number}"), weight=float(number))),))


Opening = Callable[[Path], Store]


@pytest.fixture
def opened() -> Iterator[Opening]:
    """Opens stores and lets go of all of them in the end; a store that is opened twice was killed in between."""
    with ExitStack() as stack:
        yield lambda folder: stack.enter_context(closing(Store.open(folder, HEADER)))


def fill(store: Store, count: int = NUM_RECORDS) -> Store:
    for number in range(1, count + 1):
        store.record(submission(number))
        store.commit()
    return store


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that was killed: its write-ahead log has not been taken back into the database."""
    lived = tmp_path_factory.mktemp("lived")
    store = fill(Store.open(lived, HEADER))
    killed = tmp_path_factory.mktemp("killed") / "store"
    shutil.copytree(lived, killed)
    store.close()
    return killed


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that was closed: all of it is in the pages of the database, which have no checksums."""
    folder = tmp_path_factory.mktemp("settled")
    fill(Store.open(folder, HEADER)).close()
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "store"))


def records_in(store: Store) -> list[Record]:
    return [entry.record._replace(facts=tuple(entry.record.facts), ignored=()) for entry in store.entries()]


EXPECTED = [submission(number) for number in range(1, NUM_RECORDS + 1)]


def flip(path: Path, place: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << bit
    path.write_bytes(content)


def strike(folder: Path, text: bytes, bits: int = 2) -> None:
    """Flip bits of a text wherever it stands, in every file."""
    struck = bytes([text[0], text[1] ^ 8, text[2] ^ (8 if bits > 1 else 0), *text[3:]])
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes().replace(text, struck))


# -------------------------------------------------------------------------------------------------------- undisturbed
def test_a_killed_store_has_all_it_committed(folder: Path, opened: Opening) -> None:
    store = opened(folder)
    assert records_in(store) == EXPECTED
    assert store.findings.messages() == ()
    assert store.header == HEADER


def test_what_was_not_committed_was_never_accepted(tmp_path: Path, opened: Opening) -> None:
    store = fill(opened(tmp_path), 2)
    store.record(submission(3))
    again = opened(tmp_path)
    assert records_in(again) == EXPECTED[:2]


def test_records_after_a_reopening_follow_those_before(folder: Path, opened: Opening) -> None:
    store = opened(folder)
    store.record(submission(13))
    store.close()
    again = opened(folder)
    assert records_in(again) == [*EXPECTED, submission(13)]
    assert again.findings.messages() == ()


def test_what_a_job_is_made_of_is_kept_with_it(tmp_path: Path, opened: Opening) -> None:
    store = opened(tmp_path)
    store.detail(JobId("job-1"), {"entry": "digits.py:mlp", "args": {"lr": 0.1}})
    store.record(submission(1))
    store.record(submission(2))
    store.close()
    first, second = opened(tmp_path).entries()
    assert (first.number, first.details) == (1, {"job-1": {"entry": "digits.py:mlp", "args": {"lr": 0.1}}})
    assert second.details == {}


def test_a_new_store_says_nothing_of_losses(tmp_path: Path, opened: Opening) -> None:
    assert opened(tmp_path / "deep" / "down").findings.messages() == ()


# ------------------------------------------------------------------------------------------------------------- damage
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(name=st.sampled_from([DATABASE, DATABASE + "-wal", LOG]), place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_in_any_file_loses_nothing(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, name: str, place: int, bit: int
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path_factory.mktemp("flip") / "store"))
    flip(folder / name, place, bit)
    store = Store.open(folder, HEADER)
    assert records_in(store) == EXPECTED
    assert store.findings.is_sound
    store.close()
    again = Store.open(folder, HEADER)  # what was put right is right on the disk
    assert (records_in(again), again.findings.messages()) == (EXPECTED, ())
    again.close()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(name=st.sampled_from([DATABASE, DATABASE + "-wal", LOG]), size=st.integers(0, 10**6))
def test_either_copy_may_be_cut_anywhere(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, name: str, size: int
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path_factory.mktemp("cut") / "store"))
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: size % len(content)])
    store = Store.open(folder, HEADER)
    assert records_in(store) == EXPECTED
    assert store.findings.is_sound
    store.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    places=st.lists(st.tuples(st.sampled_from([DATABASE, DATABASE + "-wal", LOG]), st.integers(0, 10**6)), max_size=6)
)
def test_whatever_is_damaged_every_job_is_there_or_named(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, places: list[tuple[str, int]]
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path_factory.mktemp("flips") / "store"))
    for name, place in places:
        flip(folder / name, place, place % 8)
    store = Store.open(folder, HEADER)
    numbers = [entry.number for entry in store.entries()]
    lost = [number for number, _ in store.findings.lost]
    assert records_in(store) == [EXPECTED[number - 1] for number in numbers], "nothing that was never accepted"
    assert set(range(1, NUM_RECORDS + 1)) <= {*numbers, *lost}
    store.close()


def test_a_record_lost_in_both_copies_is_named(folder: Path, opened: Opening) -> None:
    strike(folder, b'"job-5","weight"')
    store = opened(folder)
    assert store.findings.lost == ((5, ("job-5",)),), "the line after it has the name"
    assert "Record 5 is lost" in store.findings.messages()[-1]
    assert "'job-5'" in store.findings.messages()[-1]
    assert [record.at for record in records_in(store)] == [float(n) for n in range(1, 13) if n != 5]


def test_the_newest_record_lost_in_both_copies_is_named_from_its_remains(folder: Path, opened: Opening) -> None:
    strike(folder, b'"weight":12.0')
    store = opened(folder)
    assert store.findings.lost == ((12, ("job-12",)),)


def test_an_unreadable_database_is_set_aside_and_built_anew(folder: Path, opened: Opening) -> None:
    (folder / f"{DATABASE}-wal").unlink()
    (folder / DATABASE).write_bytes(b"this is no database" * 100)
    store = opened(folder)
    assert records_in(store) == EXPECTED
    assert store.findings.set_aside == folder / f"{DATABASE}.damaged-1"
    assert store.findings.from_log == tuple(range(1, NUM_RECORDS + 1))


def test_a_database_whose_head_says_read_only_is_set_aside_and_built_anew(
    settled: Path, tmp_path: Path, opened: Opening
) -> None:
    folder = Path(shutil.copytree(settled, tmp_path / "store"))
    flip(folder / DATABASE, 18, 2)  # the version of the format that is written: a higher one may only be read
    store = opened(folder)
    assert records_in(store) == EXPECTED
    assert store.findings.set_aside == folder / f"{DATABASE}.damaged-1"
    store.record(submission(13))
    store.commit()


def test_a_missing_log_is_written_anew(folder: Path, opened: Opening) -> None:
    (folder / LOG).unlink()
    store = opened(folder)
    assert records_in(store) == EXPECTED
    assert store.findings.from_database == tuple(range(1, NUM_RECORDS + 1))
    assert ["1-12" in message for message in store.findings.messages()] == [True]
    assert len(read_log((folder / LOG).read_bytes()).lines) == NUM_RECORDS + 1


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(number=st.integers(1, NUM_RECORDS), places=st.lists(st.integers(0, 10**6), min_size=1, max_size=6))
def test_altered_text_in_the_database_is_never_taken_for_what_was_accepted(
    settled: Path, tmp_path_factory: pytest.TempPathFactory, number: int, places: list[int]
) -> None:
    folder = Path(shutil.copytree(settled, tmp_path_factory.mktemp("altered") / "store"))
    row = (folder / DATABASE).read_bytes().rindex(f'"job-{number}"'.encode())
    flip(folder / DATABASE, row + 5, 1)
    log = (folder / LOG).read_bytes().splitlines(keepends=True)
    log[number] = b"gone" + log[number][4:]
    (folder / LOG).write_bytes(b"".join(log))
    for place in places:
        flip(folder / DATABASE, place, place % 8)
    with closing(Store.open(folder, HEADER)) as store:
        kept = [entry.number for entry in store.entries()]
        assert records_in(store) == [EXPECTED[place - 1] for place in kept]
        assert {number} <= {place for place, _ in store.findings.lost} or number in kept


def test_a_line_cut_short_was_never_acknowledged(folder: Path, opened: Opening) -> None:
    with (folder / LOG).open("ab") as stream:
        stream.write(b"0123abcd 0123abcd 13 {")
    store = opened(folder)
    assert records_in(store) == EXPECTED
    assert store.findings.cut
    assert len(store.findings.messages()) == 1


# --------------------------------------------------------------------------------------------------------- full disks
def test_a_commit_that_fails_leaves_both_copies_as_they_were(folder: Path, opened: Opening) -> None:
    store = opened(folder)
    other = sqlite3.connect(folder / DATABASE, isolation_level=None)
    other.execute("PRAGMA busy_timeout = 0")
    store._opened().database._connection.execute("PRAGMA busy_timeout = 0")
    other.execute("BEGIN IMMEDIATE")  # somebody else writes: the commit cannot
    store.record(submission(13))
    with pytest.raises(sqlite3.OperationalError):
        store.commit()
    assert len(read_log((folder / LOG).read_bytes()).lines) == NUM_RECORDS + 1
    other.execute("ROLLBACK")
    other.close()
    store.record(submission(14))
    with pytest.raises(sqlite3.OperationalError):
        store.commit()
    store.close()
    assert records_in(opened(folder)) == EXPECTED, "who was told that it was not kept may ask again, once"


def test_a_disk_too_full_for_a_snapshot_fails_no_commit(tmp_path: Path, opened: Opening) -> None:
    store = fill(opened(tmp_path), 3)
    large = {JobId("job-1"): {"entry": "x" * (1 << 22)}}
    kept = store.take_snapshot(lived(store, 3).state(), large)
    store.store_snapshot_later(kept, snapshot_text(kept), 1)
    with _files_up_to(1 << 20):
        fill_from(store, 4, 5)
    fill_from(store, 6, 7)
    again = opened(tmp_path)
    assert records_in(again) == EXPECTED[:7]
    assert (again.snapshot, again.findings.messages()) == (None, ())


def test_a_log_that_cannot_be_written_anew_fails_no_commit(tmp_path: Path, opened: Opening) -> None:
    store = fill(opened(tmp_path), 6)
    (tmp_path / LOG).with_suffix(".new").mkdir()
    kept = store.take_snapshot(lived(store, 6).state())
    store.store_snapshot_later(kept, snapshot_text(kept), 2)
    fill_from(store, 7, 8)
    (tmp_path / LOG).with_suffix(".new").rmdir()
    assert list(read_log((tmp_path / LOG).read_bytes()).lines) == list(range(9)), "the old one goes on"
    store.retain(2)
    fill_from(store, 9, 9)
    store.close()
    again = opened(tmp_path)
    assert records_in(again) == EXPECTED[4:9]
    assert again.findings.messages() == ()


def fill_from(store: Store, first: int, last: int) -> None:
    for number in range(first, last + 1):
        store.record(submission(number))
        store.commit()


@contextmanager
def _files_up_to(size: int) -> Iterator[None]:
    """No file grows beyond so many bytes, as on a disk that is full."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))


# ---------------------------------------------------------------------------------------------- snapshots, retention
def lived(store: Store, upto: int) -> Scheduler:
    scheduler = Scheduler(HEADER.cluster, Fifo())
    for record in EXPECTED[:upto]:
        scheduler.handle(record.at, record.facts)
    return scheduler


def test_a_start_folds_only_what_follows_the_newest_snapshot(tmp_path: Path, opened: Opening) -> None:
    store = fill(opened(tmp_path), 6)
    store.store_snapshot(lived(store, 6).state())
    store.record(Record(7.0, (JobCancelled(JobId("job-2")),)))
    store.close()
    again = opened(tmp_path)
    assert again.snapshot is not None
    assert (again.snapshot.number, len(again.snapshot.state.jobs)) == (6, 6)
    assert [entry.number for entry in again.entries(after=6)] == [7]


def test_a_snapshot_may_be_written_out_while_records_go_on(tmp_path: Path, opened: Opening) -> None:
    store = opened(tmp_path)
    store.record(submission(1))
    closed = store.take_snapshot(lived(store, 1).state())
    store.record(submission(2))
    store.store_snapshot_later(closed, snapshot_text(closed), 100)
    assert store.snapshot is None  # not before what it stands for is durable
    store.commit()
    again = opened(tmp_path)
    assert again.snapshot == closed
    assert [entry.number for entry in again.entries(closed.number)] == [2]


def test_what_a_snapshot_holds_may_be_forgotten(tmp_path: Path, opened: Opening) -> None:
    store = fill(opened(tmp_path), 6)
    store.forget_before(5)
    assert len(records_in(store)) == 6, "nothing stands for them yet"
    balance = lived(store, 6).state()
    details = {JobId("job-1"): {"entry": "digits.py:mlp"}}
    store.store_snapshot(balance, details)
    store.forget_before(4)
    store.record(submission(7))
    store.close()
    again = opened(tmp_path)
    assert records_in(again) == [submission(number) for number in range(4, 8)]
    assert (again.findings.messages(), again.snapshot) == ((), StoredSnapshot(6, balance, details))
    again.forget_before(1000)
    again.close()
    last = opened(tmp_path)
    assert records_in(last) == [submission(7)], "only what the snapshot holds"
    last.close()
    (tmp_path / DATABASE).unlink()
    rebuilt = opened(tmp_path)
    assert (records_in(rebuilt), rebuilt.snapshot) == ([submission(7)], StoredSnapshot(6, balance, details)), (
        "the log has the snapshot too"
    )
    rebuilt.store_snapshot(balance)
    rebuilt.forget_before(1000)
    rebuilt.close()
    after = opened(tmp_path)
    assert records_in(after) == []
    after.record(submission(8))
    after.close()
    assert [entry.number for entry in opened(tmp_path).entries()] == [8], "numbers go on though nothing else is left"


def test_reports_and_marks_are_kept_with_the_records_they_came_before(tmp_path: Path, opened: Opening) -> None:
    store = opened(tmp_path)
    store.record(submission(1))
    store.mark = CommitMark(2, {LOCAL: ExecutorMark(1, 5)})
    store.add_report(1.5, {"report": "Told", "job": "job-1", "words": "hello"})
    store.record(submission(2))
    store.flush_reports(2.5)
    store.mark = CommitMark(2, {LOCAL: ExecutorMark(1, 6)})
    store.flush_reports(3.0)
    store.flush_reports(4.0)
    store.close()
    again = opened(tmp_path)
    told = StoredReport(1.5, {"report": "Told", "job": "job-1", "words": "hello"})
    assert [(entry.reports, entry.mark) for entry in again.entries()] == [
        ((), CommitMark()),
        ((told,), CommitMark(2, {LOCAL: ExecutorMark(1, 5)})),
        ((), CommitMark(2, {LOCAL: ExecutorMark(1, 6)})),
    ]
    assert [len(entry.record.facts) for entry in again.entries()] == [1, 1, 0]
    assert again.mark == CommitMark(2, {LOCAL: ExecutorMark(1, 6)})
    again.store_snapshot(lived(again, 2).state())
    again.forget_before(1000)
    again.close()
    assert opened(tmp_path).mark == CommitMark(2, {LOCAL: ExecutorMark(1, 6)}), "the snapshot has it too"


def test_instant_zero_has_a_date_that_outlives_every_start(tmp_path: Path) -> None:
    for now in (1000.0, 5000.0):
        store = Store.open(tmp_path, HEADER, lambda now=now: now)  # type: ignore[misc]
        assert store.begun_at == 1000.0
        store.record(Record(now, ()))
        store.close()


def test_a_crash_in_the_middle_of_forgetting(tmp_path: Path, opened: Opening) -> None:
    store = fill(opened(tmp_path / "store"), 6)
    store.store_snapshot(lived(store, 6).state())
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    store.forget_before(4)
    shutil.copy(tmp_path / "store" / LOG, tmp_path / "copy" / LOG)  # the log is new, the database still old
    again = opened(tmp_path / "copy")
    assert records_in(again) == [submission(number) for number in range(4, 7)]
    assert again.findings.messages() == ()


# ----------------------------------------------------------------------------------------------------------- versions
def test_a_record_names_the_executors_that_changed_and_a_start_collects_them(tmp_path: Path, opened: Opening) -> None:
    store = opened(tmp_path)
    for number in range(50):
        store.set_mark(f"host{number}", ExecutorMark(1, 1))
    fill(store, 2)
    store.set_mark("host7", ExecutorMark(1, 2))
    store.record(submission(3))
    store.set_mark("host8", ExecutorMark(2, 1))
    store.record(submission(4))
    store.commit()
    marks = [entry.mark for entry in store.entries()]
    assert [len(mark.executors) for mark in marks] == [50, 0, 1, 1], "the cost of a record is independent of executors"
    found = opened(tmp_path).mark
    assert len(found.executors) == 50
    assert [found.of(f"host{number}") for number in (6, 7, 8)] == [(1, 1), (1, 2), (2, 1)]


def test_a_snapshot_has_the_marks_of_all_executors_up_to_its_record(tmp_path: Path, opened: Opening) -> None:
    store = opened(tmp_path)
    for number in range(3):
        store.set_mark(f"host{number}", ExecutorMark(1, number))
    fill(store, 1)
    store.set_mark("host1", ExecutorMark(1, 9))
    kept = store.take_snapshot(Scheduler(HEADER.cluster, Fifo()).state())
    assert dict(kept.mark.executors) == {"host0": (1, 0), "host1": (1, 1), "host2": (1, 2)}


def test_a_store_of_a_newer_version_is_refused(folder: Path, opened: Opening) -> None:
    (folder / LOG).unlink()
    with sqlite3.connect(folder / DATABASE) as database:
        database.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    database.close()
    with pytest.raises(JournalError, match="the store is of version 4, this carpool reads up to 3"):
        opened(folder)


def test_a_damaged_version_number_is_no_newer_version(folder: Path, opened: Opening) -> None:
    with sqlite3.connect(folder / DATABASE) as database:
        database.execute("PRAGMA user_version = 7340033")
    database.close()
    store = opened(folder)
    assert records_in(store) == EXPECTED
    assert store.findings.set_aside is not None
