"""A worker's turns: its messages, when a step may begin, and the handoff to the next worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from carpool.runtime.process.protocol import Grant, Message, TurnEnded, TurnEnding, TurnRequested
from carpool.runtime.sharing.device_handoff import DeviceHandoff, new_handoff
from carpool.runtime.sharing.turn_token import TurnToken


@pytest.fixture
def handoff() -> Iterator[DeviceHandoff]:
    made = DeviceHandoff(*new_handoff())
    yield made
    made.close()


class FakeSignal:
    """Records the signals of a device."""

    def __init__(self) -> None:
        self.signals: list[tuple[str, int]] = []

    def hold_until(self, number: int) -> None:
        self.signals.append(("hold", number))

    def reach(self, number: int) -> None:
        self.signals.append(("reach", number))


def test_without_a_handoff_every_grant_is_requested() -> None:
    sent: list[Message] = []
    token = TurnToken(sent.append, None, None)
    assert not token.try_begin(0)
    assert not token.try_begin(0)
    token.add_grant(Grant(2, 1, 0))
    for step in (0, 1):
        assert token.try_begin(step)
        token.after_launch()
        token.step_done(is_idle=True)
    assert not token.is_used_up
    assert not token.try_begin(2)
    assert sent == [TurnRequested(0), TurnRequested(2)]


def test_the_last_step_is_announced_and_the_device_handed_off(handoff: DeviceHandoff) -> None:
    sent: list[Message] = []
    token = TurnToken(sent.append, handoff, None)
    token.try_begin(0)
    token.add_grant(Grant(2, 7, 0))
    for step in (0, 1):
        assert token.try_begin(step)
        token.after_launch()
        token.step_done(is_idle=True)
    assert token.is_used_up
    assert not handoff.has_reached(7)
    token.hand_off()
    assert handoff.has_reached(7)
    assert not token.try_begin(2)
    assert sent == [TurnRequested(0), TurnEnding(7), TurnEnded(7)], "the next turn is requested during the last step"


def test_a_step_waits_for_the_grant_before_it(handoff: DeviceHandoff) -> None:
    token = TurnToken(lambda message: None, handoff, None)
    token.add_grant(Grant(1, 3, 2))
    assert not token.try_begin(0)
    handoff.reach(1)
    assert not token.try_begin(0)
    handoff.reach(2)
    assert token.try_begin(0)


def test_a_grant_that_follows_itself_continues_without_a_handoff(handoff: DeviceHandoff) -> None:
    sent: list[Message] = []
    token = TurnToken(sent.append, handoff, None)
    token.add_grant(Grant(1, 1, 0))
    assert token.try_begin(0)
    token.after_launch()
    token.add_grant(Grant(2, 2, 1))
    token.step_done(is_idle=True)
    assert token.steps_left == 2
    for _ in range(2):
        assert token.try_begin(1)
        token.after_launch()
        token.step_done(is_idle=True)
    assert token.is_used_up
    assert sent == [TurnEnding(1), TurnEnding(2)]


def test_a_device_waits_and_signals_by_itself(handoff: DeviceHandoff) -> None:
    signal = FakeSignal()
    token = TurnToken(lambda message: None, handoff, signal)
    token.add_grant(Grant(1, 5, 4))
    assert token.try_begin(0), "the host goes ahead, the device waits"
    handoff.reach(4)
    token.after_launch()
    token.step_done(is_idle=True)
    assert signal.signals == [("hold", 4), ("reach", 5)]


def test_a_device_signals_the_end_of_a_turn_once_its_last_step_is_launched(handoff: DeviceHandoff) -> None:
    signal = FakeSignal()
    token = TurnToken(lambda message: None, handoff, signal)
    for number in (5, 6):
        token.add_grant(Grant(2, number, 0))
        for _ in range(2):
            assert token.try_begin(0)
            assert signal.signals == [("reach", sent) for sent in range(5, number)], "not before the last step"
            token.after_update_launch()
            token.step_done(is_idle=True)
        token.hand_off()
    assert signal.signals == [("reach", 5), ("reach", 6)], "signalled once: the number must not decrease"


class MovingHandoff(DeviceHandoff):
    """Advances by one grant with every poll."""

    polls = 0

    def has_reached(self, number: int) -> bool:
        found = super().has_reached(number)
        self.polls += 1
        self.reach(self.polls)
        return found


def test_the_host_waits_before_a_step_that_must_not_be_queued() -> None:
    handoff, signal = MovingHandoff(*new_handoff()), FakeSignal()
    token = TurnToken(lambda message: None, handoff, signal)
    token.add_grant(Grant(1, 5, 4))
    assert token.try_begin(0, can_queue=False), "the head of the step may be queued"
    assert handoff.polls == 1, "the grant before has not ended"
    token.before_launch()
    assert handoff.polls > 4
    assert signal.signals == [("hold", 4)]
    polls = handoff.polls
    token.before_launch()
    assert handoff.polls == polls + 1, "a verification of the same step does not wait again"
    handoff.close()


def test_the_host_does_not_wait_before_a_queued_step(handoff: DeviceHandoff) -> None:
    token = TurnToken(lambda message: None, handoff, FakeSignal())
    token.add_grant(Grant(1, 5, 4))
    assert token.try_begin(0)
    token.before_launch()
    assert not handoff.has_reached(4), "the device waits, not the host"


class SlowHandoff(DeviceHandoff):
    """Reaches the number at the fifth poll."""

    polls = 0

    def has_reached(self, number: int) -> bool:
        self.polls += 1
        if self.polls == 5:
            self.reach(number)
        return super().has_reached(number)


def test_the_end_is_announced_after_the_step_has_started() -> None:
    handoff = SlowHandoff(*new_handoff())
    sent: list[tuple[Message, int]] = []
    token = TurnToken(lambda message: sent.append((message, handoff.polls)), handoff, FakeSignal())
    token.add_grant(Grant(1, 5, 4))
    assert token.try_begin(0)
    token.after_launch()
    token.after_launch()  # a verification of the same step
    assert sent == [(TurnEnding(5), 5)]
    handoff.close()


def test_a_finished_training_hands_off_its_grant(handoff: DeviceHandoff) -> None:
    sent: list[Message] = []
    token = TurnToken(sent.append, handoff, None)
    token.add_grant(Grant(9, 1, 0))
    assert token.try_begin(0)
    token.after_launch()
    token.step_done(is_idle=True)
    token.finish()
    assert sent == [TurnEnded(1, is_last=True)]
    assert handoff.has_reached(1)
    assert not token.has_turn


def test_the_host_hands_off_if_more_work_follows_the_step(handoff: DeviceHandoff) -> None:
    signal = FakeSignal()
    token = TurnToken(lambda message: None, handoff, signal)
    token.add_grant(Grant(1, 1, 0))
    assert token.try_begin(0)
    token.step_done(is_idle=False)
    assert signal.signals == []
    assert token.is_used_up


def test_waiting_ends_with_the_handoff(handoff: DeviceHandoff) -> None:
    other = DeviceHandoff(*handoff.descriptors)
    token = TurnToken(lambda message: None, handoff, None)
    token.add_grant(Grant(1, 2, 1))
    memory, silent_fd = new_handoff()
    thread = threading.Thread(target=lambda: other.reach(1))
    thread.start()
    while not token.try_begin(0):
        token.wait(silent_fd)
    thread.join()
    DeviceHandoff(memory, silent_fd).close()


def test_a_handoff_never_decreases(handoff: DeviceHandoff) -> None:
    handoff.reach(5)
    handoff.reach(3)
    assert handoff.has_reached(5)
