"""A worker's sign of life, from a thread of its own: a long step is not a stopped process."""

from __future__ import annotations

import os
import threading

from carpool.runtime.channel import Channel, Closed
from carpool.runtime.protocol import Alive


class Heartbeat:
    """Says `Alive` at an interval; ends the process when nobody hears it, even in the middle of a step."""

    def __init__(self, channel: Channel, interval_s: float) -> None:
        self._channel = channel
        self._interval_s = interval_s
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def _beat(self) -> None:
        wait = threading.Event().wait
        try:
            while not wait(self._interval_s):
                self._channel.send(Alive())
        except Closed:
            os._exit(0)
