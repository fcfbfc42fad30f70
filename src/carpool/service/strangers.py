"""Those who come with wrong tokens: where they are from, and how often they may try."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import Scope

from carpool.service.limits import Limits
from carpool.service.rates import Buckets


class Strangers:
    """Who comes with wrong tokens, by address: after some they have to wait."""

    def __init__(self, limits: Limits, proxies: Collection[str] = ()) -> None:
        self._buckets = Buckets(limits.strangers_per_s, limits.strangers_burst)
        self._proxies = frozenset(proxies)

    def wait_s(self, scope: Scope, at: float) -> float:
        """One more from there: how long they have to wait for the next; 0 where they need not."""
        return self._buckets.take(address_of(scope, self._proxies), at)


def address_of(scope: Scope, proxies: Collection[str]) -> str:
    """Where a request is from: behind a proxy, what that says; what anybody else says of it counts for nothing.

    Each proxy adds to ``X-Forwarded-For`` whom it heard, so that only its end can be believed, up to the first address
    that is no proxy of ours.
    """
    address = str((scope.get("client") or ("", 0))[0])
    said = ",".join(Headers(scope=scope).getlist("x-forwarded-for")).split(",")
    while address in proxies and said:
        address = said.pop().strip() or address
    return address
