"""Requests that schemathesis makes of the HTTP door's own types, right ones and wrong ones: none breaks a gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.support.examples import examples
from tests.support.openapi_document import BODIES, READ, STATUSES, openapi_document
from tests.unit.server.gateway_process import GatewayProcess

pytestmark = [pytest.mark.unit, pytest.mark.slow]

EXAMPLES = 40
SCHEMA: Any = schemathesis.openapi.from_dict(openapi_document("g"))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path_factory.mktemp("gateway"))
    yield process
    process.close()


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        *((path, GenerationMode.POSITIVE) for path in (*BODIES, *READ)),
        *((path, GenerationMode.NEGATIVE) for path in BODIES),
    ],
)
def test_any_request_gets_an_answer_that_is_no_fault_of_the_server(
    gateway: GatewayProcess, path: str, mode: GenerationMode
) -> None:
    operation = SCHEMA[path]["POST" if path in BODIES else "GET"]

    @settings(
        max_examples=examples(EXAMPLES),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        answer = case.call(base_url=f"http://{gateway.addresses['http']}", timeout=60)
        assert str(answer.status_code) in STATUSES, f"{answer.status_code} {answer.text:.300}\n{case.as_curl_command()}"
        if answer.status_code != 200 and path in BODIES:
            assert answer.json()["error"]["message"], case.as_curl_command()

    ask()
    assert gateway.report().is_idle
