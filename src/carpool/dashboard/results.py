"""Results: the table of a sweep or run with the curves of its best jobs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from importlib import resources

from carpool.backends.run_folder import RunFolder
from carpool.core.model import JobId
from carpool.core.units import format_params
from carpool.dashboard.chart import Chart, Point, chart
from carpool.service.queries.present import TimeBase, read_curve
from carpool.service.queries.views import MeasurementView, ResultRow, ResultsView

MAX_CURVES = 8  # more cannot be distinguished
MAX_CURVE_POINTS = 300
STYLE_LINK = '<link rel="stylesheet" href="dashboard.css">'


@dataclass(frozen=True, slots=True)
class Results:
    """A sweep's table, and the chosen metric and the training loss of its best jobs over steps."""

    view: ResultsView
    metric: Chart
    loss: Chart

    @property
    def drawn(self) -> Mapping[str, int]:
        """Number of each drawn job's colour."""
        return {row.job: number for number, row in enumerate(drawn_rows(self.view))}


def drawn_rows(view: ResultsView) -> Sequence[ResultRow]:
    """The best jobs, whose curves are drawn."""
    return view.rows[:MAX_CURVES]


def draw_results(view: ResultsView, measured: Mapping[JobId, Sequence[MeasurementView]]) -> Results:
    """Draw the curves of the best jobs from their measurements."""
    metric, loss = list[tuple[str, list[Point]]](), list[tuple[str, list[Point]]]()
    for row in drawn_rows(view):
        name = f"{row.job} {format_params(row.params.items())}".strip()
        points = measured.get(row.job, ())
        metric.append(
            (name, [(each.step, each.metrics[view.metric]) for each in points if view.metric in each.metrics])
        )
        loss.append((name, [(each.step, each.loss) for each in points if each.loss is not None]))
    return Results(view, chart(metric), chart(loss))


def results_page(view: ResultsView, folder: RunFolder) -> str:
    """The results of a run as one HTML page that needs no server."""
    from carpool.dashboard.routes import template_environment  # it imports this module

    measured = {
        row.job: read_curve(folder.job(row.job) / "metrics.jsonl", TimeBase(0.0), MAX_CURVE_POINTS)
        for row in drawn_rows(view)
    }
    style = resources.files("carpool.dashboard").joinpath("static", "dashboard.css").read_text(encoding="utf-8")
    template = template_environment(UTC).get_template("results_file.html")
    page = template.render(results=draw_results(view, measured), is_file=True)
    return page.replace(STYLE_LINK, f"<style>{style}</style>", 1)
