"""How much one request, or one person, may ask of a daemon at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that keep a daemon answering whatever is thrown at it."""

    body_bytes: int = 1 << 20
    body_s: float = 20.0  # seconds in which a body has to be there
    json_depth: int = 32
    jobs_at_once: int = 1000  # in one submission, sweeps counted out
    jobs_bytes: int = 16 << 20  # of all jobs of one submission, each written out with what it has from defaults
    requests_per_s: float = 50.0  # of one person in the long run
    burst: float = 200.0
    strangers_per_s: float = 2.0  # wrong tokens from one address in the long run
    strangers_burst: float = 20.0
    streams: int = 20  # event streams and followed logs of one person at a time
    stream_s: float = 3600.0  # a stream ends after so long; whoever listens comes back with Last-Event-ID
    beat_s: float = 15.0  # a comment is sent into a silent stream so often
    gather_s: float = 0.25  # events of so long go out together
    headers_s: float = 10.0  # seconds in which a request's headers have to be there
    stalled_s: float = 60.0  # a client that takes nothing for so long is let go
    connections: int = 512
