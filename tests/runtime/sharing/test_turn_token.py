"""A worker's turns: what it says, when it may begin, and how the device goes to the next one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from carpool.runtime.process.protocol import Grant, Message, TurnEnded, TurnEnding, TurnRequested
from carpool.runtime.sharing.device_handoff import DeviceHandoff, new_handoff
from carpool.runtime.sharing.turn_token import TurnToken


@pytest.fixture
def baton() -> Iterator[DeviceHandoff]:
    made = DeviceHandoff(*new_handoff())
    yield made
    made.close()


class FakeSignal:
    """Notes what a device was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def hold_until(self, number: int) -> None:
        self.told.append(("hold", number))

    def reach(self, number: int) -> None:
        self.told.append(("reach", number))


def test_without_a_baton_every_grant_is_asked_for() -> None:
    said: list[Message] = []
    token = TurnToken(said.append, None, None)
    assert not token.begins(0)
    assert not token.begins(0)
    token.take(Grant(2, 1, 0))
    for step in (0, 1):
        assert token.begins(step)
        token.is_queued()
        token.done(is_idle=True)
    assert not token.is_spent
    assert not token.begins(2)
    assert said == [TurnRequested(0), TurnRequested(2)]


def test_the_last_step_is_announced_and_the_device_handed_on(baton: DeviceHandoff) -> None:
    said: list[Message] = []
    token = TurnToken(said.append, baton, None)
    token.begins(0)
    token.take(Grant(2, 7, 0))
    for step in (0, 1):
        assert token.begins(step)
        token.is_queued()
        token.done(is_idle=True)
    assert token.is_spent
    assert not baton.has_reached(7)
    token.hand_on()
    assert baton.has_reached(7)
    assert not token.begins(2)
    assert said == [TurnRequested(0), TurnEnding(7), TurnEnded(7)], "it has asked with its last step"


def test_nobody_begins_before_the_grant_in_front_has_ended(baton: DeviceHandoff) -> None:
    token = TurnToken(lambda message: None, baton, None)
    token.take(Grant(1, 3, 2))
    assert not token.begins(0)
    baton.reach(1)
    assert not token.begins(0)
    baton.reach(2)
    assert token.begins(0)


def test_who_comes_after_itself_goes_on_without_a_stop(baton: DeviceHandoff) -> None:
    said: list[Message] = []
    token = TurnToken(said.append, baton, None)
    token.take(Grant(1, 1, 0))
    assert token.begins(0)
    token.is_queued()
    token.take(Grant(2, 2, 1))
    token.done(is_idle=True)
    assert token.left == 2
    for _ in range(2):
        assert token.begins(1)
        token.is_queued()
        token.done(is_idle=True)
    assert token.is_spent
    assert said == [TurnEnding(1), TurnEnding(2)]


def test_a_device_waits_and_hands_on_by_itself(baton: DeviceHandoff) -> None:
    signal = FakeSignal()
    token = TurnToken(lambda message: None, baton, signal)
    token.take(Grant(1, 5, 4))
    assert token.begins(0), "the host may go ahead, the device will not"
    baton.reach(4)
    token.is_queued()
    token.done(is_idle=True)
    assert signal.told == [("hold", 4), ("reach", 5)]


def test_a_device_hands_itself_on_once_as_soon_as_all_of_a_turns_last_step_was_said_to_it(baton: DeviceHandoff) -> None:
    signal = FakeSignal()
    token = TurnToken(lambda message: None, baton, signal)
    for number in (5, 6):
        token.take(Grant(2, number, 0))
        for _ in range(2):
            assert token.begins(0)
            assert signal.told == [("reach", said) for said in range(5, number)], "not before the last step"
            token.is_made()
            token.done(is_idle=True)
        token.hand_on()
    assert signal.told == [("reach", 5), ("reach", 6)], "a number said twice could take the next one's back"


class MovingBaton(DeviceHandoff):
    """Comes one grant further with every look."""

    looks = 0

    def has_reached(self, number: int) -> bool:
        found = super().has_reached(number)
        self.looks += 1
        self.reach(self.looks)
        return found


def test_a_step_that_must_not_stand_queued_is_awaited_by_its_host() -> None:
    baton, signal = MovingBaton(*new_handoff()), FakeSignal()
    token = TurnToken(lambda message: None, baton, signal)
    token.take(Grant(1, 5, 4))
    assert token.begins(0, queues=False), "the host makes all ready, and the head of the step may stand queued"
    assert baton.looks == 1, "and the one in front is not through yet"
    token.starts()
    assert baton.looks > 4
    assert signal.told == [("hold", 4)]
    looks = baton.looks
    token.starts()
    assert baton.looks == looks + 1, "the same step, made once more to prove it, does not wait again"
    baton.close()


def test_a_step_that_stands_queued_is_not_awaited_by_its_host(baton: DeviceHandoff) -> None:
    token = TurnToken(lambda message: None, baton, FakeSignal())
    token.take(Grant(1, 5, 4))
    assert token.begins(0)
    token.starts()
    assert not baton.has_reached(4), "the device waits, not the host"


class SlowBaton(DeviceHandoff):
    """Is where it has to be only when it has been looked at a few times."""

    looks = 0

    def has_reached(self, number: int) -> bool:
        self.looks += 1
        if self.looks == 5:
            self.reach(number)
        return super().has_reached(number)


def test_nothing_is_said_of_a_step_that_has_not_begun() -> None:
    baton = SlowBaton(*new_handoff())
    said: list[tuple[Message, int]] = []
    token = TurnToken(lambda message: said.append((message, baton.looks)), baton, FakeSignal())
    token.take(Grant(1, 5, 4))
    assert token.begins(0)
    token.is_queued()
    token.is_queued()  # the same step, made once more to prove it
    assert said == [(TurnEnding(5), 5)]
    baton.close()


def test_who_has_ended_hands_on_what_is_left_and_asks_no_more(baton: DeviceHandoff) -> None:
    said: list[Message] = []
    token = TurnToken(said.append, baton, None)
    token.take(Grant(9, 1, 0))
    assert token.begins(0)
    token.is_queued()
    token.done(is_idle=True)
    token.end()
    assert said == [TurnEnded(1, is_last=True)]
    assert baton.has_reached(1)
    assert not token.has_turn


def test_a_device_that_has_more_to_do_is_handed_on_by_its_host(baton: DeviceHandoff) -> None:
    signal = FakeSignal()
    token = TurnToken(lambda message: None, baton, signal)
    token.take(Grant(1, 1, 0))
    assert token.begins(0)
    token.done(is_idle=False)
    assert signal.told == []
    assert token.is_spent


def test_who_waits_is_woken_by_the_bell(baton: DeviceHandoff) -> None:
    other = DeviceHandoff(*baton.descriptors)
    token = TurnToken(lambda message: None, baton, None)
    token.take(Grant(1, 2, 1))
    ear, mouth = new_handoff()  # an ear into which nobody speaks
    ringing = threading.Thread(target=lambda: other.reach(1))
    ringing.start()
    while not token.begins(0):
        token.wait(mouth)
    ringing.join()
    DeviceHandoff(ear, mouth).close()


def test_a_baton_never_goes_back(baton: DeviceHandoff) -> None:
    baton.reach(5)
    baton.reach(3)
    assert baton.has_reached(5)
