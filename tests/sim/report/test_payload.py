"""What is packed into a page comes out of it again."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from carpool.sim.report.payload import (
    MAX_TICK,
    drawings,
    pack,
    pack_text,
    payload,
    script_json,
    thinned,
    tick_for,
    unpack,
)
from carpool.sim.report.recording import RunRecord
from tests.sim.report.samples import head, recording, run, summary


def opened(value: object) -> Any:
    """The payload as a reader of JSON sees it."""
    return json.loads(script_json(value))


@given(st.lists(st.integers(0, MAX_TICK)), st.booleans())
def test_columns_round_trip(values: list[int], delta: bool) -> None:
    assert list(unpack(pack(array("i", values), delta=delta))) == values


def test_text_round_trips() -> None:
    names = ["a\nb", "</script>", "é", "\u2028"]
    assert json.loads(unpack(pack_text(names)).tobytes()) == names


def test_holdings_round_trip() -> None:
    runs = [run("fifo", 40), run("sjf", 25)]
    data = opened(payload(head(), runs, drawings(runs)))
    ids = json.loads(unpack(data["table"]["ids"]).tobytes())
    for record, packed in zip(runs, data["runs"], strict=True):
        columns = {name: unpack(column) for name, column in cast(Mapping[str, Any], packed["holdings"]).items()}
        found = {
            (ids[job], first, first + width, round(start * 0.001, 3), round((start + length) * 0.001, 3), part / 1000)
            for job, first, width, start, length, part in zip(
                *(columns[name] for name in ("job", "first", "width", "start", "length", "permille")), strict=True
            )
        }
        made, held = record.recording, record.recording.holdings
        assert found == {
            (made.job_ids[job], first, stop, start, end, part)
            for job, first, stop, start, end, part in zip(
                held.job, held.first, held.stop, held.start_s, held.end_s, held.fraction, strict=True
            )
        }


def test_times_count_from_the_first_submission() -> None:
    late = recording(0)
    late.held(late.submitted("a", 5_000.0, 1), 0, 1, 5_010.0, 5_020.0)
    record = RunRecord("fifo", summary("fifo"), late)
    data = opened(payload(head(), [record], drawings([record])))
    assert list(unpack(data["runs"][0]["holdings"]["start"])) == [10_000]
    assert data["span_s"] == 20.0


def test_a_long_trace_gets_a_coarser_tick() -> None:
    assert (tick_for(3600.0), tick_for(86_400.0 * 100)) == (0.001, 0.01)


def test_the_page_shares_its_room_between_runs_and_says_so() -> None:
    runs = [run("small", 10), run("large", 200)]
    small, large = drawings(runs, limit=60)
    assert (len(small.holdings), len(large.holdings)) == (10, 50)
    assert thinned(runs[0], small) == []
    assert "150 shortest of 200 device holdings" in thinned(runs[1], large)[0]
    assert len(runs[1].recording.holdings) == 200  # the recording itself is left alone


def test_script_json_cannot_leave_its_element() -> None:
    text = script_json({"id": "</script><!--<script>&\u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"id": "</script><!--<script>&\u2028"}
