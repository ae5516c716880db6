"""Keys files: what is read, what is refused, and what is never in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_api.api_keys import KeyEntry, Role, digest_of, dump_entry, hash_of, new_key, parse_keys, read_keys
from hetero_api.errors import ManifestError

pytestmark = pytest.mark.unit

HASH = hash_of("a-key")


def entry(**fields: Any) -> str:
    return yaml.safe_dump([{"name": "team-a", "hashes": [HASH], **fields}])


def test_an_entry_has_the_role_of_a_user_and_no_limits_unless_it_says_so() -> None:
    (found,) = parse_keys(entry())
    assert found.roles == [Role.USER]
    assert found.limits.tokens_per_minute is None
    assert found.digests == (digest_of("a-key"),)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must be a list"),
        ("- {name: a", "is no valid YAML"),
        ("- name: 2025-02-30", "is no valid YAML: day is out of range"),
        ("- name: !!int abc", "is no valid YAML"),
        ("- name: !!bool abc", "is no valid YAML"),
        ("- {name: a, hashes: " + "[" * 3000 + "]" * 3000 + "}", "is no valid YAML"),
        (entry() + "---\n" + entry(), "must be a list"),
        (entry(name="a b"), "[0].name: must be of letters"),
        (entry(hashes=[]), "[0].hashes: must not be empty"),
        (entry(hashes=["a-key"]), "[0].hashes[0]: must be sha256: and 64 hexadecimal digits"),
        (entry(roles=["root"]), "[0].roles[0]: must be one of user, metrics, admin"),
        (entry(limits={"tokensPerMinute": 0}), "[0].limits.tokensPerMinute: must be at least 1"),
        (
            entry(limits={"tokensPerMinut": 1}),
            "[0].limits.tokensPerMinut: unknown field; did you mean tokensPerMinute?",
        ),
        (entry() + entry(hashes=[hash_of("b")]), "name team-a is in the file 2 times"),
        (entry() + entry(name="b"), f"hash {HASH} is in the file 2 times"),
    ],
)
def test_a_problem_of_a_keys_file_names_its_place(text: str, problem: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_keys(text, source="keys.yaml")
    assert caught.value.problems[0].startswith(problem)
    assert caught.value.source == "keys.yaml"


def test_an_empty_list_lets_nobody_in() -> None:
    assert parse_keys("[]") == ()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"none\.yaml: cannot be read: No such file"):
        read_keys(tmp_path / "none.yaml")


def test_an_entry_is_read_as_it_was_written_and_holds_no_key() -> None:
    key = new_key()
    wanted = KeyEntry.model_validate(
        {"name": "a", "hashes": [hash_of(key)], "roles": ["user", "admin"], "limits": {"requestsPerSecond": 2}}
    )
    text = dump_entry(wanted)
    assert parse_keys(text) == (wanted,)
    assert key not in text


def test_keys_are_long_and_never_the_same() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) > 40 for key in keys)
