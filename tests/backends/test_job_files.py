"""Files of a job: event files are as TensorBoard reads them, and one unwritable folder affects no other job."""

import json
import struct
from math import exp
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.backends.job_files import EventFile, JobFileWriter, crc32c
from carpool.backends.run_folder import RunFolder
from carpool.core.model import JobId
from carpool.runtime.executor.reports import Evaluation, Outcome, Told


def records(path: Path) -> list[bytes]:
    """The data of every record, checksums checked."""
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        data = content[12 : 12 + length]
        for part, masked in ((content[:8], content[8:12]), (data, content[12 + length : 16 + length])):
            rotated = (struct.unpack("<I", masked)[0] - 0xA282EAD8) & 0xFFFFFFFF
            assert crc32c(part) == (rotated >> 17 | rotated << 15) & 0xFFFFFFFF
        found.append(data)
        content = content[16 + length :]
    return found


def test_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


def test_points_are_written_as_tensorboard_reads_them(tmp_path: Path) -> None:
    file = EventFile(tmp_path, clock=lambda: 7.0)
    file.add(300, {"loss": 0.5, "accuracy": 1.0})
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("events.out.tfevents.")
    first, second = records(path)
    wall = b"\x09" + struct.pack("<d", 7.0)
    assert first == wall + b"\x1a\x0dbrain.Event:2"
    loss = b"\x0a\x04loss\x15" + struct.pack("<f", 0.5)
    accuracy = b"\x0a\x08accuracy\x15" + struct.pack("<f", 1.0)
    summary = b"\x0a" + bytes([len(loss)]) + loss + b"\x0a" + bytes([len(accuracy)]) + accuracy
    assert second == wall + b"\x10\xac\x02" + b"\x2a" + bytes([len(summary)]) + summary


@given(st.text(), st.floats() | st.integers(-(10**400), 10**400))
@example("perplexity", exp(100))
@example("\ud800", -1e300)
def test_any_figure_can_be_written(tmp_path_factory: pytest.TempPathFactory, tag: str, value: float) -> None:
    folder = tmp_path_factory.mktemp("events")
    EventFile(folder).add(1, {tag: value})
    (path,) = folder.iterdir()
    (written,) = struct.unpack("<f", records(path)[1][-4:])
    if abs(value) > 3.4e38:
        assert abs(written) > 3.3e38
        assert (written > 0) == (value > 0)
    else:
        assert written == pytest.approx(value, rel=1e-6, abs=1e-37, nan_ok=True)


def test_lines_that_were_torn_cost_no_others(tmp_path: Path) -> None:
    folder, job = RunFolder(tmp_path), JobId("a")
    folder.job("a").mkdir(parents=True)
    folder.append(job, "story.jsonl", {"at_s": 1.0, "what": "began"})
    with (folder.job("a") / "story.jsonl").open("ab") as file:
        file.write(b'{"schema":1,"at_s":2.0,"what":"was gut\xc3\n')  # in the middle of a character
    folder.append(job, "story.jsonl", {"at_s": 3.0, "what": "goes on"})
    assert [row["what"] for row in folder.rows(job, "story.jsonl")] == ["began", "goes on"]
    assert list(folder.rows(job, "none.jsonl")) == []


def test_a_folder_that_is_gone_takes_nothing_from_other_jobs(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    writer = JobFileWriter(folder)
    folder.job("b").mkdir(parents=True)
    for job in (JobId("a"), JobId("b")):
        writer.take(1.0, Told(job, "began"))
        writer.take(2.0, Evaluation(job, 7, {"perplexity": 1e300}))
        writer.take(3.0, Outcome(job, steps=7, epochs=1, loss=None, digest="d"))
    writer.cut()()
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["b"]
    assert json.loads((folder.job("b") / "story.jsonl").read_text())["what"] == "began"
    assert json.loads((folder.job("b") / "metrics.jsonl").read_text())["metrics"] == {"perplexity": 1e300}
    outcome = folder.outcome(JobId("b"))
    assert outcome is not None
    assert outcome.digest == "d"
