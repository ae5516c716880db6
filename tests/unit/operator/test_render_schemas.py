"""Renders against the API schemas of many versions of Kubernetes, unknown fields refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import kubernetes_validate
import pytest

from hetero_operator.reconcile.model import Capabilities
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import (
    BUDGET,
    CLAIM_TEMPLATE,
    INFERENCE_POOL,
    POD_GROUP,
    POD_MONITOR,
    RenderCase,
    render_cases,
)

VERSIONS: Final = tuple((1, minor) for minor in (25, 28, 31, 33, 34, 35, 37))
CUSTOM_KINDS: Final = {POD_GROUP, POD_MONITOR, INFERENCE_POOL}
"""Of other projects: not in Kubernetes' schemas."""
CASES = {name: case for name, case in render_cases().items() if not name.startswith("example-smollm2")}
"""These examples differ in numbers only."""


def in_version(case: RenderCase, version: tuple[int, int]) -> Capabilities:
    """What a cluster of that version offers of what the case's cluster does."""
    since = {BUDGET: (1, 21), CLAIM_TEMPLATE: (1, 34)}
    kinds = {kind for kind in case.capabilities.kinds if since.get(kind, (1, 0)) <= version and "beta" not in kind[0]}
    return replace(
        case.capabilities, version=version, kinds=frozenset(kinds | (case.capabilities.kinds & CUSTOM_KINDS))
    )


def native_objects(case: RenderCase, version: tuple[int, int]) -> Iterator[Any]:
    todo = OperatorWorld(dict(case.resource), in_version(case, version)).plan()
    yield from (secret.manifest for secret in todo.create)
    yield from (item for item in todo.apply if (item["apiVersion"], item["kind"]) not in CUSTOM_KINDS)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: ".".join(map(str, version)))
def test_every_object_fits_the_schema_of(version: tuple[int, int]) -> None:
    checked = 0
    for case in CASES.values():
        for item in native_objects(case, version):
            kubernetes_validate.validate(dict(item), ".".join(map(str, version)), strict=True)
            checked += 1
    assert checked > 100


def test_claims_are_checked_where_they_exist() -> None:
    kinds = {item["kind"] for item in native_objects(CASES["everything"], (1, 34))}
    assert {"ResourceClaimTemplate", "StatefulSet", "PodDisruptionBudget"} <= kinds
