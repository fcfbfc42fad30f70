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
from carpool.core.errors import CarpoolError, InputError, UnknownName

_SECTIONS = {  # heading of `carpool --help` -> verb -> summary
    "Jobs on this machine": {
        "run": "Run the jobs of a file on this machine's devices.",
        "federate": "Train several models on the data of many devices (federated learning).",
        "plan": "Forecast where each job would run and when it would end.",
        "profile": "Measure a training's step rate and memory use.",
        "replay": "Simulate a recorded run and compare with what happened.",
        "results": "Compare the jobs of a sweep or run: hyper-parameters, metrics, best job.",
        "get": "Copy a job's weights, metrics and log.",
        "explain": "Show a job's history: decisions, reasons and measurements.",
        "why": "Show why a job waits, or why it has its current devices.",
        "slurm": "Run jobs on a Slurm cluster, in as many allocations as it takes.",
        "doctor": "Check what this machine supports.",
        "demo": "Run four trainings one after another and side by side, and compare.",
    },
    "Daemon": {
        "serve": "Run the daemon: accept jobs, resume them after a crash.",
        "stop": "Stop the daemon of this machine; its jobs resume with the next one.",
        "agent": "Let a scheduler on another machine run jobs on this one.",
        "submit": "Submit jobs to the daemon and follow their output.",
        "ps": "List the daemon's jobs.",
        "top": "Show the daemon's devices and jobs, live.",
        "logs": "Print or follow a job's log.",
        "cancel": "Cancel jobs.",
        "pause": "Preempt jobs until they are resumed.",
        "resume": "Put paused jobs back into the queue.",
        "weight": "Change a job's weight.",
        "limit": "Change how many devices a job may use.",
        "policy": "Show or change the daemon's scheduling policy.",
        "drain": "Move all jobs off a node and schedule none on it.",
        "undrain": "Schedule jobs on a drained node again.",
        "token": "Manage the access tokens of the daemon.",
        "config": "Show every setting and where its value comes from.",
        "backup": "Write the daemon's state to one file while it runs.",
        "restore": "Restore the daemon's state from a backup.",
    },
    "Simulation": {
        "simulate": "Simulate a trace under one or more policies.",
        "trace": "Generate, inspect and convert traces.",
        "policies": "List the scheduling policies and their parameters.",
    },
    "Shell": {"completion": "Print the shell completion script."},
}
VERBS = {verb: summary for section in _SECTIONS.values() for verb, summary in section.items()}

_MODULES = {  # verb -> module in cli/verbs, where the names differ
    **dict.fromkeys(("cancel", "pause", "resume", "weight", "limit"), "job_control"),
    **dict.fromkeys(("config", "token", "backup", "restore", "stop", "drain", "undrain", "completion"), "admin"),
    **dict.fromkeys(("agent", "slurm"), "machines"),
    **dict.fromkeys(("ps", "top"), "status"),
    **dict.fromkeys(("logs", "get"), "job_output"),
    "why": "explain",
    "policies": "policy",
}

FINISHED, JOB_FAILED, BAD_INPUT, OUR_BUG, INTERRUPTED = 0, 1, 2, 3, 130
_BUG = "This is a bug in carpool, not an error in your input."


class LazyGroup(click.Group):
    """Command group that imports a command when it is called, so that ``carpool --help`` starts fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"carpool.cli.verbs.{_MODULES.get(cmd_name, cmd_name)}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise UnknownName("command", args[0], VERBS)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs by section without importing them."""
        width = max(map(len, VERBS))
        for heading, verbs in _SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{verb:{width}}", summary) for verb, summary in verbs.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="carpool")
def carpool() -> None:
    """Schedule many deep-learning training jobs on shared GPUs without changing their results.

    `carpool COMMAND --help` describes a command, with examples.
    """


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit: 0 success, 1 a job failed, 2 bad input, 3 bug in carpool, 130 interrupted."""
    if sys.dont_write_bytecode:
        from carpool.runtime.process.bytecode import use_bytecode_cache

        use_bytecode_cache(__file__)
    sys.exit(run(args))


def run(args: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    stdout = sys.stdout
    try:
        code = carpool.main(args, prog_name="carpool", standalone_mode=False)
        sys.stdout.flush()
    except InputError as error:
        return _fail(str(error), BAD_INPUT)
    except click.ClickException as error:
        return _usage_error(error)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", INTERRUPTED)
    except SystemExit as stop:
        if sys.stdout is not stdout:  # click replaces stdout when its reader has closed the pipe
            return FINISHED
        return stop.code if isinstance(stop.code, int) else OUR_BUG
    except OSError as error:
        return _output_error(error)
    except CarpoolError as error:
        return _fail(f"{error}\n{_BUG}", OUR_BUG)
    except Exception:  # noqa: BLE001  # the outermost frame: anything that arrives here is a bug
        traceback.print_exc()
        return _fail(_BUG, OUR_BUG)
    return code if isinstance(code, int) else FINISHED


def _output_error(error: OSError) -> int:
    """Exit code for output that cannot be written: success for a closed pipe, bad input for a full disk."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC):
        traceback.print_exception(error)
        return _fail(_BUG, OUR_BUG)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return FINISHED
    return _fail(f"cannot write the output: {error.strerror}", BAD_INPUT)


def _usage_error(error: click.ClickException) -> int:
    """Print click's message for a wrong option or argument on one line, with the help to read."""
    problem = error.format_message()
    if "\n" in problem:  # a group was called without a command: the message is its help
        error.show()
        return BAD_INPUT
    where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx is not None else "carpool"
    return _fail(f"{problem[:1].lower()}{problem[1:]} See: {where} --help", BAD_INPUT)


def _fail(message: str, code: int) -> int:
    click.echo(f"carpool: {message}", err=True)
    return code
