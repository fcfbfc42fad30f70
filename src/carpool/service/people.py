"""Who asks: a name and what it may do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from carpool.core.errors import CarpoolError


class Role(StrEnum):
    """What a person may do."""

    ADMIN = "admin"  # sees and touches everything
    USER = "user"  # submits jobs, and sees and touches those
    READER = "read-only"  # sees everything, touches nothing


class Forbidden(CarpoolError):
    """Somebody asked for what their role does not allow."""


@dataclass(frozen=True, slots=True)
class Person:
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
