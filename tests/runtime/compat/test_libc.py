"""C library calls: what is here works, and what is missing is named."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

from carpool.runtime.compat import libc

_PR_GET_PDEATHSIG, _PR_INVALID = 2, 0x7FFFFFFF


def test_prctl_returns_its_errno() -> None:
    assert libc.prctl(_PR_INVALID, 0) == errno.EINVAL


def test_this_c_library_has_everything() -> None:
    assert [feature.name for feature in libc.features() if feature.problem and feature.name != "huge pages"] == []


def test_another_c_library_needs_no_malloc_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libc, "_libc", SimpleNamespace())
    libc.mallopt(-1, 1)
    libc.malloc_trim()
    assert libc.prctl(1, 0) == errno.ENOSYS
    problems = {feature.name: feature.problem for feature in libc.features()}
    assert "mallopt" in problems["malloc"]
    assert "prctl" in problems["prctl"]
    assert not problems["pidfd"]
