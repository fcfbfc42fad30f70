"""Allocator settings in the environment of new processes."""

from __future__ import annotations

import pytest

from carpool.runtime.compat.allocator import hide_huge_pages, with_huge_pages


@pytest.mark.parametrize("before", [{}, {"GLIBC_TUNABLES": "glibc.malloc.check=1"}, {"A": "b"}])
def test_huge_pages_are_added_to_other_tunables_and_removed_again(before: dict[str, str]) -> None:
    after = with_huge_pages(before)
    assert after["GLIBC_TUNABLES"].split(":")[-1] == "glibc.malloc.hugetlb=1"
    assert after["GLIBC_TUNABLES"].startswith(before.get("GLIBC_TUNABLES", ""))
    hide_huge_pages(after)
    assert after == before


def test_a_users_own_setting_stays() -> None:
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=2"}
    hide_huge_pages(environment)
    assert environment == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=2"}
