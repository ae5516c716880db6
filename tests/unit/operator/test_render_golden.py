"""Golden renders: every object of every case, to be read and reviewed. `make golden` writes them anew."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_api.contract import CONFIG_TEMPLATES_KEY
from hetero_operator.reconcile.model import Plan
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import render_cases

GOLDEN = Path(__file__).parent / "golden"
CASES = render_cases()
_HEADER = "# Written by `make golden`; templates.json is left out.\n"


class _Dumper(yaml.SafeDumper):
    """Writes equal parts twice rather than as YAML aliases, and lines of a text as lines."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def rendered(todo: Plan) -> str:
    """A plan's objects as YAML text."""
    items: list[Any] = [copy.deepcopy(secret.manifest) for secret in todo.create]
    for item in copy.deepcopy(list(todo.apply)):
        if item["kind"] == "ConfigMap":
            # The templates are those of the workloads below, in one long line.
            del item["data"][CONFIG_TEMPLATES_KEY]
        items.append(item)
    return _HEADER + yaml.dump_all(items, Dumper=_Dumper, sort_keys=False, width=120)


@pytest.mark.parametrize("name", CASES)
def test_renders_are_the_golden_ones(name: str) -> None:
    case = CASES[name]
    text = rendered(OperatorWorld(dict(case.resource), case.capabilities).plan())
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path} is missing; see this module's docstring"
    assert text == path.read_text(encoding="utf-8")


def test_every_golden_file_is_of_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_same_resource_gives_the_same_bytes(name: str) -> None:
    case = CASES[name]
    first, second = (OperatorWorld(copy.deepcopy(dict(case.resource)), case.capabilities).plan() for _ in range(2))
    assert rendered(first) == rendered(second)
    assert first == second
