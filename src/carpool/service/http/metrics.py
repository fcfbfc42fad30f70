"""Prometheus metrics of a daemon: latencies of requests and commits, and gauges collected on scrape."""

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
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_READER = Principal("metrics", Role.READER)


class ServiceMetrics:
    """The metrics of one daemon, in their own registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Histogram(
            "carpool_http_seconds",
            "Seconds until the response starts, by route",
            ("method", "route", "status"),
            registry=self._registry,
            buckets=_BUCKETS_S,
        )
        self.commits = Histogram(
            "carpool_commit_seconds",
            "Seconds to commit accepted changes to disk",
            registry=self._registry,
            buckets=_BUCKETS_S,
        )
        ProcessCollector(registry=self._registry)
        # Two threads of their own, so that commits do not wait for file checks: one commits while the other writes a
        # snapshot.
        self._threads = ThreadPoolExecutor(2, "commit")

    def add_service(self, service: SchedulerService) -> None:
        self._registry.register(_ServiceCollector(service))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    async def commit(self, work: Callable[[], None]) -> None:
        """Run a commit in a thread and record its latency."""
        start = perf_counter()
        await asyncio.get_running_loop().run_in_executor(self._threads, work)
        self.commits.observe(perf_counter() - start)


class MetricsMiddleware:
    """Records for every request the time until its response starts."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = perf_counter()

        async def observe(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Labels are route patterns, never paths or unknown methods: clients could create any number of those.
                route = getattr(scope.get("route"), "path", "other")
                method = scope["method"] if route != "other" else "any"
                self._metrics.requests.labels(method, route, message["status"]).observe(perf_counter() - start)
            await send(message)

        await self._app(scope, receive, observe)


class _ServiceCollector(Collector):
    def __init__(self, service: SchedulerService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        summary, counters = self._service.summary(_READER), self._service.counters()
        jobs = GaugeMetricFamily("carpool_jobs", "Jobs, by phase", labels=["phase"])
        for phase, count in summary.jobs.items():
            jobs.add_metric([phase], count)
        yield jobs
        is_full = int(bool(self._service.disk_full))
        for name, text, value in (
            ("carpool_devices", "Devices", summary.devices),
            ("carpool_devices_lost", "Devices on lost nodes", summary.lost_devices),
            ("carpool_devices_held", "Allocated devices, as the sum of allocated fractions", summary.held),
            ("carpool_steps_per_second", "Training steps per second of all running jobs", counters.steps_per_s),
            ("carpool_disk_full", "1 while the disk is full and no jobs are accepted", is_full),
            ("carpool_feed_listeners", "Open event streams", counters.listeners),
        ):
            yield GaugeMetricFamily(name, text, value)
        yield CounterMetricFamily("carpool_decisions", "Plans that changed an allocation", counters.decisions)
        yield CounterMetricFamily("carpool_events", "Events published", counters.events)

    def describe(self) -> Iterator[Metric]:
        """Return nothing, so that registering does not query the service."""
        return iter(())
