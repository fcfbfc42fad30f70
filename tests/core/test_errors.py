"""What errors say."""

import errno
import os

import pytest

from carpool.core.errors import cause


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT), "jobs.toml"), "No such file or directory"),
        (TimeoutError("timed out"), "timed out"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "invalid start byte"),
    ],
)
def test_the_cause_is_told_without_number_and_path(error: Exception, words: str) -> None:
    assert cause(error).endswith(words)
    assert "jobs.toml" not in cause(error)
    assert "Errno" not in cause(error)
