"""Checkpoints: whole or absent, without code, and honest when they fail."""

from __future__ import annotations

import errno
import os
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
from carpool.runtime.errors import CheckpointError
from carpool.runtime.state.checkpoint import Checkpoints, load, save
from carpool.runtime.state.tensor_file import pack, unpack

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
    ),
    max_leaves=20,
)


def there_and_back(value: Any) -> Any:
    return unpack(b"".join(bytes(chunk) for chunk in pack(value)), "x.ckpt")


@given(PLAIN)
def test_plain_values_come_back(value: Any) -> None:
    back = there_and_back(value)
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
def test_tensors_come_back(tensor: torch.Tensor) -> None:
    back = there_and_back({"a": [tensor, (tensor,)]})
    assert back["a"][0].dtype == tensor.dtype
    assert back["a"][0].shape == tensor.shape
    raw = [
        t.contiguous().reshape(-1).view(torch.uint8).tolist() if t.numel() else [] for t in (back["a"][1][0], tensor)
    ]
    assert raw[0] == raw[1]
    back["a"][0].zero_()  # it owns its memory


def test_containers_come_back() -> None:
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
    back = there_and_back(value)
    assert back.pop("array").tolist() == value.pop("array").tolist()
    assert back == value
    assert type(back["counter"]) is Counter
    assert back["counter"][99] == 0


def test_what_would_need_code_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"state\.ema\[1\] is a \w*Path; checkpoints hold tensors, numbers, strings"
    ):
        there_and_back({"state": {"ema": [1, Path("x")]}})


def test_damage_is_seen_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path, {"x": torch.arange(100), "y": "words"})
    whole = path.read_bytes()
    for place in range(8, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"a\.ckpt: the checksum does not match; the file is damaged"):
            load(path)
    for length in (0, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"a\.ckpt: .*cut off"):
            load(path)
    path.write_bytes(b"PK\3\4" + bytes(200))
    with pytest.raises(CheckpointError, match=r"a\.ckpt: not a checkpoint of carpool; it begins with b'PK"):
        load(path)


def test_a_file_of_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.runtime.state.tensor_file.SCHEMA", 9)
    content = b"".join(bytes(chunk) for chunk in pack({}))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"a\.ckpt: written with schema 9; this version of carpool reads 1"):
        unpack(content, "a.ckpt")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no\.ckpt: the checkpoint cannot be read: No such file"):
        load(tmp_path / "no.ckpt")


def test_a_new_file_takes_the_place_of_the_old_one_at_once(tmp_path: Path) -> None:
    path, witness = tmp_path / "a.ckpt", tmp_path / "witness"
    save(path, {"x": 1})
    os.link(path, witness)
    save(path, {"x": 2})
    assert (load(path), load(witness)) == ({"x": 2}, {"x": 1}), "the old file was not written into"


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.ckpt"
    save(path, {"x": 1})

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(
        CheckpointError, match=r"a\.ckpt: the checkpoint was not written: the disk is full \(\d+ MiB free\)"
    ):
        save(path, {"x": 2})
    monkeypatch.undo()
    assert load(path) == {"x": 1}
    assert list(tmp_path.iterdir()) == [path], "no half file stays behind"


def test_a_really_full_disk() -> None:
    """/dev/full fails every write with "no space left", as a full disk does."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(OSError, match="No space left"), full.open("wb") as file:
        file.writelines(bytes(chunk) for chunk in pack({"x": torch.zeros(10000)}))


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=r"a\.ckpt: the checkpoint was not written: (File exists|Not a directory)"
    ):
        save(tmp_path / "file" / "a.ckpt", {})


def test_the_last_few_and_the_best_are_kept(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path / "job", keep=2)
    assert (kept.latest(), kept.best) == (None, None)
    for step in range(1, 6):
        kept.save(step * 100, {"step": step}, is_best=step in {1, 2})
    assert [path.name for path in kept.paths()] == ["step-000000400.ckpt", "step-000000500.ckpt"]
    assert kept.best is not None
    assert load(kept.best) == {"step": 2}
    found = kept.latest()
    assert found is not None
    assert (found.state, found.damaged) == ({"step": 5}, ())
    assert len(list(kept.folder.iterdir())) == 3


def test_a_damaged_newest_falls_back_and_is_told(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 10_000_000_000):
        kept.save(step, {"step": step})
    newest = kept.paths()[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    found = kept.latest()
    assert found is not None
    assert found.state == {"step": 2}
    assert len(found.damaged) == 1
    assert "step-10000000000.ckpt: the checksum does not match" in found.damaged[0]
    for path in kept.paths():
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole: .*step-10000000000"):
        kept.latest()


def test_keep_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="keep is 0; at least 1 checkpoint must be kept"):
        Checkpoints(tmp_path, keep=0)


def test_what_a_killed_writer_has_begun_is_cleared_away(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    abandoned, alive = (tmp_path / f".step-000000003.ckpt.{pid}.part" for pid in (gone.pid, os.getpid()))
    for draft in (abandoned, alive):
        draft.write_bytes(b"half")
    Checkpoints(tmp_path).save(4, {"step": 4})
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive.name, "step-000000004.ckpt"]
