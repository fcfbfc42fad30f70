"""Checkpoints: atomic writes, no code in files, damage is detected."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.runtime.errors import CheckpointError, LeaseEnded
from carpool.runtime.state.checkpoint import Checkpoints, FinalSaveRetries, load, save
from carpool.runtime.state.tensor_file import pack, unpack

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
    ),
    max_leaves=20,
)


def round_trip(value: Any) -> Any:
    return unpack(b"".join(bytes(chunk) for chunk in pack(value)), "x.ckpt")


@given(PLAIN)
def test_plain_values_round_trip(value: Any) -> None:
    back = round_trip(value)
    assert back == value
    assert repr(back) == repr(value), "types too: 1 is not True, a tuple is no list"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.tensor(5),
        torch.zeros(0, 2),
        torch.randn(5).bfloat16(),
        torch.randn(5).half(),
        torch.randn(5, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.tensor([float("nan"), float("inf"), -0.0]),
    ],
)
def test_tensors_round_trip(tensor: torch.Tensor) -> None:
    back = round_trip({"a": [tensor, (tensor,)]})
    assert back["a"][0].dtype == tensor.dtype
    assert back["a"][0].shape == tensor.shape
    raw = [
        t.contiguous().reshape(-1).view(torch.uint8).tolist() if t.numel() else [] for t in (back["a"][1][0], tensor)
    ]
    assert raw[0] == raw[1]
    back["a"][0].zero_()  # it owns its memory


def test_containers_round_trip() -> None:
    value: dict[Any, Any] = {
        "counter": Counter([2, 2, 5]),
        "ordered": OrderedDict(b=1, a=2),
        "deque": deque([1, 2]),
        "set": {1, 2},
        "dtype": torch.float16,
        "inf": float("-inf"),
        3: np.float64(0.1),
        "array": np.arange(3),
    }
    back = round_trip(value)
    assert back.pop("array").tolist() == value.pop("array").tolist()
    assert back == value
    assert type(back["counter"]) is Counter
    assert back["counter"][99] == 0


def test_other_types_are_rejected() -> None:
    with pytest.raises(CheckpointError, match=r"state\.ema\[1\] is a \w*Path"):
        round_trip({"state": {"ema": [1, Path("x")]}})


def test_damage_anywhere_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path, {"x": torch.arange(100), "y": "words"})
    whole = path.read_bytes()
    for place in range(8, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"a\.ckpt: checksum mismatch"):
            load(path)
    for length in (0, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"a\.ckpt: .*truncated"):
            load(path)
    path.write_bytes(b"PK\3\4" + bytes(200))
    with pytest.raises(CheckpointError, match=r"a\.ckpt: .*b'PK"):
        load(path)


def test_a_file_of_a_newer_schema_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.runtime.state.tensor_file.SCHEMA", 9)
    content = b"".join(bytes(chunk) for chunk in pack({}))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"a\.ckpt: .*schema 9.* reads 1"):
        unpack(content, "a.ckpt")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no\.ckpt: .*No such file"):
        load(tmp_path / "no.ckpt")


def test_a_new_file_replaces_the_old_one_atomically(tmp_path: Path) -> None:
    path, old_file = tmp_path / "a.ckpt", tmp_path / "old_file"
    save(path, {"x": 1})
    os.link(path, old_file)
    save(path, {"x": 2})
    assert (load(path), load(old_file)) == ({"x": 2}, {"x": 1}), "the old file was not written into"


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.ckpt"
    save(path, {"x": 1})

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match=r"a\.ckpt: .*disk is full \(\d+ MiB free\)"):
        save(path, {"x": 2})
    monkeypatch.undo()
    assert load(path) == {"x": 1}
    assert list(tmp_path.iterdir()) == [path], "no partial file is left"


def test_a_full_device() -> None:
    """/dev/full fails every write with "no space left", as a full disk does."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(OSError, match="No space left"), full.open("wb") as file:
        file.writelines(bytes(chunk) for chunk in pack({"x": torch.zeros(10000)}))


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"a\.ckpt: .*(File exists|Not a directory)"):
        save(tmp_path / "file" / "a.ckpt", {})


