"""Pages say what is so: their files, links, commands and options exist, and their manifests are valid."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from hetero_api.contract import KIND
from hetero_api.crd import crd
from hetero_api.manifest import parse_resource
from hetero_api.quantity import parse_bytes
from hetero_client.cli.main import app
from tests.support.crd_judge import rule_problems, schema_problems, stored
from tests.support.documents import PAGES, ROOT, anchors, blocks, commands, links, name_of

pytestmark = pytest.mark.unit

CHART = ROOT / "charts/heteroinference"
HELM_COMMANDS = {"install", "upgrade", "uninstall", "rollback", "test"}
HELM_OPTIONS = {"--version", "--namespace", "--create-namespace", "--set", "--take-ownership"}
OTHER_KINDS = {"KubeletConfiguration", "Cluster", "NetworkPolicy", "PersistentVolume", "PersistentVolumeClaim"}

SCHEMA: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
of_each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def manifests(page: Path) -> Iterator[Mapping[str, Any]]:
    for block in blocks(page, "yaml"):
        yield from (item for item in yaml.safe_load_all(block) if item is not None)


@of_each_page
def test_manifests_are_accepted(page: Path) -> None:
    for manifest in manifests(page):
        assert manifest["kind"] in {KIND, *OTHER_KINDS}
        assert manifest["apiVersion"]
        if manifest["kind"] == KIND:
            parse_resource(dict(manifest))
            kept = stored(SCHEMA, manifest)
            assert [*schema_problems(SCHEMA, kept), *rule_problems(SCHEMA, kept)] == []


@of_each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@of_each_page
def test_commands_of_ours_and_their_options_exist(page: Path) -> None:
    root: Any = typer.main.get_command(app)
    for arguments in commands(page, "hetero"):
        command, rest = root, list(arguments)
        while rest and hasattr(command, "commands"):
            assert rest[0] in command.commands or rest[0].startswith("-"), arguments
            if rest[0].startswith("-"):
                break
            command = command.commands[rest.pop(0)]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for word in rest:
            assert not word.startswith("--") or word.partition("=")[0] in known | {"--help"}, arguments


@of_each_page
def test_helm_is_told_of_values_that_the_chart_has(page: Path) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for arguments in commands(page, "helm"):
        assert arguments[0] in HELM_COMMANDS, arguments
        assert {word for word in arguments if word.startswith("--")} <= HELM_OPTIONS, arguments
        for option, value in pairwise(arguments):
            if option == "--set":
                assert _has(values, value.partition("=")[0]), value


@of_each_page
def test_targets_of_make_exist(page: Path) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for arguments in commands(page, "make"):
        target = arguments[0]
        assert f"\n{target}:" in text, target


@of_each_page
def test_files_that_commands_name_are_there(page: Path) -> None:
    named = {
        word
        for program in ("hetero", "helm", "kubectl", "kind")
        for arguments in commands(page, program)
        for word in arguments
        if word.startswith(("examples/", "charts/", "docs/"))
    }
    assert [word for word in sorted(named) if not (ROOT / word).exists()] == []


@of_each_page
def test_python_can_be_read(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)


def test_the_memory_that_a_node_keeps_back_is_what_it_reserves() -> None:
    (kubelet,) = (item for item in manifests(ROOT / "docs/numa.md") if item["kind"] == "KubeletConfiguration")
    kept_back = sum(parse_bytes(item["limits"]["memory"]) for item in kubelet["reservedMemory"])
    reserved = parse_bytes(kubelet["kubeReserved"]["memory"]) + parse_bytes(kubelet["evictionHard"]["memory.available"])
    assert kept_back == reserved


def _has(values: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True
