"""Nobody gets more than a bucket holds, and who waits as long as told gets one."""

from hypothesis import given
from hypothesis import strategies as st

from carpool.service.http.limits import TokenBuckets


@given(
    pauses=st.lists(st.floats(0.0, 3.0), max_size=60),
    per_s=st.floats(0.1, 10.0),
    burst=st.integers(1, 5),
)
def test_no_more_than_the_burst_and_the_rate(pauses: list[float], per_s: float, burst: int) -> None:
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


def test_everybody_has_their_own_and_the_oldest_is_forgotten() -> None:
    buckets = TokenBuckets(0.001, 1, most=2)
    assert [buckets.take(name, 0.0) == 0.0 for name in ("a", "a", "b")] == [True, False, True]
    assert buckets.take("c", 0.0) == 0.0  # a is forgotten
    assert [buckets.take(name, 0.0) == 0.0 for name in ("b", "c", "a")] == [False, False, True]
