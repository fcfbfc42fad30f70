"""A local daemon for whoever needs one and has none: started aside, to go on after this command."""

from __future__ import annotations

import subprocess
import sys
import time

from carpool.core.errors import CarpoolError
from carpool.service.config import Settings
from carpool.service.sockets import is_answering

LOG = "daemon.log"  # in the daemon's folder: what it says
_PATIENCE_S = 60.0
_LOOK_S = 0.05


def start_daemon(settings: Settings) -> int:
    """Start `carpool serve` with the same settings and wait until it answers; its process id."""
    settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = settings.state / LOG
    with log.open("ab") as out:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "carpool", "serve", "--state", str(settings.state)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=settings.state,
            start_new_session=True,  # Ctrl-C is for this command
        )
    until = time.monotonic() + _PATIENCE_S
    while not is_answering(settings.socket):
        if daemon.poll() is not None or time.monotonic() > until:
            daemon.kill()
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise CarpoolError(f"the daemon did not start: {' '.join(last) or 'it said nothing'} (see {log})")
        time.sleep(_LOOK_S)
    return daemon.pid
