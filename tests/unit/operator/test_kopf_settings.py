"""kopf's settings: each row of the list of what bites in production."""

from __future__ import annotations

import itertools
from typing import Any

import kopf
import pytest
from kubernetes.aio.client import Configuration

from hetero_operator.kopf_watch import connection_of, registry_of, run_kopf, settings_of

CAP_S = 30.0


def test_pauses_between_attempts_never_end_and_are_short_enough() -> None:
    backoffs: Any = settings_of().networking.error_backoffs
    for _ in range(2):  # kopf iterates anew for each request
        pauses = list(itertools.islice(iter(backoffs), 200))
        assert len(pauses) == 200
        assert all(0 < pause <= CAP_S for pause in pauses)
    assert len(set(itertools.islice(iter(backoffs), 20, 40))) > 1, "jitter"


def test_calls_and_watches_have_time_limits() -> None:
    settings = settings_of()
    assert (settings.networking.request_timeout, settings.networking.connect_timeout) == (30.0, 10.0)
    assert settings.watching.server_timeout == 300
    assert settings.watching.client_timeout is not None
    assert settings.watching.client_timeout > settings.watching.server_timeout


def test_kopf_writes_nothing_and_needs_no_rights_but_ours() -> None:
    settings = settings_of()
    assert settings.peering.standalone
    assert not settings.posting.enabled
    assert settings.scanning.disabled
    assert settings.persistence.finalizer == "heteroinference.io/finalizer"


def test_workers_are_bounded_and_do_not_keep_their_places() -> None:
    settings = settings_of()
    assert settings.queueing.worker_limit is not None
    assert settings.queueing.worker_limit / settings.queueing.idle_timeout > 1000


def test_only_our_kind_is_handled_named_with_its_group_and_no_handler_asks_for_a_finalizer() -> None:
    registry = registry_of(
        Configuration(host="http://x"), deliver=lambda change, item: None, on_watching=lambda watching: None
    )
    (handler,) = registry._watching.get_all_handlers()
    assert handler.selector is not None
    assert (handler.selector.group, handler.selector.version) == ("heteroinference.io", "v1alpha1")
    assert not list(registry._changing.get_all_handlers())
    assert not list(registry._spawning.get_all_handlers())


async def test_kopf_needs_no_name_of_the_user_that_it_runs_as(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user, e.g. 65532, is in no list of users: kopf's own identity would be an error there."""
    asked: dict[str, Any] = {}

    async def operator(**arguments: Any) -> None:
        asked.update(arguments)

    monkeypatch.setattr(kopf, "operator", operator)
    assert await run_kopf(kopf.OperatorRegistry(), settings_of(), namespaces=()) is None
    assert asked["identity"]


async def test_kopf_takes_the_way_to_the_api_server_that_we_take() -> None:
    configuration = Configuration(host="https://server", ssl_ca_cert="/ca")
    configuration.api_key["BearerToken"] = "Bearer abc"
    info = await connection_of(configuration)
    assert isinstance(info, kopf.ConnectionInfo)
    assert (info.server, info.ca_path, info.scheme, info.token) == ("https://server", "/ca", "Bearer", "abc")
