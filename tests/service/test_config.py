"""What is said later wins, and every value knows where it came from."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.service.config import SETTINGS, SettingType, misspelled_variables, read_settings, variable


def written(folder: Path, text: str) -> dict[str, str]:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return {"HOME": str(folder), "CARPOOL_CONFIG": str(path)}


def test_defaults_file_environment_and_flags_in_this_order(tmp_path: Path) -> None:
    environment = written(tmp_path, 'port = 1\nhost = "::1"\nroots = ["~/work"]\n[users.ada]\njobs = 3\n')
    settings = read_settings(environment | {"CARPOOL_PORT": "2", "CARPOOL_HOSTS": "a,b"}, {"port": 3, "host": None})
    assert (settings["port"], settings.origins["port"]) == (3, "flag --port")
    assert (settings["host"], settings.origins["host"]) == ("::1", f"file {tmp_path}/config.toml")
    assert (settings["hosts"], settings.origins["hosts"]) == (("a", "b"), "environment CARPOOL_HOSTS")
    assert (settings["burst"], settings.origins["burst"]) == (200.0, "default")
    assert settings.roots == (tmp_path / "work",)
    assert settings.users == {"ada": {"jobs": 3}}


def test_folders_are_where_such_things_are(tmp_path: Path) -> None:
    plain = read_settings({"HOME": str(tmp_path)})
    assert plain.state == tmp_path / ".local" / "state" / "carpool"
    assert plain.socket == plain.state / "api.sock"
    moved = read_settings({"HOME": str(tmp_path), "XDG_STATE_HOME": "/x", "CARPOOL_SOCKET": "/run/c.sock"})
    assert (moved.state, moved.socket) == (Path("/x/carpool"), Path("/run/c.sock"))
    unset = read_settings({"HOME": str(tmp_path), "CARPOOL_STATE": "", "CARPOOL_PORT": ""})
    assert (unset.state, unset["port"]) == (tmp_path / ".local/state/carpool", 7637)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "Did you mean port"),
        ('port = "x"', "port is 'x'. Give a whole number"),
        ("port = -1", "Give a whole number"),
        ("burst = 0", "Give a number above 0"),
        ('roots = "x"', "Give a list of strings"),
        ("token = 5", "token is …"),
        ("port = ", "cannot be read"),
    ],
)
def test_mistakes_are_told_with_their_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as told:
        read_settings(written(tmp_path, text))
    assert "config.toml" in str(told.value)


@given(st.sampled_from(sorted(SETTINGS)), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_any_text_in_the_environment_is_taken_or_refused_with_its_name(name: str, text: str) -> None:
    kind = SETTINGS[name].kind
    environment = {"HOME": "/", variable(name): text}
    takes = {SettingType.WHOLE: str.isdecimal, SettingType.NUMBER: is_positive, SettingType.SWITCH: is_switch}
    if text and kind in takes and not takes[kind](text):
        with pytest.raises(InputError, match=variable(name)):
            read_settings(environment)
    else:
        value = read_settings(environment)[name]
        types = {
            SettingType.TEXT: str,
            SettingType.WHOLE: int,
            SettingType.NUMBER: float,
            SettingType.TEXTS: tuple,
            SettingType.SWITCH: bool,
        }
        assert isinstance(value, types[kind])


def is_switch(text: str) -> bool:
    return text.lower() in ("true", "false", "1", "0")


def test_a_switch_is_turned_by_file_environment_and_flag(tmp_path: Path) -> None:
    environment = written(tmp_path, "insecure_http = true")
    assert read_settings(environment, {"insecure_http": None})["insecure_http"] is True
    assert read_settings(environment | {"CARPOOL_INSECURE_HTTP": "false"})["insecure_http"] is False
    with pytest.raises(InputError, match="Give true or false"):
        read_settings(environment | {"CARPOOL_INSECURE_HTTP": "perhaps"})


def is_positive(text: str) -> bool:
    try:
        return 0.0 < float(text) < 1e18
    except ValueError:
        return False


def test_variables_that_were_probably_meant_as_settings_are_found() -> None:
    mine = {"CARPOOL_URL": "CARPOOL_SERVER", "CARPOOL_STATE_DIR": "CARPOOL_STATE", "CARPOOL_DEVICE": "CARPOOL_DEVICES"}
    others = ["CARPOOL_SERVICE_HOST", "CARPOOL_PORT_7637_TCP", "CARPOOL_JOB", "CARPOOL_FOLDER", "CARPOOL_DATA", "URL"]
    known = ["CARPOOL_SERVER", "CARPOOL_STATE", "CARPOOL_CONFIG"]
    assert dict(misspelled_variables(dict.fromkeys([*mine, *others, *known], "x"))) == mine
