"""AccessTokens: creation, authentication, revocation, and reloading of the token file."""

from pathlib import Path

import pytest

from carpool.core.errors import InputError, UnknownName
from carpool.service.auth import AccessTokens, Principal

ADA = Principal("ada")


def test_the_token_file_is_private_and_holds_only_hashes(tmp_path: Path) -> None:
    tokens = AccessTokens(tmp_path / "deep" / "tokens.json")
    secret = tokens.add(ADA, 0.0)
    assert tokens.path.stat().st_mode & 0o777 == 0o600
    assert secret not in tokens.path.read_text(encoding="utf-8")
    assert tokens.authenticate(secret) == ADA
    assert tokens.authenticate(secret + "x") is tokens.authenticate("") is None


def test_a_token_is_known_to_other_readers_of_the_file_until_it_is_removed(tmp_path: Path) -> None:
    writer, reader = (AccessTokens(tmp_path / "tokens.json") for _ in range(2))
    first, second = (writer.add(ADA, 0.0) for _ in range(2))
    assert [token.id for token in reader.all()] == ["ada-1", "ada-2"]
    writer.remove("ada-1")
    assert (reader.authenticate(first), reader.authenticate(second)) == (None, ADA)
    with pytest.raises(UnknownName, match="ada-1"):
        writer.remove("ada-1")


@pytest.mark.parametrize("name", ["", "-a", "a b", "a" * 65])
def test_invalid_user_names_are_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="user name"):
        AccessTokens(tmp_path / "tokens.json").add(Principal(name), 0.0)
