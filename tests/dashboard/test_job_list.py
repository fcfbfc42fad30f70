"""The list is sorted and cut as its address says, and no address breaks it."""

from dataclasses import fields, replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.model import JobId, Phase
from carpool.dashboard.job_list import PER_PAGE, SORTS, JobFilter, JobList, devices_asked, sort_jobs
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
def test_sorting_keeps_everybody(jobs: list[JobView], sort: str, is_down: bool) -> None:
    ordered = sort_jobs(jobs, JobFilter(sort=sort, is_down=is_down))
    assert sorted(map(id, ordered)) == sorted(map(id, jobs))


@given(st.lists(VIEWS, max_size=30), st.booleans())
def test_those_of_whom_nothing_is_known_are_last(jobs: list[JobView], is_down: bool) -> None:
    losses = [job.loss for job in sort_jobs(jobs, JobFilter(sort="loss", is_down=is_down))]
    known = [loss for loss in losses if loss is not None]
    assert losses == sorted(known, reverse=is_down) + [None] * (len(losses) - len(known))


@given(st.integers(0, 230), st.integers(1, 9))
def test_pages_cover_everybody_once(number: int, page: int) -> None:
    jobs = [replace(PLAIN, id=JobId(str(place))) for place in range(number)]
    listing = JobList.cut(JobFilter(page=page), jobs, number, phases={}, now=0.0)
    assert [job.id for job in listing.jobs] == [str(place) for place in range(number)][listing.first - 1 :][:PER_PAGE]
    assert listing.pages == max(1, -(-number // PER_PAGE))


@given(st.dictionaries(st.sampled_from(["phase", "q", "user", "sort", "down", "page"]), st.text(max_size=12)))
def test_no_address_breaks_it_and_every_choice_has_one(query: dict[str, str]) -> None:
    choice = JobFilter.read(query)
    again = dict(parse_qsl(urlsplit(choice.link(page=choice.page)).query, keep_blank_values=True))
    assert JobFilter.read(again) == choice


def test_a_column_is_turned_round_by_its_own_link() -> None:
    choice = JobFilter(sort="loss", page=3)
    assert choice.sorted_by("loss") == "/jobs?sort=loss&down=1"
    assert choice.sorted_by("name") == "/jobs?sort=name"
    assert (choice.direction("loss"), choice.direction("name")) == ("ascending", "")


def test_what_was_asked_is_a_number_or_a_range() -> None:
    assert devices_asked(PLAIN) == "1"
    assert devices_asked(replace(PLAIN, max_devices=4)) == "1–4"
