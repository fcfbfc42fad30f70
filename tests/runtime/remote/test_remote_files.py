"""Requests for files reach an agent's own folders only, and files are whole or absent."""

import asyncio
import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from carpool.jobs.code_archive import pack
from carpool.runtime.errors import CheckpointError
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.remote.remote_files import FileService
from carpool.runtime.state.checkpoint import Checkpoints


def ask(service: FileService, payload: bytes = b"", **request: Any) -> tuple[dict[str, Any], bytes]:
    return asyncio.run(service.answer(request, payload))


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "checkpoints/../log", "profile.json", "log\n"])
def test_only_a_jobs_own_files_can_be_read_and_written(path: str, tmp_path: Path) -> None:
    service = FileService(tmp_path / "state")
    assert "error" in ask(service, do="read", job="a", path=path, start=0)[0]
    assert "error" in ask(service, b"x", do="write", job="a", path=path, start=0, size=1)[0]
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("job", ["../x", "/x", "..", "a/b", ""])
def test_a_jobs_name_cannot_lead_out(job: str, tmp_path: Path) -> None:
    state = tmp_path / "deep" / "state"
    ask(FileService(state), b"x", do="write", job=job, path="log", start=0, size=1)
    assert all(path.is_relative_to(state / "jobs") for path in tmp_path.rglob("log"))


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    service = FileService(tmp_path)
    name = "checkpoints/step-000000001.ckpt"
    ask(service, b"ab", do="write", job="j", path=name, start=0, size=4)
    assert ask(service, do="list", job="j")[0]["files"] == []
    assert "error" in ask(service, b"cd", do="write", job="j", path=name, start=3, size=4)[0]
    ask(service, b"cd", do="write", job="j", path=name, start=2, size=4)
    status, content = ask(service, do="read", job="j", path=name, start=1)
    assert content == b"bcd"
    assert ask(service, do="list", job="j")[0]["files"] == [(name, *status["status"])]
    ask(service, do="renew", job="j")
    assert ask(service, do="list", job="j")[0]["files"] == []
    ask(service, do="drop", job="j")
    assert ask(service, do="jobs") == ({"jobs": []}, b"")


def test_what_a_job_puts_in_place_of_its_files_is_not_read(tmp_path: Path) -> None:
    service, folder = FileService(tmp_path), JobFolder(tmp_path, "j").path
    (folder / "checkpoints").mkdir(parents=True)
    (tmp_path / "secret").write_text("s3cret")
    os.mkfifo(folder / "log")
    (folder / "cuts.jsonl").symlink_to(tmp_path / "secret")
    (folder / "splits.jsonl").symlink_to("nowhere")
    name = "checkpoints/step-000000001.ckpt"
    os.mkfifo(folder / "checkpoints" / ".step-000000001.ckpt.part")
    ask(service, b"ab", do="write", job="j", path=name, start=0, size=2)
    assert [found[0] for found in ask(service, do="list", job="j")[0]["files"]] == [name]
    for path in ("log", "cuts.jsonl"):
        answer, content = ask(service, do="read", job="j", path=path, start=0)
        assert ("error" in answer, content) == (True, b"")


def test_code_is_stored_under_its_digest_only(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("x = 1\n")
    archive, service = pack(tmp_path / "code"), FileService(tmp_path / "state")
    size = len(archive.content)
    assert "error" in ask(service, archive.content, do="put_code", digest="0" * 64, size=size, start=0)[0]
    assert "error" in ask(service, archive.content, do="put_code", digest="../x", size=size, start=0)[0]
    assert ask(service, do="has_code", digest="0" * 64)[0] == {"has": False}
    ask(service, archive.content, do="put_code", digest=archive.digest, size=size, start=0)
    (tmp_path / "data").mkdir()
    missing = ask(service, do="unpack", job="j", digest=archive.digest, links={"d": "/no/such"})[0]
    assert "/no/such" in missing["error"]
    links = {"d": str(tmp_path / "data")}
    folder = Path(ask(service, do="unpack", job="j", digest=archive.digest, links=links)[0]["folder"])
    assert (folder / "train.py").read_text() == "x = 1\n"
    assert (folder / "d").is_dir()
    (folder / "written").touch()
    ask(service, do="unpack", job="j", digest=archive.digest, links=links)
    assert (folder / "written").exists(), "a resumed job finds what it wrote"


@pytest.mark.parametrize("request_", [{}, {"do": "x"}, {"do": "read"}, {"do": "read", "job": 1, "path": 2, "start": 0}])
def test_an_invalid_request_gets_an_answer(request_: dict[str, Any], tmp_path: Path) -> None:
    assert "error" in ask(FileService(tmp_path), **request_)[0]


def test_a_leftover_worker_that_saves_while_its_folder_is_deleted_does_not_write_to_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, folder = FileService(tmp_path), JobFolder(tmp_path, "j").checkpoints
    leftover = Checkpoints(folder).hold()
    leftover.save(1, {"model": 1})
    rmtree = shutil.rmtree

    def delete_and_save(path: Path, ignore_errors: bool) -> None:
        rmtree(path, ignore_errors=ignore_errors)
        with contextlib.suppress(CheckpointError):  # its folder is gone
            leftover.save(2, {"model": 2})

    monkeypatch.setattr(shutil, "rmtree", delete_and_save)
    assert ask(service, do="renew", job="j")[0] == {}
    assert list(folder.iterdir()) == []
