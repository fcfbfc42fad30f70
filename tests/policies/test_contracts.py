"""Every registered policy keeps the contract, and the static table names exactly what is registered."""

import pytest

from carpool.core.policy import Policy
from carpool.policies.registry import POLICIES, parse_policy, registered
from carpool.testing import PolicyContract

# What a policy cannot serve by its own rule, said here and in its page.
NARROW = {"allox": 1}  # the literal form gives each job one device


def test_the_static_table_is_what_the_decorators_filed() -> None:
    assert set(registered()) == set(POLICIES)


def test_every_policy_has_a_page_and_a_summary(request: pytest.FixtureRequest) -> None:
    pages = request.config.rootpath / "docs" / "policies"
    missing = [name for name in POLICIES if not (pages / f"{name}.md").is_file()]
    assert missing == []
    assert all(listing.summary for listing in POLICIES.values())


def contract(name: str) -> type[PolicyContract]:
    """The contract suite of one policy, a few random runs of each sort."""

    def make_policy(self: PolicyContract) -> Policy:
        return parse_policy(name)

    members = {"make_policy": make_policy, "examples": 8, "widest": NARROW.get(name, 0)}
    return type(f"Test{name.title().replace('-', '')}", (PolicyContract,), members)


for _name in sorted(POLICIES):
    _suite = contract(_name)
    globals()[_suite.__name__] = _suite
