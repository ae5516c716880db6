"""Manifests that are made of a model's name: they fit the machine, pass validation, and are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hetero_api.contract import EXIT_OK, EXIT_PERMANENT
from hetero_api.host.gpus import Gpu
from hetero_api.host.topology import LogicalCore
from hetero_api.manifest import parse_manifest
from hetero_api.spec import HeteroInference
from hetero_client.cli import serving
from hetero_client.cli.main import app
from hetero_client.home import HeteroHome
from hetero_client.launcher.local_plan import plan_locally
from hetero_client.launcher.made_manifest import MODEL_LENGTH, make_manifest, resource_name
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.unit

GB = 10**9


def cores_of(*nodes: int, threads: int = 1) -> list[LogicalCore]:
    """Cores of nodes that have so many of them, each of so many threads."""
    counts = [(node, core) for node, count in enumerate(nodes) for core in range(count)]
    total = len(counts)
    return [
        LogicalCore(number=index + thread * total, node=node, physical=index)
        for thread in range(threads)
        for index, (node, _) in enumerate(counts)
    ]


def made(cores: list[LogicalCore], num_gpus: int = 0) -> HeteroInference:
    gpus = [Gpu(number) for number in range(num_gpus)]
    manifest = make_manifest("file:///m", name="m", cores=cores, gpus=gpus, model={"maxModelLen": 64})
    resource = parse_manifest(yaml.safe_dump(manifest))
    plan = plan_locally(resource, cores=cores, memory_bytes=64 * GB, gpus=gpus)
    assert len(plan.ranks) == resource.spec.world_size
    return resource


@pytest.mark.parametrize(
    ("nodes", "threads", "ranks", "cores_per_rank"),
    [((2,), 1, 1, 2), ((2,), 2, 1, 2), ((8, 8), 2, 2, 8), ((8, 6), 1, 2, 6), ((8, 2), 1, 1, 8), ((1,), 1, 1, 1)],
)
def test_each_node_gets_a_rank_with_its_cores(
    nodes: tuple[int, ...], threads: int, ranks: int, cores_per_rank: int
) -> None:
    [pool] = made(cores_of(*nodes, threads=threads)).spec.pools
    assert (pool.type, pool.ranks, pool.cores_per_rank) == ("CPU", ranks, cores_per_rank)


@pytest.mark.parametrize(
    ("nodes", "num_gpus", "pools"),
    [
        ((8, 8), 1, [("gpu", 1, 2), ("cpu", 2, 7)]),
        ((8, 8), 4, [("gpu", 4, 2), ("cpu", 2, 4)]),
        ((4,), 2, [("gpu", 2, 2)]),
    ],
)
def test_gpus_get_a_rank_each_and_cores_to_launch_work(
    nodes: tuple[int, ...], num_gpus: int, pools: list[tuple[str, int, int]]
) -> None:
    found = made(cores_of(*nodes), num_gpus).spec.pools
    assert [(pool.name, pool.ranks, pool.cores_per_rank) for pool in found] == pools


@pytest.mark.parametrize(
    ("nodes", "quota", "pools"),
    [
        ((64, 64), 2.0, [(1, 2)]),
        ((64, 64), 2.5, [(1, 3)]),
        ((64, 64), 96.0, [(2, 48)]),
        ((4,), 9.0, [(1, 4)]),
        ((4,), 0.5, [(1, 1)]),
    ],
)
def test_ranks_get_no_more_cores_than_a_quota_has_time_for(
    nodes: tuple[int, ...], quota: float, pools: list[tuple[int, int]]
) -> None:
    manifest = make_manifest("file:///m", name="m", cores=cores_of(*nodes), gpus=[], model={}, cpu_quota=quota)
    found = parse_manifest(yaml.safe_dump(manifest)).spec.pools
    assert [(pool.ranks, pool.cores_per_rank) for pool in found] == pools


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("Qwen3-0.6B:Q4_K_M", "qwen3-0-6b-q4-k-m"),
        ("7B_chat", "b-chat"),
        ("123", "model"),
        ("x" * 100, "x" * 40),
    ],
)
def test_a_resource_is_named_like_its_model(text: str, name: str) -> None:
    assert resource_name(text) == name


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeteroHome:
    monkeypatch.setenv("HETERO_HOME", str(tmp_path / "home"))
    return HeteroHome(tmp_path / "home")


def test_a_dry_run_prints_the_manifest_and_nothing_else(tmp_path: Path, home: HeteroHome) -> None:
    model = save_tiny_model(tmp_path / "Tiny_Llama", "llama")
    result = CliRunner().invoke(app, ["serve", str(model), "--dry-run", "--quantization", "int8"])
    assert result.exit_code == EXIT_OK, result.output
    spec = parse_manifest(result.stdout).spec
    assert (spec.model.uri, spec.model.quantization) == (f"file://{model}", "int8")
    assert not home.made.exists()
    longer = CliRunner().invoke(app, ["serve", str(model), "--dry-run", "--max-model-len", "32"])
    assert parse_manifest(longer.stdout).spec.model.max_model_len == 32


def test_serve_keeps_the_manifest_and_starts_it(
    tmp_path: Path, home: HeteroHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, started = save_tiny_model(tmp_path / "Tiny_Llama", "llama"), []
    monkeypatch.setattr(serving, "up", lambda file, **options: started.append((file, options["port"])))
    result = CliRunner().invoke(app, ["serve", str(model), "--port", "0"])
    assert result.exit_code == EXIT_OK, result.output
    kept = home.made / "tiny-llama.yaml"
    assert started == [(kept, 0)]
    resource = parse_manifest(kept.read_text())
    assert resource.metadata.name == "tiny-llama"
    assert resource.spec.model.max_model_len is not None
    assert resource.spec.model.max_model_len <= MODEL_LENGTH
    assert kept.read_text().rstrip() in result.stderr
    assert f"hetero up {kept}" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("what", ["./nowhere", "nowhere", "/nowhere/at/all"])
@pytest.mark.parametrize("command", [["serve"], ["run", "--port", "0"]])
def test_a_model_that_is_nowhere_is_named(home: HeteroHome, what: str, command: list[str]) -> None:
    name, *options = command
    result = CliRunner().invoke(app, [name, what, *(["hello"] if name == "run" else []), *options])
    assert result.exit_code == EXIT_PERMANENT
    assert "there is no such file or directory, and it is no alias (smollm2-135m-instruct) or hf://ORG/NAME" in (
        result.stderr.replace("\n", " ")
    )
