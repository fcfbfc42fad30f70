"""A lease ends no later than the client counts it, however late an answer arrives."""

from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.executor.lease import Lease, LeaseEnds, lost_after_s


def test_without_answers_it_expires() -> None:
    lease = Lease(10.0, 100.0)
    assert not lease.is_expired(110.0)
    assert lease.is_expired(110.1)
    assert not Lease(0.0, 100.0).is_expired(1e9), "no lease was asked for"


def test_an_answer_counts_from_when_its_heartbeat_was_sent() -> None:
    lease = Lease(10.0, 0.0)
    first = lease.beat(1.0)
    second = lease.beat(5.0)
    lease.renew(first)
    assert lease.is_expired(11.5), "the answer may have been on its way for long"
    lease.renew(second)
    assert not lease.is_expired(14.9)
    lease.renew(first)
    lease.renew(99)
    assert lease.is_expired(15.1), "answers of old or unknown heartbeats extend nothing"


@given(
    st.lists(st.tuples(st.floats(0.01, 3.0), st.floats(0.0, 8.0), st.floats(0.0, 8.0), st.booleans()), max_size=30),
    st.floats(0.5, 20.0),
)
def test_it_has_expired_when_the_client_counts_it_as_over(
    beats: list[tuple[float, float, float, bool]], lease_s: float
) -> None:
    """Each heartbeat takes some time to the client and its answer some time back; some are lost."""
    lease, at, answered_at = Lease(lease_s, 0.0), 0.0, 0.0
    arrivals: list[tuple[float, int]] = []
    for pause_s, there_s, back_s, is_lost in beats:
        at += pause_s
        number = lease.beat(at)
        if not is_lost:
            answered_at = max(answered_at, at + there_s)
            arrivals.append((at + there_s + back_s, number))
    for _, number in sorted(arrivals):
        lease.renew(number)
    assert lease.is_expired(answered_at + lease_s + 1e-6)
    assert lease.ends.writes <= answered_at + lost_after_s(lease_s), "it is not declared lost while it may write"


def test_steps_end_first_then_those_across_nodes_and_a_margin_later_writes() -> None:
    lease = Lease(10.0, 0.0)
    number = lease.beat(100.0)
    lease.renew(number)
    assert lease.ends == LeaseEnds(103.0, 110.0, 114.5)
    assert Lease(0.0, 100.0).ends == LeaseEnds(), "no lease was asked for"
