"""View builders: logs are read in chunks of whole characters."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.backends.job_accounting import JobAccount
from carpool.backends.online_estimator import OnlineEstimator
from carpool.cli.render.live_table import progress
from carpool.core.model import Allocation, Job, JobId, JobSpec, Phase
from carpool.core.topology import Cluster
from carpool.service.queries.present import TimeBase, job_story, job_view, read_log, seconds_left
from carpool.service.queries.results import results_view


@given(text=st.text(), most=st.integers(1, 9))
def test_a_log_read_in_chunks_is_the_log(tmp_path_factory: pytest.TempPathFactory, text: str, most: int) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_bytes(text.encode("utf-8", "replace"))
    most = max(most, 4)  # the longest character
    for is_over in (True, False):
        start, read = 0, ""
        while (chunk := read_log(path, start, most, is_over=is_over)).text:
            assert chunk.next > start
            start, read = chunk.next, read + chunk.text
        assert read == path.read_bytes().decode()
        assert chunk.is_over == is_over


def test_an_incomplete_character_is_read_later(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes("ä".encode() + "ö".encode()[:1])
    assert read_log(path, 0, 99, is_over=False).text == "ä"
    assert read_log(path, 0, 99, is_over=True).text == "ä\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("is_over", [True, False])
def test_a_log_with_holes_is_read_without_them(tmp_path: Path, is_over: bool) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"a" * 4095 + "\N{LATIN SMALL LETTER A WITH DIAERESIS}".encode()[:1])
        file.seek(50 << 30)
        file.write(b"end\n")
    first = read_log(path, 0, 1 << 20, is_over=is_over)
    second = read_log(path, first.next, 1 << 20, is_over=is_over)
    assert first.text == "a" * 4095 + "\N{REPLACEMENT CHARACTER}"
    assert second.text == "end\n"
    assert second.next == path.stat().st_size


def test_a_job_of_unknown_length_has_no_seconds_left() -> None:
    cluster = Cluster.build([(1, 1, "cpu")])
    estimator = OnlineEstimator(cluster)
    held = Allocation.of(0)
    job = Job(JobSpec(JobId("sleep")), 0, 0.0, Phase.RUNNING, held, 1, held, 1, done=5.0, rate=1.0)
    assert seconds_left(job, 10.0, estimator) is None
    estimator.expect(JobId("sleep"), 25.0)
    found = seconds_left(job, 10.0, estimator)
    assert found is not None
    assert found.mean_s == 10.0


def test_a_history_begins_with_all_that_was_requested() -> None:
    account = JobAccount(JobSpec(JobId("a"), weight=3.0, after=(JobId("b"),)), 0.0)
    (event,) = job_story(account, TimeBase(0.0), {}, lambda words: words.replace("b", "another job"), 60.0)
    assert (
        event.words
        == "was submitted: requests 1 device, weight 3, at most 60 s of running (time_limit), after another job"
    )


def test_steps_are_those_that_were_reported_everywhere() -> None:
    account = JobAccount(JobSpec(JobId("a")), 0.0, Phase.RUNNING, done=30.0, rate=5.0, as_of=10.0)
    shown = job_view(account, phase=Phase.RUNNING, redact=str, at=20.0, time_base=TimeBase(0.0), names={})
    assert shown.steps == account.steps == results_view("s", [account], 20.0).rows[0].steps == 30
    assert progress(account, 100.0).startswith("step 30 of 100")
