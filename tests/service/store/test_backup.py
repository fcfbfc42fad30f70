"""A backup is taken from under a working daemon, and put back whole or not at all."""

import io
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from carpool.core.errors import InputError
from carpool.core.journal import Header
from carpool.core.messages import JobSubmitted, Record
from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Cluster
from carpool.service.store.backup import check_backup, restore_backup, take_backup
from carpool.service.store.store import Store

HEADER = Header("1", "fifo", Cluster.build([(1, 1, "cpu")]))


def accept(store: Store, *names: str) -> None:
    for name in names:
        store.record(Record(0.0, [JobSubmitted(JobSpec(JobId(name)))], None, []))
    store.commit()


def names_in(folder: Path) -> list[str]:
    with closing(Store.open(folder, HEADER)) as store:
        assert store.findings.lost == ()
        return [fact.spec.id for record in store.records() for fact in record.facts if isinstance(fact, JobSubmitted)]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    (folder / "jobs" / "a" / "checkpoints").mkdir(parents=True)
    (folder / "jobs" / "a" / "log").write_text("hello\n", encoding="utf-8")
    (folder / "jobs" / "a" / "checkpoints" / "step-1.ckpt").write_bytes(b"\x01" * 3000)
    (folder / "lock").touch()
    return folder


def test_what_is_put_back_is_what_was_there_while_the_daemon_went_on(tmp_path: Path, state: Path) -> None:
    backup, back = tmp_path / "backup.tar", tmp_path / "back"
    with closing(Store.open(state, HEADER)) as store:
        accept(store, "a", "b")
        taken = take_backup(state, backup, version="1")
        accept(store, "c")
    assert set(taken.files) >= {"journal.sqlite", "accepted.log", "jobs/a/log", "jobs/a/checkpoints/step-1.ckpt"}
    assert "lock" not in taken.files
    assert backup.stat().st_mode & 0o777 == 0o600
    assert check_backup(backup) == taken
    assert restore_backup(backup, back) == taken
    assert names_in(back) == ["a", "b"]
    assert names_in(state) == ["a", "b", "c"]
    assert (back / "jobs/a/checkpoints/step-1.ckpt").read_bytes() == b"\x01" * 3000


def test_checkpoints_may_be_left_out(tmp_path: Path, state: Path) -> None:
    taken = take_backup(state, tmp_path / "backup.tar", version="1", checkpoints=False)
    assert set(taken.files) == {"jobs/a/log"}


def test_a_folder_in_use_is_not_overwritten(tmp_path: Path, state: Path) -> None:
    take_backup(state, tmp_path / "backup.tar", version="1")
    with pytest.raises(InputError, match="is not empty"):
        restore_backup(tmp_path / "backup.tar", state)


@pytest.mark.parametrize("where", [0.3, 0.6, 0.97])
def test_damage_is_found_and_nothing_is_put_back(tmp_path: Path, state: Path, where: float) -> None:
    backup = tmp_path / "backup.tar"
    with closing(Store.open(state, HEADER)) as store:
        accept(store, *(f"j{number}" for number in range(40)))
        take_backup(state, backup, version="1")
    whole = backup.read_bytes()
    with tarfile.open(backup) as archive:
        last = archive.getmembers()[-1]
    end = last.offset_data + last.size
    spot = int(end * where)
    backup.write_bytes(whole[:spot])
    with pytest.raises(InputError):
        restore_backup(backup, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_flipped_bit_in_a_file_is_found(tmp_path: Path, state: Path) -> None:
    backup = tmp_path / "backup.tar"
    take_backup(state, backup, version="1")
    whole = bytearray(backup.read_bytes())
    whole[whole.index(b"\x01" * 100)] ^= 4
    backup.write_bytes(whole)
    with pytest.raises(InputError, match=r"damaged: .*jobs/a/checkpoints/step-1\.ckpt"):
        check_backup(backup)


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out"])
def test_nothing_is_written_outside(tmp_path: Path, name: str) -> None:
    backup = tmp_path / "evil.tar"
    with tarfile.open(backup, "w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(InputError, match="no backup contains"):
        restore_backup(backup, tmp_path / "deep" / "back")
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_state_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        take_backup(tmp_path / "nowhere", tmp_path / "backup.tar", version="1")
    assert not (tmp_path / "backup.tar").exists()
