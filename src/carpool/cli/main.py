"""Entry point of ``carpool``: resolves the verb, runs it, and maps errors to exit codes."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import threading
import traceback

import click

from carpool import __version__
from carpool.core.errors import CarpoolError, InputError

VERBS = {  # verb -> its help
    "run": "run the jobs of a file on this machine's devices",
    "serve": "a daemon: takes jobs in as they come, survives being killed",
    "plan": "say what would run where and when each job would end, before anything starts",
    "profile": "measure rate and memory of a training, and save it for plan and run",
    "replay": "let the simulator repeat a run from what was learned, and compare",
    "get": "copy a job's weights and metrics out of a run",
    "simulate": "replay a trace under one or more policies",
    "trace": "make, inspect and convert traces",
    "policies": "list the policies and their parameters",
    "explain": "tell a job's story from a journal",
    "doctor": "try what this machine can do for trainings",
    "why": "why a job waits, or holds what it holds",
    "submit": "give jobs to the daemon, see what they print, and end as they end",
    "ps": "list the daemon's jobs",
    "top": "devices and jobs of the daemon, live",
    "logs": "what a job of the daemon has printed, and goes on to print",
    "cancel": "withdraw jobs of the daemon",
    "pause": "take jobs of the daemon off their devices",
    "resume": "put paused jobs back into the queue",
    "weight": "let a job of the daemon count more or less",
    "limit": "how many devices a job of the daemon may hold",
    "policy": "which policy decides in the daemon, and another one from now on",
    "token": "who may ask the daemon over the network",
    "config": "what is set, and where each value came from",
    "backup": "the daemon's state as one file, while it runs",
    "restore": "put a backup in place",
    "completion": "let the shell complete carpool's words",
    "demo": "four real trainings, one after another and shared: the gain, and a timeline to look at",
}

_MODULES = {  # verb -> the module in cli/verbs that holds it, where that is not the verb's own name
    **dict.fromkeys(("cancel", "pause", "resume", "weight", "limit"), "job_control"),
    **dict.fromkeys(("config", "token", "backup", "restore"), "admin"),
    **dict.fromkeys(("ps", "top"), "status"),
    **dict.fromkeys(("logs", "get"), "job_output"),
    "why": "explain",
    "policies": "policy",
}

FINISHED, JOB_FAILED, BAD_INPUT, OUR_BUG, INTERRUPTED = 0, 1, 2, 3, 130


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, so that ``carpool --help`` stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every verb, in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command behind a verb."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"carpool.cli.verbs.{_MODULES.get(cmd_name, cmd_name)}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but an unknown verb gets the nearest ones."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from carpool.core.errors import UnknownName

            raise UnknownName("command", args[0], VERBS)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="carpool")
def carpool() -> None:
    """Let many deep-learning training jobs share GPUs: all finish sooner, none learns anything different."""


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 a job failed, 2 bad input, 3 our own bug, 130 interrupted."""
    sys.exit(run(args))


def run(args: list[str] | None = None) -> int:
    """Run the command line; its exit code."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave as tidily as after Ctrl-C
    stdout = sys.stdout
    try:
        code = carpool.main(args, prog_name="carpool", standalone_mode=False)
        sys.stdout.flush()
    except InputError as error:
        return _say(str(error), BAD_INPUT)
    except click.ClickException as error:
        return _misused(error)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", INTERRUPTED)
    except SystemExit as stop:
        if sys.stdout is not stdout:  # click's way of saying that nobody reads on, which is no fault
            return FINISHED
        return stop.code if isinstance(stop.code, int) else OUR_BUG
    except OSError as error:
        return _unwritten(error)
    except CarpoolError as error:
        return _say(f"{error}\nThis is a fault in carpool, not in what you gave it.", OUR_BUG)
    except Exception:  # noqa: BLE001  # the outermost frame: whatever arrives here is our own bug
        traceback.print_exc()
        return _say("This is a fault in carpool, not in what you gave it.", OUR_BUG)
    return code if isinstance(code, int) else FINISHED


def _unwritten(error: OSError) -> int:
    """What to make of output that nobody takes: a closed pipe is no fault, a full disk is not ours."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC):
        traceback.print_exception(error)
        return _say("This is a fault in carpool, not in what you gave it.", OUR_BUG)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return FINISHED
    return _say(f"the output cannot be written: {error.strerror}", BAD_INPUT)


def _misused(error: click.ClickException) -> int:
    """Say what click says of a wrong option or argument as our own errors are said: in a line, with the way out."""
    problem = error.format_message()
    if "\n" in problem:  # nothing was asked for, and this is the help
        error.show()
        return BAD_INPUT
    where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx is not None else "carpool"
    return _say(f"{problem[:1].lower()}{problem[1:]} See: {where} --help", BAD_INPUT)


def _say(words: str, code: int) -> int:
    click.echo(f"carpool: {words}", err=True)
    return code