def test_the_last_few_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "job", keep=2)
    assert (checkpoints.latest(), checkpoints.best) == (None, None)
    for step in range(1, 6):
        checkpoints.save(step * 100, {"step": step}, is_best=step in {1, 2})
    assert [path.name for path in checkpoints.paths()] == ["step-000000400.ckpt", "step-000000500.ckpt"]
    assert checkpoints.best is not None
    assert load(checkpoints.best) == {"step": 2}
    found = checkpoints.latest()
    assert found is not None
    assert (found.state, found.damaged) == ({"step": 5}, ())
    assert len(list(checkpoints.folder.iterdir())) == 3


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 10_000_000_000):
        checkpoints.save(step, {"step": step})
    newest = checkpoints.paths()[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    found = checkpoints.latest()
    assert found is not None
    assert found.state == {"step": 2}
    assert len(found.damaged) == 1
    assert "step-10000000000.ckpt: checksum mismatch" in found.damaged[0]
    for path in checkpoints.paths():
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-10000000000"):
        checkpoints.latest()


def test_keep_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"keep is 0.*at least 1"):
        Checkpoints(tmp_path, keep=0)


def test_partial_files_of_dead_processes_are_deleted(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    abandoned, alive = (tmp_path / f".step-000000003.ckpt.{pid}.part" for pid in (gone.pid, os.getpid()))
    for draft in (abandoned, alive):
        draft.write_bytes(b"half")
    Checkpoints(tmp_path).save(4, {"step": 4})
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive.name, "step-000000004.ckpt"]


def test_partial_files_of_another_machine_are_kept_for_a_day(tmp_path: Path) -> None:
    fresh, old = (tmp_path / f".step-00000000{n}.ckpt.0123456789ab-1.part" for n in (1, 2))
    for draft in (fresh, old):
        draft.write_bytes(b"half")
    os.utime(old, (0, 0))
    Checkpoints(tmp_path).save(4, {"step": 4})
    assert sorted(path.name for path in tmp_path.iterdir()) == [fresh.name, "step-000000004.ckpt"]


def test_a_held_folder_that_was_deleted_is_made_again_and_one_that_was_replaced_is_not_written(tmp_path: Path) -> None:
    held = Checkpoints(tmp_path / "held").hold()
    shutil.rmtree(held.folder)
    assert held.save(1, {"step": 1}) == held.folder / "step-000000001.ckpt"
    assert load(held.folder / "step-000000001.ckpt") == {"step": 1}
    held.folder.rename(tmp_path / "aside")
    held.folder.mkdir()
    held.save(2, {"step": 2})
    assert held.paths() == []
    shutil.rmtree(tmp_path / "aside")
    with pytest.raises(CheckpointError):
        held.save(3, {"step": 3})
    assert held.paths() == []


def test_the_limit_of_a_file_is_named_and_ends_the_tries_of_a_final_save(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match="1000 bytes") as raised:
            save(tmp_path / "step-1.ckpt", {"model": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    retries = FinalSaveRetries()
    assert [retries.is_exhausted(raised.value) for _ in range(5)] == [False] * 4 + [True]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), LeaseEnded("moved")], ids=["full disk", "no lease"])
def test_a_final_save_is_tried_without_limit_where_a_later_one_may_succeed(error: Exception) -> None:
    retries = FinalSaveRetries()
    assert not any(retries.is_exhausted(error) for _ in range(100))


@pytest.mark.parametrize("lasts", [0, 1], ids=["before the save", "during the save"])
def test_nothing_is_saved_once_another_machine_may_run_the_job(lasts: int, tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(3, {"step": 3})
    answers = iter([True] * lasts + [False])
    with pytest.raises(LeaseEnded):
        Checkpoints(tmp_path, 1, answers.__next__).save(4, {"step": 4}, is_best=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000003.ckpt"]
