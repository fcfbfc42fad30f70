"""Results of sweeps: which metric and job are chosen, and what a run's folder says after its end."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.backends.job_accounting import JobAccount
from carpool.backends.metric_summary import MetricSummaries, read_summaries
from carpool.core.errors import InputError
from carpool.core.model import HalvingRule, JobId, JobSpec, Phase
from carpool.runtime.executor.reports import Outcome
from carpool.service.queries.results import default_mode, results_view


def account(name: str, points: list[tuple[int, dict[str, float]]], **fields: object) -> JobAccount:
    spec = JobSpec(JobId(name), array="a", params=(("lr", name),), **fields)  # type: ignore[arg-type]
    made = JobAccount(spec, 0.0, Phase.FINISHED)
    for step, metrics in points:
        made.metrics.add(step, metrics)
    return made


def test_rows_are_ordered_by_the_best_value() -> None:
    accounts = [
        account("x", [(1, {"acc": 0.5}), (2, {"acc": 0.9}), (3, {"acc": 0.7})]),
        account("y", [(1, {"acc": 0.95})]),
        account("z", []),
    ]
    view = results_view("a", accounts, 0.0)
    assert (view.metric, view.mode, view.best) == ("acc", "max", "y")
    assert [row.job for row in view.rows] == ["y", "x", "z"]
    assert view.rows[1].best is not None
    assert view.rows[1].last is not None
    assert (view.rows[1].best.step, view.rows[1].last.value) == (2, 0.7)
    assert results_view("a", accounts, 0.0, mode="min").best == "x"


def test_nan_is_never_best() -> None:
    view = results_view("a", [account("x", [(1, {"loss": float("nan")})]), account("y", [(1, {"loss": 3.0})])], 0.0)
    assert (view.best, view.mode) == ("y", "min")
    assert view.rows[1].last is None


@pytest.mark.parametrize(
    ("reported", "metric"),
    [
        ([{"loss": 1.0, "val_acc": 1.0, "acc": 1.0}], "val_acc"),
        ([{"loss": 1.0, "rare": 1.0}, {"loss": 1.0}], "loss"),
        ([{"b": 1.0, "a": 1.0}], "a"),
        ([{"interval": 1.0, "device_s": 1.0, "acc": 1.0, "testAcc": 1.0}], "testAcc"),
        ([{"interval": 1.0, "acc": 1.0}], "acc"),
        ([{}], "loss"),
    ],
)
def test_the_default_metric(reported: list[dict[str, float]], metric: str) -> None:
    accounts = [account(f"j{place}", [(1, metrics)] if metrics else []) for place, metrics in enumerate(reported)]
    assert results_view("a", accounts, 0.0).metric == metric


def test_halving_names_the_default_metric_and_its_direction() -> None:
    rule = HalvingRule("score", False, 3, 10)
    view = results_view("a", [account("x", [(1, {"score": 1.0, "val_acc": 1.0})], halving=rule)], 0.0)
    assert (view.metric, view.mode) == ("score", "min")


def test_unknown_metrics_and_modes_are_refused() -> None:
    for wrong in ({"metric": "none"}, {"mode": "best"}):
        with pytest.raises(InputError):
            results_view("a", [account("x", [(1, {"acc": 1.0})])], 0.0, **wrong)


_LESS_IS_BETTER = (
    "loss val_loss valLoss L1Loss logloss top1_error error-rate perplexity test/WER eval.cer FID bits_per_char"
    " edit_distance cost stepTime time_s val_MSE RMSE2"
)
_MORE_IS_BETTER = "accuracy answer_f1 power confidence certainty merit sometimes mIoU BLEU rabbits"


@pytest.mark.parametrize("metric", _LESS_IS_BETTER.split())
def test_a_word_in_the_name_of_a_metric_says_that_less_is_better(metric: str) -> None:
    assert default_mode(metric) == "min"


@pytest.mark.parametrize("metric", _MORE_IS_BETTER.split())
def test_letters_within_a_word_do_not_say_that_less_is_better(metric: str) -> None:
    assert default_mode(metric) == "max"


def test_an_evaluated_loss_replaces_that_of_training() -> None:
    summaries = MetricSummaries()
    summaries.add_loss(1, 9.0)
    summaries.add(2, {"loss": 1.0})
    summaries.add_loss(3, 0.1)
    assert summaries.last == {"loss": 1.0}
    assert summaries.by_name["loss"].low == (2, 1.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_extremes_are_those_of_the_whole_curve(values: list[float]) -> None:
    summaries = MetricSummaries()
    for step, value in enumerate(values):
        summaries.add(step, {"m": value})
    found = summaries.by_name["m"]
    assert found.low is not None
    assert found.high is not None
    assert (found.low.value, found.high.value, found.last.value) == (min(values), max(values), values[-1])


def test_damaged_lines_of_a_metrics_file_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1.0, "loss": 0.5}\nnonsense\n[]\n{"step": "x", "metrics": {"acc": 1}}\n{"step": 2, "metrics": 7}\n'
        '{"step": 2, "metrics": {"acc": 0.5}}\n{"step": 3, "met',
        encoding="utf-8",
    )
    assert {name: found.last for name, found in read_summaries(path).by_name.items()} == {
        "loss": (1, 0.5),
        "acc": (2, 0.5),
    }
    assert read_summaries(tmp_path / "none").by_name == {}


def test_steps_and_loss_are_those_at_the_end() -> None:
    """The last steps are not reported as progress."""
    made = account("x", [])
    made.metrics.add_loss(2987, 0.9)
    made.close(Outcome(JobId("x"), 3000, 1, 0.7))
    (row,) = results_view("a", [made], 0.0).rows
    assert row.last is not None
    assert (row.steps, row.last.step, row.last.value) == (3000, 3000, 0.7)
