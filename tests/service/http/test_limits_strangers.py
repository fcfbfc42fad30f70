"""Where requests are from, and whom to believe about it."""

import pytest

from carpool.service.http.limits import client_address

PROXY, SECOND = "10.0.0.1", "10.0.0.2"


@pytest.mark.parametrize(
    ("client", "said", "address"),
    [
        ("7.7.7.7", [], "7.7.7.7"),
        ("7.7.7.7", ["1.1.1.1"], "7.7.7.7"),  # no proxy of ours
        (PROXY, [], PROXY),
        (PROXY, ["1.1.1.1"], "1.1.1.1"),
        (PROXY, ["6.6.6.6, 1.1.1.1"], "1.1.1.1"),  # the first was made up by the client
        (PROXY, ["6.6.6.6", "1.1.1.1"], "1.1.1.1"),
        (PROXY, [f"6.6.6.6, 1.1.1.1, {SECOND}"], "1.1.1.1"),
        (PROXY, [f"{SECOND}"], SECOND),
        (PROXY, [" , "], PROXY),
    ],
)
def test_only_proxies_say_where_requests_are_from(client: str, said: list[str], address: str) -> None:
    headers = [(b"x-forwarded-for", value.encode()) for value in said]
    scope = {"type": "http", "client": (client, 1234), "headers": headers}
    assert client_address(scope, {PROXY, SECOND}) == address


def test_a_request_from_nowhere() -> None:
    assert client_address({"type": "http", "headers": []}, {PROXY}) == ""
