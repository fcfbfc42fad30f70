"""Executor process; ``python -m carpool.runtime.executor FD [PARENT]`` serves PARENT over FD, or all clients of FD.

Its first act is to launch the fork server, which then imports torch while the executor imports its own modules.
"""

from __future__ import annotations

import sys

from carpool.runtime.process.launch import launch_forkserver


def main() -> int:
    """Run the executor of the arguments; its exit code."""
    forkserver = launch_forkserver()
    from carpool.runtime.executor.server import serve

    return serve(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else None, forkserver)


if __name__ == "__main__":
    sys.exit(main())
