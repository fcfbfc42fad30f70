"""A program survives storage as it is: what a job executes is never cut or escaped."""

from __future__ import annotations

import json

from carpool.jobs.program import Program


def test_command_and_environment_keep_every_character() -> None:
    text = "\x1b[0m\r" + "y" * 100_000
    program = Program(command=("python", "-c", text), environment={"PROMPT": text})
    assert Program.from_json(json.loads(json.dumps(program.as_json()))) == program
