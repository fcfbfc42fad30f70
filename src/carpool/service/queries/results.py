"""Results of a sweep or run: hyper-parameters, state, steps and one metric of each job, best first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite

from carpool.backends.job_accounting import JobAccount, JobAccounting
from carpool.backends.metric_summary import LOSS, MetricPoint, read_summaries
from carpool.backends.run_folder import RunFolder
from carpool.core.errors import InputError, UnknownName
from carpool.core.model import JobId, Phase
from carpool.service.queries.views import PointView, ResultRow, ResultsView
from carpool.service.store.journal_file import has_journal, read_run_journal

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of a metric's name: val_loss, test/WER, valLoss
_LESS_IS_BETTER = re.compile(  # matches a whole word of the name
    r".*loss|.*error|losses|errors?|err|perplexity|ppl|mse|mae|rmse|rmsle|mape|smape|nll|wer|cer|eer|ece|brier|fid|bpc"
    r"|bpb|bits|kl|divergence|distance|regret|costs?|penalty|time|seconds|duration|latency",
    re.IGNORECASE,
)
_HELD_OUT = re.compile(r"val|valid|validation|test|eval|evaluation|dev", re.IGNORECASE)


def run_accounts(folder: RunFolder) -> list[JobAccount]:
    """The accounts of a run's jobs, from its journal and the files of the jobs; InputError if it cannot be read."""
    settings = folder.settings()
    known: Mapping[JobId, JobAccount] = {}
    if has_journal(folder):
        header, records = read_run_journal(folder)
        accounting = JobAccounting(header.cluster)
        for record in records:
            accounting.record(record)
        known = accounting.accounts
    accounts = [known.get(spec.id) or JobAccount(spec, 0.0) for spec, _ in settings.jobs]
    for account in accounts:
        account.metrics = read_summaries(folder.job(account.spec.id) / "metrics.jsonl")
        if (outcome := folder.outcome(account.spec.id)) is not None:
            account.close(outcome)
    return accounts


def default_mode(metric: str) -> str:
    """``min`` for a metric with a word in its name that says less is better, such as loss or error; else ``max``."""
    return "min" if _has_word(metric, _LESS_IS_BETTER) else "max"


def results_view(name: str, accounts: Sequence[JobAccount], at: float, metric: str = "", mode: str = "") -> ResultsView:
    """Build the table of these jobs, best first; InputError for a metric that none of them has reported."""
    reported = Counter(each for account in accounts for each in account.metrics.by_name)
    rule = next((account.spec.halving for account in accounts if account.spec.halving is not None), None)
    if metric and metric not in reported:
        raise UnknownName("metric", metric, reported, where=name)
    if mode not in ("", "max", "min"):
        raise InputError(f"mode is {mode!r}", way_out="Write max or min.")
    chosen = metric or (rule.metric if rule is not None else _default_metric(reported))
    if not mode:
        is_ruled = rule is not None and rule.metric == chosen
        mode = ("max" if rule.is_max else "min") if rule is not None and is_ruled else default_mode(chosen)
    rows = [_row(account, chosen, is_max=mode == "max", at=at) for account in accounts]
    sign = -1.0 if mode == "max" else 1.0
    rows.sort(key=lambda row: (row.best is None, 0.0 if row.best is None else sign * row.best.value))
    return ResultsView(
        name=name,
        metric=chosen,
        mode=mode,
        metrics=tuple(sorted(reported)),
        params=tuple(dict.fromkeys(param for account in accounts for param, _ in account.spec.params)),
        best=rows[0].job if rows and rows[0].best is not None else None,
        rows=tuple(rows),
    )


def _default_metric(reported: Counter[str]) -> str:
    """The metric that most jobs report: a held-out one before others, the training loss last."""
    if not reported:
        return LOSS
    return min(reported, key=lambda name: (-reported[name], name == LOSS, not _has_word(name, _HELD_OUT), name))


def _has_word(metric: str, pattern: re.Pattern[str]) -> bool:
    return any(map(pattern.fullmatch, _WORD.findall(metric)))


def _row(account: JobAccount, metric: str, *, is_max: bool, at: float) -> ResultRow:
    found = account.metrics.by_name.get(metric)
    held_s = account.held_s + (max(0.0, at - account.held_since) if account.held is not None else 0.0)
    return ResultRow(
        job=account.spec.id,
        params=dict(account.spec.params),
        state=account.phase,
        note=account.error if account.phase is not Phase.FINISHED else "",
        steps=account.steps,
        time_s=held_s,
        last=None if found is None else _point(found.last),
        best=None if found is None else _point(found.best(is_max=is_max)),
        metrics={name: value for name, value in account.last_metrics.items() if isfinite(value)},
    )


def _point(point: MetricPoint | None) -> PointView | None:
    return None if point is None or not isfinite(point.value) else PointView(point.step, point.value)
