"""`kubectl delete hinf`: everything goes, soon."""

from __future__ import annotations

from tests.e2e.served import GONE_TIMEOUT_S, Served


def test_all_that_a_resource_owned_is_gone_within_a_minute(served: Served) -> None:
    assert served.leftovers(), "there must be something to delete"
    assert served.delete() < GONE_TIMEOUT_S
