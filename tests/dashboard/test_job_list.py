"""Job list: sorting, pagination and query strings."""

from dataclasses import fields, replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.model import JobId, Phase
from carpool.dashboard.job_list import PER_PAGE, SORTS, JobFilter, JobList, devices_requested, sort_jobs
from carpool.service.queries.views import DeviceShareView, JobView, TimeEstimate

_KNOWN: dict[str, Any] = {
    **{field.name: None for field in fields(JobView)},
    "id": JobId("a"),
    "user": "ada",
    "phase": Phase.WAITING,
    "submitted_at": 0.0,
    "holds": (),
    "metrics": {},
    "min_devices": 1,
    "max_devices": 1,
    "waited_s": 0.0,
    "steps": 0.0,
    "steps_per_s": 0.0,
}
PLAIN = JobView(**_KNOWN)

VIEWS = st.builds(
    lambda number, phase, steps, ends, loss, held: replace(
        PLAIN,
        id=JobId(f"j{number}"),
        phase=phase,
        steps=steps,
        total_steps=10.0,
        ends_in=ends and TimeEstimate(ends, 1.0),
        loss=loss,
        holds=tuple(DeviceShareView(0, "x", 1.0) for _ in range(held)),
    ),
    st.integers(0, 999),
    st.sampled_from(list(Phase)),
    st.floats(0.0, 10.0),
    st.none() | st.floats(0.1, 1e6),
    st.none() | st.floats(0.0, 9.0),
    st.integers(0, 3),
)


@given(st.lists(VIEWS, max_size=30), st.sampled_from(SORTS), st.booleans())
def test_sorting_keeps_all_jobs(jobs: list[JobView], sort: str, is_descending: bool) -> None:
    ordered = sort_jobs(jobs, JobFilter(sort=sort, is_descending=is_descending))
    assert sorted(map(id, ordered)) == sorted(map(id, jobs))


@given(st.lists(VIEWS, max_size=30), st.booleans())
def test_jobs_without_a_value_come_last(jobs: list[JobView], is_descending: bool) -> None:
    losses = [job.loss for job in sort_jobs(jobs, JobFilter(sort="loss", is_descending=is_descending))]
    known = [loss for loss in losses if loss is not None]
    assert losses == sorted(known, reverse=is_descending) + [None] * (len(losses) - len(known))


@given(st.integers(0, 230), st.integers(1, 9))
def test_pages_cover_every_job_once(number: int, page: int) -> None:
    jobs = [replace(PLAIN, id=JobId(str(place))) for place in range(number)]
    listing = JobList.paginate(JobFilter(page=page), jobs, number, phases={}, now=0.0)
    assert [job.id for job in listing.jobs] == [str(place) for place in range(number)][listing.first - 1 :][:PER_PAGE]
    assert listing.pages == max(1, -(-number // PER_PAGE))


@given(st.dictionaries(st.sampled_from(["phase", "q", "user", "sort", "down", "page"]), st.text(max_size=12)))
def test_any_query_is_parsed_and_links_round_trip(query: dict[str, str]) -> None:
    filter_ = JobFilter.read(query)
    again = dict(parse_qsl(urlsplit(filter_.link(page=filter_.page)).query, keep_blank_values=True))
    assert JobFilter.read(again) == filter_


def test_the_link_of_the_sorted_column_reverses_it() -> None:
    filter_ = JobFilter(sort="loss", page=3)
    assert filter_.sorted_by("loss") == "/jobs?sort=loss&down=1"
    assert filter_.sorted_by("name") == "/jobs?sort=name"
    assert (filter_.direction("loss"), filter_.direction("name")) == ("ascending", "")


def test_requested_devices_are_a_number_or_a_range() -> None:
    assert devices_requested(PLAIN) == "1"
    assert devices_requested(replace(PLAIN, max_devices=4)) == "1–4"
