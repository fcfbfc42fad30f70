"""Files of jobs arrive whole and once, whatever the job and other requests do meanwhile."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from carpool.backends.job_transfer import CodeArchives, JobTransfer
from carpool.core.errors import InputError
from carpool.core.model import JobId
from carpool.jobs.hosts_file import Host
from carpool.jobs.program import Program
from carpool.runtime.errors import CheckpointError
from carpool.runtime.executor.job_folder import JobFolder
from carpool.runtime.remote.remote_files import FileService
from carpool.runtime.remote.remote_link import RemoteFiles
from carpool.runtime.remote.remote_protocol import CHUNK_BYTES
from carpool.runtime.state.checkpoint import Checkpoints

JOB = JobId("job")
NAME = "checkpoints/step-000000010.ckpt"


class NearFiles(RemoteFiles):
    """The files of an agent without a connection to it; `between` runs before each request is answered."""

    def __init__(self, there: Path, between: Callable[[str], None] = lambda do: None) -> None:
        super().__init__(Host("there", "127.0.0.1", 1, "0" * 32))
        self._service = FileService(there)
        self._between = between

    async def request(self, value: Mapping[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        await asyncio.sleep(0)
        self._between(value["do"])
        answer, content = await self._service.answer(value, payload)
        assert "error" not in answer, answer
        return answer, content


def transfer(folder: Path, between: Callable[[str], None] = lambda do: None) -> JobTransfer:
    return JobTransfer(folder / "here", NearFiles(folder / "there", between), CodeArchives(folder / "here"))


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / "jobs" / JOB / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name("draft").write_bytes(content)
    return path.with_name("draft").rename(path)


def test_two_fetches_of_a_job_at_once_do_not_mix(tmp_path: Path) -> None:
    content = os.urandom(3 * CHUNK_BYTES)
    write(tmp_path / "there", NAME, content)
    write(tmp_path / "there", "log", b"line\n")

    async def main() -> None:
        files = transfer(tmp_path)
        await asyncio.gather(files.fetch(JOB), files.fetch(JOB))

    asyncio.run(main())
    folder = JobFolder(tmp_path / "here", JOB).path
    assert (folder / NAME).read_bytes() == content
    assert (folder / "log").read_bytes() == b"line\n"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [Path(NAME).name]


def test_a_file_that_is_replaced_while_it_is_fetched_is_fetched_whole_the_next_time(tmp_path: Path) -> None:
    versions = [bytes([number]) * (2 * CHUNK_BYTES) for number in (1, 2)]
    write(tmp_path / "there", "checkpoints/best.ckpt", versions[0])
    reads = 0

    def replace_after_the_first_part(do: str) -> None:
        nonlocal reads
        reads += do == "read"
        if do == "read" and reads == 2:
            write(tmp_path / "there", "checkpoints/best.ckpt", versions[1])

    here = JobFolder(tmp_path / "here", JOB).path / "checkpoints" / "best.ckpt"

    async def main() -> None:
        files = transfer(tmp_path, replace_after_the_first_part)
        await files.fetch(JOB)
        assert not here.exists()
        await files.fetch(JOB)

    asyncio.run(main())
    assert here.read_bytes() == versions[1]


def test_a_file_that_vanishes_keeps_no_other_from_being_fetched(tmp_path: Path) -> None:
    old = write(tmp_path / "there", "checkpoints/step-000000001.ckpt", b"old")
    write(tmp_path / "there", NAME, b"new")
    asyncio.run(transfer(tmp_path, lambda do: old.unlink(missing_ok=True) if do == "read" else None).fetch(JOB))
    assert [copy.step for copy in JobFolder(tmp_path / "here", JOB).state_copies()] == [10]


def test_a_worker_of_an_earlier_stay_cannot_write_to_the_next(tmp_path: Path) -> None:
    there = JobFolder(tmp_path / "there", JOB)
    returner = Checkpoints(there.checkpoints).hold()
    returner.save(5, {"weights": "of the first stay"})
    write(tmp_path / "there", "cuts.jsonl", b"{}\n")
    write(tmp_path / "here", NAME, b"of the second stay")
    asyncio.run(transfer(tmp_path).bring(JOB, Program(), resume=True))
    before = {path: path.read_bytes() for path in there.path.rglob("*") if path.is_file()}
    assert [path.relative_to(there.path).as_posix() for path in before] == [NAME]
    with pytest.raises(CheckpointError):
        returner.save(99, {"weights": "of the first stay"}, is_best=True)
    assert {path: path.read_bytes() for path in there.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("by", ["argument", "link"])
def test_a_path_that_a_machine_lacks_is_refused_before_anything_is_sent(by: str, tmp_path: Path) -> None:
    data, folder = tmp_path / "data.bin", tmp_path / "code"
    data.touch()
    folder.mkdir()
    if by == "link":
        (folder / "data").symlink_to(data)
    program = Program(args={"data": str(data)} if by == "argument" else {}, folder=str(folder))
    files = transfer(tmp_path, lambda do: data.unlink() if do == "missing" else None)
    with pytest.raises(InputError, match=re.escape(f"host 'there': job 'job' names {data}, which does not exist")):
        asyncio.run(files.bring(JOB, program, resume=True))
    assert not (tmp_path / "there").exists()


def test_a_log_that_grows_while_it_is_fetched_arrives_once(tmp_path: Path) -> None:
    log = write(tmp_path / "there", "log", b"step 1\n")

    def grow(do: str) -> None:
        if do == "read" and log.stat().st_size < 100:
            with log.open("ab") as file:
                file.write(b"step 2\n")

    moving = transfer(tmp_path, grow)
    asyncio.run(moving.fetch(JOB))
    asyncio.run(moving.fetch(JOB))
    here = tmp_path / "here" / "jobs" / JOB / "log"
    assert here.read_bytes() == log.read_bytes()
    with log.open("ab") as file:
        file.write(b"the end\n")
    files = NearFiles(tmp_path / "there")
    next_daemon = JobTransfer(tmp_path / "here", files, CodeArchives(tmp_path / "here"), continues=True)
    asyncio.run(next_daemon.fetch(JOB))
    assert here.read_bytes() == log.read_bytes(), "the next daemon goes on where this one ended"


def test_the_newest_mirror_is_fetched_kept_until_a_newer_state_is_here_and_resumed_from(tmp_path: Path) -> None:
    def names(place: str) -> list[str]:
        return sorted(path.name for path in JobFolder(tmp_path / place, JOB).checkpoints.iterdir())

    async def main() -> None:
        now = [0.0]
        files = JobTransfer(
            tmp_path / "here",
            NearFiles(tmp_path / "there", lambda do: now.__setitem__(0, now[0] + (do == "read"))),  # each takes 1 s
            CodeArchives(tmp_path / "here"),
            clock=lambda: now[0],
        )
        write(tmp_path / "there", NAME, b"ten")
        write(tmp_path / "there", "checkpoints/mirror-000000009.ckpt", b"nine")
        await files.fetch(JOB)
        assert names("here") == ["step-000000010.ckpt"], "an older mirror is of no use"
        write(tmp_path / "there", "checkpoints/mirror-000000012.ckpt", b"twelve")
        await files.fetch(JOB)
        write(tmp_path / "there", "checkpoints/mirror-000000013.ckpt", b"thirteen")
        await files.fetch(JOB)
        assert names("here") == ["mirror-000000012.ckpt", "step-000000010.ckpt"], "one a second is too many"
        now[0] += 100.0
        await files.fetch(JOB)
        assert names("here") == ["mirror-000000013.ckpt", "step-000000010.ckpt"]
        await files._send_checkpoints(JOB, resume=True)
        assert names("there") == ["mirror-000000013.ckpt", "step-000000010.ckpt"]
        assert [copy.step for copy in JobFolder(tmp_path / "there", JOB).state_copies()] == [10, 13]
        write(tmp_path / "there", "checkpoints/step-000000014.ckpt", b"fourteen")
        await files.fetch(JOB)
        assert names("here") == ["step-000000010.ckpt", "step-000000014.ckpt"]

    asyncio.run(main())
