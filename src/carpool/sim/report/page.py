"""Self-contained HTML page that compares runs: markup, style, scripts and data in one file."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from carpool.core.errors import InputError
from carpool.sim.report.comparison_figure import comparison_svg
from carpool.sim.report.comparison_table import MEASURES, comparison_table, headline
from carpool.sim.report.payload import RunPlotData, drawings, payload, script_json, thinned
from carpool.sim.report.recording import ReportHead, RunRecord

SCRIPTS = ("charts.js", "timeline.js", "report.js")


def _asset(name: str) -> str:
    return resources.files("carpool.sim.report").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """How a content security policy names one inline script or style."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii") + "'"


def _fact(name: str, value: str) -> str:
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"


def _facts(head: ReportHead, runs: Sequence[RunRecord]) -> str:
    sizes = sorted({len(run.recording) for run in runs})
    facts = [("trace", head.trace), ("cluster", head.cluster), ("devices", f"{head.num_devices:,}")]
    facts.append(("jobs", " / ".join(f"{size:,}" for size in sizes) or "0"))
    if head.seed is not None:
        facts.append(("seed", str(head.seed)))
    facts.extend(head.extra.items())
    num_dropped = sum(head.dropped.values())
    facts.append(("dropped rows", f"{num_dropped:,}" if num_dropped else "none"))
    if head.version:
        facts.append(("carpool", head.version))
    return "".join(_fact(name, value) for name, value in facts)


def _dropped(head: ReportHead) -> str:
    if not sum(head.dropped.values()):
        return "<p>Every row of the trace was used.</p>"
    items = "".join(f"<li>{count:,} × {escape(reason)}</li>" for reason, count in sorted(head.dropped.items()))
    return f"<p>Rows of the trace that were left out:</p><ul>{items}</ul>"


def _thinning(runs: Sequence[RunRecord], drawn: Sequence[RunPlotData]) -> str:
    items = [
        f"<li><b>{escape(run.policy)}</b>: {escape(words)}.</li>"
        for run, drawing in zip(runs, drawn, strict=True)
        for words in thinned(run, drawing)
    ]
    if not items:
        return "<p>Every job, every change and every allocation is drawn.</p>"
    return f"<p>Thinned for drawing; the table is always computed from all jobs:</p><ul>{''.join(items)}</ul>"


def render(title: str, head: ReportHead, runs: Sequence[RunRecord]) -> str:
    """The whole page as text; the same runs give the same bytes."""
    drawn = drawings(runs)
    data = payload(head, runs, drawn)
    style, script = _asset("report.css"), "\n".join(_asset(name) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return Template(_asset("template.html")).substitute(
        policy=escape(policy),
        title=escape(title),
        style=style,
        headline=escape(headline(runs)),
        facts=_facts(head, runs),
        table=comparison_table(runs),
        figure=comparison_svg(runs),
        measures="".join(_fact(measure.name, measure.hint) for measure in MEASURES),
        dropped=_dropped(head),
        thinning=_thinning(runs, drawn),
        tick=f"{data['tick_s']:g} s",
        command=f"<p>Made with <code>{escape(head.command)}</code></p>" if head.command else "",
        data=script_json(data),
        script=script,
    )


def write_page(path: str | os.PathLike[str], html: str) -> None:
    """Write the page whole or not at all: into a file beside it first, then renamed over it."""
    target = Path(path)
    if not target.parent.is_dir():
        raise InputError(
            f"the folder {str(target.parent)!r} does not exist",
            where=f"report {str(target)!r}",
            way_out="Create it or choose another path.",
        )
    if target.is_dir():
        raise InputError("is a folder", where=f"report {str(target)!r}", way_out="Give a file name, such as out.html.")
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(html, encoding="utf-8", newline="\n")
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
