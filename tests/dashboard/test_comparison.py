"""Reports of simulations: both formats, from a directory or uploaded."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.dashboard.comparison import Reports, read_comparison
from carpool.service.auth import Principal
from carpool.service.service import NotFound

ADA, BEN = Principal("ada"), Principal("ben")


def result(policy: str, jct: float) -> dict[str, object]:
    return {"policy": policy, "jobs": 10, "finished": 10, "avg_jct_s": jct, "utilisation": 0.5, "preemptions": 0}


DOCUMENT = json.dumps(
    {"schema": 1, "trace": "t.csv", "cluster": "8xV100", "results": [result("fifo", 200.0), result("srtf", 100.0)]}
)


def test_the_best_value_of_a_column_is_marked() -> None:
    found = read_comparison(DOCUMENT, "x")
    assert (found.policies, found.jobs, found.trace) == (("fifo", "srtf"), ("10 of 10", "10 of 10"), "t.csv")
    jct = found.columns[0]
    assert [(cell.fraction, cell.is_best) for cell in jct.cells] == [(1.0, False), (0.5, True)]
    assert not found.jct.curves


def test_a_report_page_has_curves() -> None:
    data = {
        "trace": "t",
        "cluster": "c",
        "runs": [
            {
                "policy": "fifo",
                "jobs": 2,
                "summary": {"finished": 2, "avg_jct_s": 5.0},
                "jct": {"x": [1.0, 9.0], "y": [0.5, 1.0]},
                "busy": {"at": [0.0, 9.0], "mean": [1.0, 0.0], "peak": [1.0, 1.0]},
            }
        ],
    }
    page = f'<p><script type="application/json" id="data">{json.dumps(data)}</script>'
    found = read_comparison(page, "x")
    assert found.jct.curves[0].name == "fifo"
    assert found.busy.curves


@pytest.mark.parametrize(
    "text", ["", "x", "[]", "3", "{}", '{"results": []}', '{"results": [{}]}', '{"results": 4}', "[" * 9999]
)
def test_anything_else_is_rejected(text: str) -> None:
    with pytest.raises(InputError, match="carpool simulate"):
        read_comparison(text, "x")


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda s: (
            st.lists(s)
            | st.dictionaries(st.sampled_from(["results", "runs", "policy", "jobs", "finished", "jct", "x", "y"]), s)
        ),
    )
)
def test_any_json_is_read_or_rejected(value: object) -> None:
    with contextlib.suppress(InputError):
        read_comparison(json.dumps(value), "x")


def test_only_files_of_the_directory_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    folder.mkdir()
    (folder / "good.json").write_text(DOCUMENT)
    (folder / "notes.txt").write_text("x")
    (tmp_path / "secret.json").write_text(DOCUMENT)
    reports = Reports(folder)
    assert [found.key for found in reports.listed(ADA)] == ["good.json"]
    assert reports.get(ADA, "good.json")[1].policies == ("fifo", "srtf")
    for key in ("../secret.json", "notes.txt", "/etc/passwd", ""):
        with pytest.raises(NotFound):
            reports.get(ADA, key)


def test_uploads_are_private() -> None:
    reports = Reports()
    key = reports.upload(ADA, "C:\\somewhere\\week.json", DOCUMENT)
    assert reports.get(ADA, key)[0] == "week.json"
    assert not reports.listed(BEN)
    with pytest.raises(NotFound):
        reports.get(BEN, key)


def test_only_the_newest_uploads_are_kept() -> None:
    reports = Reports()
    keys = [reports.upload(ADA, "", DOCUMENT + " " * number) for number in range(70)]
    assert len(reports.listed(ADA)) == 64
    with pytest.raises(NotFound):
        reports.get(ADA, keys[0])
