"""What a worker says of its start."""

from __future__ import annotations

from carpool.runtime.process.worker_setup import StartupTimer


def test_it_tells_what_took_how_long() -> None:
    instants = iter([10.0, 10.25, 11.0])
    arrival = StartupTimer(lambda: next(instants))
    arrival.passed("in its entry")
    arrival.passed("to bring it to cuda:0")
    assert arrival.words() == "ready after 1.000 s: 0.250 s in its entry, 0.750 s to bring it to cuda:0"
