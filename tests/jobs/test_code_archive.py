"""A folder as an archive: equal for equal files, without what does not belong to the code, unpacked safely."""

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from carpool.core.errors import InputError
from carpool.jobs.code_archive import absolute_paths, pack, unpack


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "package").mkdir(parents=True)
    (folder / "train.py").write_text("x = 1\n")
    (folder / "package" / "data.txt").write_text("ä\n")
    (folder / "package" / "alias.py").symlink_to("../train.py")
    for excluded in (".git", "__pycache__", "venv"):
        (folder / excluded).mkdir()
        (folder / excluded / "file").write_text("no")
    (folder / "venv" / "pyvenv.cfg").touch()
    (folder / "state").mkdir()
    (folder / "state" / "journal").write_text("no")
    return folder


def test_it_is_equal_for_equal_files_and_leaves_the_rest_out(code: Path, tmp_path: Path) -> None:
    first = pack(code, exclude=[code / "state"])
    os.utime(code / "train.py", (1, 1))
    assert pack(code, exclude=[code / "state"]) == first
    unpack(first.content, tmp_path / "there")
    found = sorted(path.relative_to(tmp_path / "there").as_posix() for path in (tmp_path / "there").rglob("*"))
    assert found == ["package", "package/alias.py", "package/data.txt", "train.py"]
    assert (tmp_path / "there" / "package" / "alias.py").read_text() == "x = 1\n"
    (code / "train.py").write_text("x = 2\n")
    assert pack(code, exclude=[code / "state"]).digest != first.digest


def test_links_that_lead_out_are_named_not_packed(code: Path, tmp_path: Path) -> None:
    (tmp_path / "dataset").mkdir()
    (code / "data").symlink_to(tmp_path / "dataset")
    assert pack(code).links == {"data": str(tmp_path / "dataset")}


def test_too_large_a_folder_is_refused(code: Path) -> None:
    (code / "big").write_bytes(b"0" * 3000)
    with pytest.raises(InputError, match="max_code"):
        pack(code, max_bytes=2000)


@pytest.mark.parametrize("name", ["../out", "/tmp/carpool-out", "a/../../out"])
def test_an_archive_that_leads_out_of_its_folder_leaves_nothing(name: str, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb") as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    folder = tmp_path / "one" / "two"
    if name.startswith("/"):  # stripped to a path inside the folder
        unpack(buffer.getvalue(), folder)
        assert not Path(name).exists()
        return
    with pytest.raises(InputError):
        unpack(buffer.getvalue(), folder)
    assert not folder.exists()
    assert list((tmp_path / "one").iterdir()) == []


def test_a_damaged_archive_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        unpack(b"not an archive", tmp_path / "there")
    assert list(tmp_path.iterdir()) == []


def test_only_paths_that_exist_here_have_to_exist_there(tmp_path: Path) -> None:
    assert absolute_paths([str(tmp_path), "/no/such/path", "relative", 3, "/", "a\n/b"]) == [str(tmp_path)]
