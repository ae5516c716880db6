"""Types, schema and CEL rules judge the same documents alike, in the same words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_api.crd import crd
from hetero_api.errors import ManifestError
from hetero_api.manifest import check_transition, parse_resource
from tests.support.crd_judge import rule_problems, schema_problems, stored
from tests.support.invalid_resources import BASE, INVALID, VALID, Document, InvalidResource, ValidResource, changed

pytestmark = pytest.mark.unit

SCHEMA: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
BY_RULES = [case for case in INVALID if case.caught_by in ("rule", "transition")]
BY_SCHEMA = [case for case in INVALID if case.caught_by == "schema"]


def named(case: InvalidResource | ValidResource) -> str:
    return case.name


def problems_by_types(document: Document, old: Document | None = None) -> list[str]:
    """Every problem, as the operator and `hetero validate` tell it."""
    try:
        new = parse_resource(document)
    except ManifestError as error:
        return list(error.problems)
    return [] if old is None else check_transition(parse_resource(old).spec, new.spec)


def problems_by_rules(document: Document, old: Document | None = None) -> list[str]:
    new, before = stored(SCHEMA, document), None if old is None else stored(SCHEMA, old)
    return [f"{path}: {message}" for path, message in rule_problems(SCHEMA, new, before)]


@pytest.mark.parametrize("case", INVALID, ids=named)
def test_types_name_the_field_at_fault_and_only_that(case: InvalidResource) -> None:
    (problem,) = problems_by_types(case.document, case.old)
    path, _, message = problem.partition(": ")
    assert path == case.path
    assert case.message in message


@pytest.mark.parametrize("case", BY_SCHEMA, ids=named)
def test_the_schema_refuses_at_the_same_field(case: InvalidResource) -> None:
    assert {path for path, _ in schema_problems(SCHEMA, stored(SCHEMA, case.document))} == {case.path}


@pytest.mark.parametrize("case", BY_RULES, ids=named)
def test_rules_say_what_the_types_say(case: InvalidResource) -> None:
    assert schema_problems(SCHEMA, stored(SCHEMA, case.document)) == []
    assert problems_by_rules(case.document, case.old) == problems_by_types(case.document, case.old)


@pytest.mark.parametrize("case", [case for case in INVALID if case.caught_by == "operator"], ids=named)
def test_what_only_the_operator_can_catch_passes_an_api_server(case: InvalidResource) -> None:
    assert schema_problems(SCHEMA, stored(SCHEMA, case.document)) == []
    assert problems_by_rules(case.document) == []


@pytest.mark.parametrize("case", VALID, ids=named)
def test_valid_resources_pass_all_judges(case: ValidResource) -> None:
    assert problems_by_types(case.document, case.old) == []
    assert schema_problems(SCHEMA, stored(SCHEMA, case.document)) == []
    assert problems_by_rules(case.document, case.old) == []


@pytest.mark.parametrize("case", VALID, ids=named)
def test_what_an_api_server_stores_means_the_same_to_the_types(case: ValidResource) -> None:
    document = {**case.document, "spec": stored(SCHEMA, case.document)["spec"]}
    assert parse_resource(document) == parse_resource(case.document)


def test_every_rule_has_a_case() -> None:
    told = {case.message for case in BY_RULES}
    messages = {rule["message"] for rule in all_rules(SCHEMA)}
    # The schema's pattern refuses these two before the rule's clearer words are added.
    patterns = {case.message for case in BY_SCHEMA}
    assert [m for m in messages if not any(part in m for part in told | patterns)] == []


def all_rules(schema: dict[str, Any]) -> list[dict[str, str]]:
    found = list(schema.get("x-kubernetes-validations", ()))
    children = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    return found + [rule for child in children if child for rule in all_rules(child)]


URIS = st.builds(
    lambda scheme, rest: f"{scheme}{rest}",
    st.sampled_from(["hf://", "pvc://", "oci://", "file://", "file:///", "s3://", "hf:/", ""]),
    st.text(alphabet="abZ09/._-:@# ", max_size=12),
)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "spec/model": st.fixed_dictionaries(
            {"uri": URIS},
            optional={
                "revision": st.sampled_from(["main", "v1..2", "a/b", "-x"]),
                "tokenSecretRef": st.just({"name": "hub"}),
                "cache": st.dictionaries(st.sampled_from(["claimName", "hostPath"]), st.sampled_from(["/c", "c"])),
            },
        ),
        "spec/pools/0/type": st.sampled_from(["GPU", "CPU"]),
        "spec/pools/0/ranks": st.integers(0, 66),
        "spec/pools/0/ranksPerPod": st.integers(1, 4),
        "spec/pools/0/gpu": st.sampled_from([None, {}, {"resourceName": "gpu"}]),
        "spec/pools/1/name": st.sampled_from(["cpu", "gpu", "CPU", ""]),
        "spec/pools/1/cpu": st.fixed_dictionaries(
            {},
            optional={
                "memoryPerRank": st.text(alphabet="0125.GiM", max_size=5),
                "numa": st.fixed_dictionaries(
                    {"policy": st.sampled_from(["Required", "BestEffort", "None"])},
                    optional={"claim": st.just({"deviceClassName": "dra.cpu"})},
                ),
                "hugepages": st.fixed_dictionaries(
                    {"perRank": st.from_regex("[0-9]{1,4}(Mi|Gi|Ti)", fullmatch=True)},
                    optional={"size": st.sampled_from(["2Mi", "1Gi"])},
                ),
            },
        ),
        "spec/placement": st.fixed_dictionaries(
            {},
            optional={
                "mode": st.sampled_from(["Auto", "GpuOnly"]),
                "shares": st.dictionaries(
                    st.sampled_from(["attention", "mlp", "vocabulary"]),
                    st.lists(st.sampled_from([0, 1, 0.5]), min_size=3, max_size=5),
                ),
            },
        ),
        "spec/scheduling/tolerations": st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "key": st.sampled_from(["gpu", ""]),
                    "operator": st.sampled_from(["Exists", "Equal"]),
                    "value": st.just("yes"),
                    "effect": st.sampled_from(["NoSchedule", "NoExecute"]),
                    "tolerationSeconds": st.integers(-1, 9),
                },
            ),
            max_size=2,
        ),
        "spec/scheduling/gang": st.fixed_dictionaries(
            {"scheduler": st.sampled_from(["None", "Kueue", "Volcano"])}, optional={"queue": st.just("team")}
        ),
        "spec/podMetadata/labels": st.dictionaries(
            st.sampled_from(["a", "app.kubernetes.io/name", "heteroinference.io/x"]), st.just("v")
        ),
    },
)  # fmt: skip


@given(CHANGES)
def test_types_and_crd_accept_the_same_documents(changes: dict[str, Any]) -> None:
    document = changed(changes)
    by_types = problems_by_types(document)
    if schema_problems(SCHEMA, stored(SCHEMA, document)):
        assert by_types
        return
    by_rules = problems_by_rules(document)
    # Types look at an object only when its fields are right, so they may tell fewer of several problems.
    assert set(by_types) <= set(by_rules)
    assert bool(by_types) == bool(by_rules)


@given(st.lists(st.sampled_from(["gpu", "cpu", "more"]), min_size=1, max_size=3, unique=True), st.data())
def test_types_and_crd_allow_the_same_transitions(names: list[str], data: st.DataObject) -> None:
    kinds = {name: data.draw(st.sampled_from(["GPU", "CPU"])) for name in names}
    pools = [{"name": name, "type": kind, "ranks": 2} for name, kind in kinds.items()]
    new = changed({"spec/pools": pools})
    assert problems_by_types(new, BASE) == problems_by_rules(new, BASE)
