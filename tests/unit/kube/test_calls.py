"""How the fault proxy reads requests."""

from __future__ import annotations

import pytest

from tests.support.kube.calls import Target, parse_path, verb_of

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/api/v1/namespaces/a/pods/p/status", Target("", "v1", "pods", "status", "a", "p")),
        ("/apis/apps/v1/namespaces/a/statefulsets", Target("apps", "v1", "statefulsets", "", "a", "")),
        ("/apis/apps/v1/statefulsets", Target("apps", "v1", "statefulsets")),
        ("/api/v1/namespaces", Target("", "v1", "namespaces")),
        ("/api/v1/namespaces/a", Target("", "v1", "namespaces", "", "", "a")),
        ("/api/v1/namespaces/a/finalize", Target("", "v1", "namespaces", "finalize", "", "a")),
        ("/apis/apps/v1", Target()),
        ("/version", Target()),
    ],
)
def test_a_path_names_its_target(path: str, target: Target) -> None:
    assert parse_path(path) == target


@pytest.mark.parametrize(
    ("method", "path", "query", "content", "verb"),
    [
        ("GET", "/api/v1/pods", {}, "", "list"),
        ("GET", "/api/v1/pods", {"watch": "true"}, "", "watch"),
        ("GET", "/api/v1/namespaces/a/pods/p", {}, "", "get"),
        ("GET", "/apis", {}, "", "get"),
        ("POST", "/api/v1/namespaces/a/pods", {}, "", "create"),
        ("PUT", "/api/v1/namespaces/a/pods/p", {}, "", "update"),
        ("PATCH", "/api/v1/namespaces/a/pods/p", {}, APPLY, "apply"),
        ("PATCH", "/api/v1/namespaces/a/pods/p", {}, MERGE, "patch"),
        ("DELETE", "/api/v1/namespaces/a/pods/p", {}, "", "delete"),
        ("DELETE", "/api/v1/namespaces/a/pods", {}, "", "deletecollection"),
    ],
)
def test_a_verb_is_rbacs_verb(method: str, path: str, query: dict[str, str], content: str, verb: str) -> None:
    assert verb_of(method, parse_path(path), query, content) == verb
