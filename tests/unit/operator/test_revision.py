"""Revisions: the same for the same wish, however it is spelled; another for another."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hetero_api.contract import ANNOTATION_RESTARTED_AT
from hetero_api.manifest import parse_resource
from hetero_operator.reconcile.revision import Revisions, revisions_of
from tests.support.render_cases import everything, resource_of

MINIMAL = "{model: {uri: hf://a/b}, pools: [{name: cpu, type: CPU, ranks: 2}]}"


def revisions(resource: dict[str, Any]) -> Revisions:
    return revisions_of(resource, parse_resource(resource).spec)


def with_spec(spec: str, **metadata: Any) -> dict[str, Any]:
    return resource_of("x", spec, **metadata)


def test_the_hashes_are_those_of_the_first_release() -> None:
    # A change of these restarts every group of every user at the upgrade.
    assert revisions(with_spec(MINIMAL)) == Revisions(ranks="396ea8c160", gateway="396ea8c160")


@pytest.mark.parametrize(
    "spelled",
    [
        "{model: {uri: hf://a/b, dtype: auto}, pools: [{name: cpu, type: CPU, ranks: 2, ranksPerPod: 1}]}",
        "{model: {uri: hf://a/b, cache: {}}, pools: [{name: cpu, type: CPU, ranks: 2, cpu: {}}], engine: {}}",
        "{model: {uri: hf://a/b}, pools: [{name: cpu, type: CPU, ranks: 2, sharedMemory: 1024Mi}], scheduling: {}}",
        "{model: {uri: hf://a/b}, pools: [{name: cpu, type: CPU, ranks: 2, scheduling: {tolerations: []}}]}",
        "{pools: [{ranks: 2, type: CPU, name: cpu}], model: {uri: hf://a/b}, podMetadata: {labels: {}}}",
        "{model: {uri: hf://a/b, revision: null}, pools: [{name: cpu, type: CPU, ranks: 2}]}",
        "{model: {uri: hf://a/b}, pools: [{name: cpu, type: CPU, ranks: 2, cpu: {numa: {policy: BestEffort}}}]}",
    ],
)  # fmt: skip
def test_another_spelling_of_the_same_wish_has_the_same_revisions(spelled: str) -> None:
    assert revisions(with_spec(spelled)) == revisions(with_spec(MINIMAL))


def test_defaults_that_an_api_server_stores_change_nothing() -> None:
    resource = with_spec(MINIMAL)
    stored = copy.deepcopy(resource)
    stored["spec"] = parse_resource(resource).spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert revisions(stored) == revisions(resource)


def test_the_gateways_fields_change_the_gateways_revision_only() -> None:
    before, resource = revisions(everything()), everything()
    resource["spec"]["engine"]["maxNumSeqs"] += 1
    after = revisions(resource)
    assert after.ranks == before.ranks
    assert after.gateway != before.gateway


def test_the_ranks_fields_change_both() -> None:
    before, resource = revisions(everything()), everything()
    resource["spec"]["pools"][0]["sharedMemory"] = "9Gi"
    after = revisions(resource)
    assert after.ranks != before.ranks
    assert after.gateway != before.gateway


def test_what_restarts_nothing_changes_neither() -> None:
    before, resource = revisions(everything()), everything()
    resource["spec"]["gateway"]["service"]["port"] = 444
    resource["spec"]["suspend"] = True
    assert revisions(resource) == before


def test_restarted_at_changes_both() -> None:
    before = revisions(with_spec(MINIMAL))
    after = revisions(with_spec(MINIMAL, annotations={ANNOTATION_RESTARTED_AT: "2030-01-01T00:00:00Z"}))
    assert after.ranks != before.ranks
    assert after.gateway != before.gateway


def test_other_annotations_change_neither() -> None:
    noted = with_spec(MINIMAL, annotations={"example.com/note": "hello"}, generation=7)
    assert revisions(noted) == revisions(with_spec(MINIMAL))
