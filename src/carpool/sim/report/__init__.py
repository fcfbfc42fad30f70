"""Simulation reports: recorded columns, the self-contained HTML page, and SVG figures."""

from __future__ import annotations

from carpool.sim.report.comparison_figure import comparison_svg
from carpool.sim.report.page import render, write_page
from carpool.sim.report.recording import NodeSpan, Recording, ReportHead, RunRecord, node_spans
from carpool.sim.report.timeline_figure import timeline_svg

__all__ = [
    "NodeSpan",
    "Recording",
    "ReportHead",
    "RunRecord",
    "comparison_svg",
    "node_spans",
    "render",
    "timeline_svg",
    "write_page",
]
