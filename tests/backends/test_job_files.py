"""Files of a job: torn lines cost no others, and one unwritable folder affects no other job."""

import json
from pathlib import Path

from carpool.backends.job_files import JobFileWriter
from carpool.backends.run_folder import RunFolder
from carpool.core.model import JobId
from carpool.runtime.executor.reports import Evaluation, Outcome, Told


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
