"""Executor process; ``python -m carpool.runtime.executor FD [PARENT]`` serves PARENT over FD, or all clients of FD.

Its first act is to launch the fork server, which then imports torch while the executor imports its own modules.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from carpool.runtime.process.bytecode import use_bytecode_cache
from carpool.runtime.process.launch import launch_forkserver, limit_spinning


def main() -> NoReturn:
    """Run the executor of the arguments."""
    limit_spinning(os.environ)  # of workers and commands alike, so that commands can start as forks
    forkserver = launch_forkserver()
    use_bytecode_cache(__file__)
    from carpool.runtime.executor.server import serve

    code = serve(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else None, forkserver)
    logging.shutdown()
    sys.stderr.flush()
    # everything is closed; finalizing the interpreter would only delay the exit that the client waits for
    os._exit(code)


if __name__ == "__main__":
    main()
