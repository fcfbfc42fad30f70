"""Authentication: principals, roles, and access tokens in a file that is reloaded when it changes."""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

from carpool.core.errors import CarpoolError, InputError, UnknownName


class Role(StrEnum):
    """What a person may do."""

    ADMIN = "admin"  # sees and touches everything
    USER = "user"  # submits jobs, and sees and touches those
    READER = "read-only"  # sees everything, touches nothing


class Forbidden(CarpoolError):
    """Somebody asked for what their role does not allow."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who asks something of a daemon."""

    name: str
    role: Role = Role.USER

    def may_see(self, owner: str) -> bool:
        """Whether they are told of somebody's jobs."""
        return self.role is not Role.USER or owner == self.name

    def may_touch(self, owner: str) -> bool:
        """Whether they may change somebody's jobs."""
        return self.role is Role.ADMIN or (self.role is Role.USER and owner == self.name)

    def check_submits(self) -> None:
        """Forbidden for one who only reads."""
        if self.role is Role.READER:
            raise Forbidden(f"{self.name!r} may only read. Use a token of the role user or admin.")

    def check_governs(self) -> None:
        """Forbidden unless they may change how the daemon itself works."""
        if self.role is not Role.ADMIN:
            raise Forbidden(f"{self.name!r} has the role {self.role}; this takes a token of the role admin.")


# A token is 32 random bytes. Only its SHA-256 is kept: what is random needs no slow hash against guessing, and whoever
# reads the file learns no token. All hashes are compared, each in constant time, so that nothing is told by how long a
# wrong token takes.


TOKEN_FILE = "tokens.json"
_PREFIX = "carpool_"  # so that people and scanners of secrets know one when they see it
_NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,63}")


@dataclass(frozen=True, slots=True)
class AccessToken:
    """What is kept of a token."""

    id: str
    person: Principal
    hash: str
    made_at: float


class AccessTokens:
    """The tokens of one daemon, in a file of mode 0600 that is read again whenever it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = str(path)
        self._seen: tuple[int, int, int] | None = None
        self._tokens: tuple[AccessToken, ...] = ()

    def all(self) -> tuple[AccessToken, ...]:
        """Every token, oldest first."""
        try:
            about = os.stat(self._name)  # noqa: PTH116  # at every request, and Path takes its time
        except FileNotFoundError:
            self._seen, self._tokens = None, ()
            return ()
        seen = (about.st_mtime_ns, about.st_size, about.st_ino)
        if seen != self._seen:
            self._tokens = tuple(_token(row) for row in json.loads(self.path.read_text(encoding="utf-8"))["tokens"])
            self._seen = seen
        return self._tokens

    def add(self, person: Principal, made_at: float) -> str:
        """Make a token for somebody; it is told now and never again."""
        if not _NAME.fullmatch(person.name):
            raise InputError(
                f"a person cannot be called {person.name!r}",
                way_out="A name begins with a letter or digit and holds letters, digits, '.', '_' and '-', at most 64.",
            )
        text = _PREFIX + secrets.token_urlsafe(32)
        known = {token.id for token in self.all()}
        number = next(n for n in range(1, len(known) + 2) if f"{person.name}-{n}" not in known)
        self._write([*self.all(), AccessToken(f"{person.name}-{number}", person, _hash(text), made_at)])
        return text

    def remove(self, name: str) -> None:
        """Let a token be one no longer; from now on nobody is let in by it."""
        kept = [token for token in self.all() if token.id != name]
        if len(kept) == len(self.all()):
            raise UnknownName("token", name, [token.id for token in self.all()], where=str(self.path))
        self._write(kept)

    def who(self, text: str) -> Principal | None:
        """Whose token this is; None: nobody's."""
        given = _hash(text)
        found = None
        for token in self.all():
            if hmac.compare_digest(token.hash, given):
                found = token.person
        return found

    def _write(self, tokens: list[AccessToken]) -> None:
        rows = [
            {
                "id": each.id,
                "person": each.person.name,
                "role": each.person.role,
                "hash": each.hash,
                "made_at": each.made_at,
            }
            for each in tokens
        ]
        text = json.dumps({"schema": 1, "tokens": rows}, indent=1)
        write_secret(self.path, text)
        self._seen = None


def write_secret(path: Path, text: str) -> None:
    """Write a file that nobody else may read, at no instant, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "replace")).hexdigest()


def _token(row: dict[str, Any]) -> AccessToken:
    return AccessToken(row["id"], Principal(row["person"], Role(row["role"])), row["hash"], row["made_at"])
