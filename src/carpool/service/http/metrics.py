"""Prometheus metrics of a daemon: request latencies, and figures collected on scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carpool.service.auth import Principal, Role
from carpool.service.service import SchedulerService

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_EVERYBODY = Principal("metrics", Role.READER)


class ServiceMetrics:
    """What a daemon measures of itself, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Histogram(
            "carpool_http_seconds",
            "Seconds until an answer began, by route",
            ("method", "route", "status"),
            registry=self._registry,
            buckets=_SECONDS,
        )
        self.commits = Histogram(
            "carpool_commit_seconds",
            "Seconds to make what was accepted durable",
            registry=self._registry,
            buckets=_SECONDS,
        )
        ProcessCollector(registry=self._registry)
        self._threads = ThreadPoolExecutor(2, "commit")  # one commits, one writes out a balance meanwhile

    def watch(self, clerk: SchedulerService) -> None:
        """Tell of this clerk's daemon too."""
        self._registry.register(_ServiceCollector(clerk))

    def text(self) -> bytes:
        """All figures, as Prometheus reads them."""
        return generate_latest(self._registry)

    async def commit(self, work: Callable[[], None]) -> None:
        """Commit in a thread, and note how long it took; not behind files that somebody else's job has to look at."""
        began = perf_counter()
        await asyncio.get_running_loop().run_in_executor(self._threads, work)
        self.commits.observe(perf_counter() - began)


class MetricsMiddleware:
    """Notes of every request how long its answer took to begin."""

    def __init__(self, app: ASGIApp, meters: ServiceMetrics) -> None:
        self._app = app
        self._meters = meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = perf_counter()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # By the route's pattern: paths are as many as jobs, and strangers make up methods.
                route = getattr(scope.get("route"), "path", "other")
                method = scope["method"] if route != "other" else "any"
                self._meters.requests.labels(method, route, message["status"]).observe(perf_counter() - began)
            await send(message)

        await self._app(scope, receive, noted)


class _ServiceCollector(Collector):
    def __init__(self, clerk: SchedulerService) -> None:
        self._clerk = clerk

    def collect(self) -> Iterator[Metric]:
        summary, vitals = self._clerk.summary(_EVERYBODY), self._clerk.vitals()
        jobs = GaugeMetricFamily("carpool_jobs", "Jobs, by phase", labels=["phase"])
        for phase, count in summary.jobs.items():
            jobs.add_metric([phase], count)
        yield jobs
        yield GaugeMetricFamily("carpool_devices", "Devices", summary.devices)
        yield GaugeMetricFamily("carpool_devices_lost", "Devices that are lost", summary.lost_devices)
        yield GaugeMetricFamily("carpool_devices_held", "Devices held, each by the fractions given away", summary.held)
        yield GaugeMetricFamily("carpool_steps_per_second", "Steps of all running jobs", vitals.steps_per_s)
        yield GaugeMetricFamily("carpool_feed_listeners", "Who listens to events", vitals.listeners)
        yield CounterMetricFamily("carpool_decisions", "Plans that changed something", vitals.decisions)
        yield CounterMetricFamily("carpool_events", "Events told", vitals.events)

    def describe(self) -> Iterator[Metric]:
        """Nothing is asked of the clerk only to learn names."""
        return iter(())
