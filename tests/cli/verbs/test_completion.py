"""``carpool completion``: the script of each shell."""

import pytest

from carpool.cli.main import run


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_prints_the_script_of_a_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert "_CARPOOL_COMPLETE" in capsys.readouterr().out
