"""A colour for every job, the same on every page and on every day."""

from __future__ import annotations

from zlib import crc32

NUM_COLOURS = 18  # classes c0 … in the style sheet: far enough apart in either theme


def colour(job: str) -> str:
    """The style class of a job's colour; somebody else's jobs are all alike."""
    return f"c{crc32(job.encode()) % NUM_COLOURS}" if job else "theirs"
