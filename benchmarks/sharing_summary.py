"""Summarises `gpu_sharing.py` in the measures of the text, and draws pictures for the documentation.

Usage: PYTHONPATH=src python benchmarks/sharing_summary.py [--table FILE] [--images docs/images]
Raw is Σ P / Σ P(baseline), fair the geometric mean of P / P(baseline), Σ the sum of P / P(alone with a graph).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from measured import RESULTS, ROOT
from sharing.table import fair, raw, total

from carpool.sim.report.comparison_figure import COLOURS, FONT, INK, SOFT

Row = Mapping[str, Any]
_WIDTH, _BAR, _LEFT = 760, 20, 250
_CELL = 66  # width of a cell
_REGIMES = ((100, "isolated"), (160, "moderate"), (290, "too much"), (1000, "full"))


def rows_of(rows: Sequence[Row], mix: str, deterministic: bool = True) -> dict[str, Row]:
    """The last row of each mode of a mix that has both settings: newer calls come later."""
    return {r["mode"]: r for r in rows if r.get("mix") == mix and r.get("deterministic", True) == deterministic}


def compare(found: Mapping[str, Row]) -> dict[str, Any] | None:
    """What was chosen live, and the best equal share, against every baseline."""
    alone, eager = found.get("alone, graph"), found.get("alone, eager")
    equal = [row for mode, row in found.items() if mode.startswith("MPS") and mode.endswith("graph")]
    if alone is None or eager is None or not equal:
        return None
    count = len(alone["rates"])
    best = max(equal, key=lambda row: row["sum"])
    settled = [row for mode, row in found.items() if mode.startswith("carpool run") and row.get("is_settled")]
    live = [row for row in settled if row.get("call") == alone.get("call")]  # rates alone move from call to call
    chosen = live[-1] if live else None
    bases = {
        "one after another, eager": [rate / count for rate in eager["rates"]],
        "one after another, graphs": [rate / count for rate in alone["rates"]],
        "time slicing, eager": _rates(found, "time slicing, eager"),
        "isolated, eager": _rates(found, "MPS 33 % each, eager"),
        "isolated, graphs": _rates(found, "MPS 33 % each, graph"),
    }
    answer: dict[str, Any] = {"jobs": count, "best_equal": best["mode"], "ways": {}}
    for way, row in (("best equal share", best), ("chosen by itself", chosen)):
        if row is not None:
            rates = row["rates"]
            sliced = bases["time slicing, eager"]
            answer["ways"][way] = {
                "sum": round(total(rates, alone["rates"]), 3),
                "sum_of_eager": round(total(rates, eager["rates"]), 3),
                "of_no_interference": round(total(rates, alone["rates"]) / count, 3),
                "of_best_equal": round(total(rates, alone["rates"]) / best["sum"], 3),
                "over_slicing_by_eager_alone": (
                    round(total(rates, eager["rates"]) / total(sliced, eager["rates"]), 2) if sliced else None
                ),
                "settled_s": row.get("settled_s"),
                "measuring_s": row.get("measuring_s"),
                "against": {n: [round(raw(rates, b), 2), round(fair(rates, b), 2)] for n, b in bases.items() if b},
            }
    return answer


def _rates(found: Mapping[str, Row], mode: str) -> list[float]:
    return list(found[mode]["rates"]) if mode in found else []


# ------------------------------------------------------------------------------------------------------------ pictures
def bars(groups: Mapping[str, Sequence[tuple[str, float]]], title: str) -> str:
    """Horizontal bars, a group under each heading."""
    most = max(value for bars in groups.values() for _, value in bars)
    parts, top = [], 34.0
    for heading, members in groups.items():
        parts.append(_text(12, top, heading, weight="bold"))
        top += 10
        for place, (label, value) in enumerate(members):
            width = (_WIDTH - _LEFT - 70) * value / most
            parts.append(_text(_LEFT - 8, top + _BAR - 6, label, anchor="end"))
            parts.append(
                f'<rect x="{_LEFT}" y="{top + 2:.0f}" width="{width:.1f}" height="{_BAR - 4}" '
                f'fill="{COLOURS[place % len(COLOURS)]}"/>'
            )
            parts.append(_text(_LEFT + width + 6, top + _BAR - 6, f"{value:.2f}"))
            top += _BAR
        top += 26
    return _picture(title, parts, top)


def heat(table: Mapping[str, Mapping[int, float]], title: str) -> str:
    """A cell for each mix and virtual total: the darker, the nearer to the best of its row."""
    totals = sorted({each for row in table.values() for each in row})
    wide = _CELL
    parts = [_text(_LEFT + wide * (i + 0.5), 44, f"{each} %", anchor="middle") for i, each in enumerate(totals)]
    for each, words in zip(totals, [_regime(each) for each in totals], strict=True):
        parts.append(_text(_LEFT + wide * (totals.index(each) + 0.5), 60, words, anchor="middle", colour=SOFT))
    top = 70.0
    for label, row in table.items():
        parts.append(_text(_LEFT - 8, top + 22, label, anchor="end"))
        for i, each in enumerate(totals):
            if each not in row:
                continue
            near = row[each] / max(row.values())
            shade = int(255 - 170 * max(0.0, (near - 0.6) / 0.4))
            parts.append(
                f'<rect x="{_LEFT + wide * i:.1f}" y="{top:.0f}" width="{wide - 2:.1f}" height="34" '
                f'fill="rgb({shade},{min(255, shade + 40)},255)"/>'
            )
            parts.append(_text(_LEFT + wide * (i + 0.5), top + 22, f"{row[each]:.3f}", anchor="middle"))
        top += 38
    return _picture(title, parts, top + 8, _LEFT + 12 + wide * len(totals))


def _regime(percent: int) -> str:
    return next(words for most, words in _REGIMES if percent <= most)


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal", colour: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{colour}">'
        f"{escape(words)}</text>"
    )


def _picture(title: str, parts: Sequence[str], height: float, width: float = _WIDTH) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" font-family="{FONT}" font-size="13"><title>{escape(title)}</title>'
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>'
        f"{_text(12, 18, title)}{''.join(parts)}</svg>\n"
    )


def _bar(words: str, row: Row) -> tuple[str, float]:
    """What a way of running a mix is called, and its Σ: of trainings that were measured alone, one after another."""
    if words.startswith("alone"):
        return words.replace("alone", "one after another"), row["sum"] / len(row["rates"])
    return words, row["sum"]


def main() -> None:
    """Print the comparisons, draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=RESULTS / "gpu_sharing.json")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    rows = [row for row in json.loads(options.table.read_text(encoding="utf-8"))["results"] if "rates" in row]
    groups: dict[str, list[tuple[str, float]]] = {}
    cells: dict[str, dict[int, float]] = {}
    for mix in dict.fromkeys(row["mix"] for row in rows):
        found = rows_of(rows, mix)
        for setting in (True, False):
            answer = compare(rows_of(rows, mix, setting))
            if answer is not None:
                print(json.dumps({mix: {"deterministic": setting, **answer}}, indent=1))
        if compare(found) is not None:
            shown = [
                (mode.split(":")[0], row)
                for mode, row in found.items()
                if not mode.startswith("alone at") and mode != "alone, graph" and "our step" not in mode
                if row.get("is_settled", True)
            ]
            newest = dict(sorted(shown, key=lambda each: each[1].get("call", 0)))  # shares are chosen anew in each
            groups[mix] = [_bar(words, newest[words]) for words in dict.fromkeys(words for words, _ in shown)]
        for row in found.values():
            shares = row.get("shares") or [row.get("share", 0)] * len(row["rates"])
            if row["mode"].startswith("MPS") and row["mode"].endswith("graph") and len(set(shares)) == 1:
                cells.setdefault(mix, {})[sum(shares)] = row["fair"]
    options.images.mkdir(parents=True, exist_ok=True)
    title = "Σ rate / (rate alone with a graph); one after another with graphs is 1"
    (options.images / "sharing.svg").write_text(bars(groups, title), encoding="utf-8")
    title = "Geometric mean of rate / (rate alone), equal shares, by their sum"
    kept = {mix: row for mix, row in cells.items() if len(row) > 2}
    (options.images / "sharing_map.svg").write_text(heat(kept, title), encoding="utf-8")


if __name__ == "__main__":
    main()
