"""Reports of simulated runs: what was recorded, the page made of it, and a figure for documents."""

from __future__ import annotations

from carpool.sim.report.figure import comparison_svg
from carpool.sim.report.page import render, write_page
from carpool.sim.report.recording import NodeSpan, Recording, ReportHead, RunRecord, node_spans
from carpool.sim.report.strips import timeline_svg

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
