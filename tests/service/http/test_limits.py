"""Request limits: token buckets, and the client address behind proxies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.service.http.limits import TokenBuckets, client_address

PROXY, SECOND = "10.0.0.1", "10.0.0.2"


@given(
    pauses=st.lists(st.floats(0.0, 3.0), max_size=60),
    per_s=st.floats(0.1, 10.0),
    burst=st.integers(1, 5),
)
def test_a_bucket_grants_the_burst_and_the_rate_and_not_more(pauses: list[float], per_s: float, burst: int) -> None:
    buckets, at, granted = TokenBuckets(per_s, burst), 0.0, 0
    for pause in pauses:
        at += pause
        wait_s = buckets.take("ada", at)
        granted += wait_s == 0.0
        assert granted <= burst + per_s * at + 1e-6
        if wait_s:
            at += wait_s * (1.0 + 1e-9) + 1e-9
            assert buckets.take("ada", at) == 0.0
            granted += 1


def test_each_name_has_a_bucket_and_the_least_recently_used_is_dropped() -> None:
    buckets = TokenBuckets(0.001, 1, max_buckets=2)
    assert [buckets.take(name, 0.0) == 0.0 for name in ("a", "a", "b")] == [True, False, True]
    assert buckets.take("c", 0.0) == 0.0  # drops the bucket of a
    assert [buckets.take(name, 0.0) == 0.0 for name in ("b", "c", "a")] == [False, False, True]


@pytest.mark.parametrize(
    ("client", "forwarded", "address"),
    [
        ("7.7.7.7", [], "7.7.7.7"),
        ("7.7.7.7", ["1.1.1.1"], "7.7.7.7"),  # not a known proxy
        (PROXY, [], PROXY),
        (PROXY, ["1.1.1.1"], "1.1.1.1"),
        (PROXY, ["6.6.6.6, 1.1.1.1"], "1.1.1.1"),  # the client forged the first
        (PROXY, ["6.6.6.6", "1.1.1.1"], "1.1.1.1"),
        (PROXY, [f"6.6.6.6, 1.1.1.1, {SECOND}"], "1.1.1.1"),
        (PROXY, [f"{SECOND}"], SECOND),
        (PROXY, [" , "], PROXY),
    ],
)
def test_only_known_proxies_set_the_client_address(client: str, forwarded: list[str], address: str) -> None:
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    scope = {"type": "http", "client": (client, 1234), "headers": headers}
    assert client_address(scope, {PROXY, SECOND}) == address


def test_a_request_without_a_client_address() -> None:
    assert client_address({"type": "http", "headers": []}, {PROXY}) == ""
