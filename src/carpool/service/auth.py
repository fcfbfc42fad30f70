"""Authentication: principals, roles, callers, and access tokens in a file that is reloaded when it changes."""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

from carpool.core.errors import CarpoolError, InputError, UnknownName

TOKEN_FILE = "tokens.json"
_PREFIX = "carpool_"  # lets secret scanners recognise a token
_NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,63}")


class Role(StrEnum):
    """What a principal may do."""

    ADMIN = "admin"  # sees and changes everything
    USER = "user"  # submits jobs, sees and changes its own
    READER = "read-only"  # sees everything, changes nothing


class Forbidden(CarpoolError):
    """The caller's role does not allow the request."""


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated user and their role."""

    name: str
    role: Role = Role.USER

    def may_see(self, owner: str) -> bool:
        return self.role is not Role.USER or owner == self.name

    def may_change(self, owner: str) -> bool:
        return self.role is Role.ADMIN or (self.role is Role.USER and owner == self.name)

    def check_may_submit(self) -> None:
        if self.role is Role.READER:
            raise Forbidden(f"{self.name!r} has the role {self.role}. Use a token with the role user or admin.")

    def check_is_admin(self) -> None:
        if self.role is not Role.ADMIN:
            raise Forbidden(f"{self.name!r} has the role {self.role}. Use a token with the role admin.")


class AuthMethod(Enum):
    """How a caller authenticated."""

    SOCKET = "Unix socket"
    TOKEN = "token"
    COOKIE = "cookie"


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated sender of a request."""

    principal: Principal
    method: AuthMethod
    is_valid: Callable[[], bool] = lambda: True  # False once the token has been removed


@dataclass(frozen=True, slots=True)
class AccessToken:
    """The stored form of a token: its SHA-256, never the token itself."""

    id: str
    principal: Principal
    hash: str
    made_at: float


class AccessTokens:
    """The tokens of one daemon, in a file of mode 0600 that is reloaded when it changes.

    A token is 32 random bytes, so a plain SHA-256 is enough: nothing random needs a slow hash against guessing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = str(path)
        self._stamp: tuple[int, int, int] | None = None
        self._tokens: tuple[AccessToken, ...] = ()

    def all(self) -> tuple[AccessToken, ...]:
        """Every token, oldest first."""
        try:
            stat = os.stat(self._name)  # noqa: PTH116  # called on every request, and Path.stat is slower
        except FileNotFoundError:
            self._stamp, self._tokens = None, ()
            return ()
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if stamp != self._stamp:
            self._tokens = tuple(_from_json(row) for row in json.loads(self.path.read_text(encoding="utf-8"))["tokens"])
            self._stamp = stamp
        return self._tokens

    def add(self, principal: Principal, made_at: float) -> str:
        """Create a token and return its text, which is not stored."""
        if not _NAME.fullmatch(principal.name):
            raise InputError(
                f"user name {principal.name!r} is not valid",
                way_out="Use at most 64 letters, digits, '.', '_' or '-', beginning with a letter or digit.",
            )
        text = _PREFIX + secrets.token_urlsafe(32)
        used = {token.id for token in self.all()}
        number = next(n for n in range(1, len(used) + 2) if f"{principal.name}-{n}" not in used)
        self._write([*self.all(), AccessToken(f"{principal.name}-{number}", principal, _hash(text), made_at)])
        return text

    def remove(self, token_id: str) -> None:
        kept = [token for token in self.all() if token.id != token_id]
        if len(kept) == len(self.all()):
            raise UnknownName("token", token_id, [token.id for token in self.all()], where=str(self.path))
        self._write(kept)

    def authenticate(self, text: str) -> Principal | None:
        """Return the principal of a token; None when the token is unknown.

        All hashes are compared, each in constant time, so that the response time reveals nothing about valid tokens.
        """
        given = _hash(text)
        found = None
        for token in self.all():
            if hmac.compare_digest(token.hash, given):
                found = token.principal
        return found

    def _write(self, tokens: list[AccessToken]) -> None:
        rows = [
            {
                "id": token.id,
                "person": token.principal.name,
                "role": token.principal.role,
                "hash": token.hash,
                "made_at": token.made_at,
            }
            for token in tokens
        ]
        write_secret(self.path, json.dumps({"schema": 1, "tokens": rows}, indent=1))
        self._stamp = None


def write_secret(path: Path, text: str) -> None:
    """Write a file of mode 0600 atomically."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "replace")).hexdigest()


def _from_json(row: dict[str, Any]) -> AccessToken:
    return AccessToken(row["id"], Principal(row["person"], Role(row["role"])), row["hash"], row["made_at"])
