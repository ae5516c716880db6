"""The file of assumed hardware, and what a manifest's pools become with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_api.errors import ManifestError
from hetero_api.manifest import parse_resource
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.spec_pools import PoolType
from hetero_placement.assumed_hardware import assume, load_assumed_hardware
from hetero_placement.hardware import Hardware

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).parents[3] / "examples/hardware"
FILE: dict[str, Any] = {
    "kinds": {
        "GPU": {
            "memory": "24Gi", "memoryBandwidth": "900e9", "flops": {"bfloat16": 1.5e14},
            "bus": {"toDevice": 25e9, "fromDevice": 24e9, "latencySeconds": 1e-5},
        },
        "CPU": {"memory": "256Gi", "memoryBandwidth": 370e9},
    },
    "exchange": {"host": {"latencySeconds": 60e-6, "bandwidth": 10e9}},
}  # fmt: skip


def spec_of(*pools: dict[str, Any], **spec: Any) -> HeteroInferenceSpec:
    body = {"model": {"uri": "hf://org/model"}, "pools": list(pools), **spec}
    head = {"apiVersion": "heteroinference.io/v1alpha1", "kind": "HeteroInference", "metadata": {"name": "g"}}
    return parse_resource(head | {"spec": body}).spec


GPU_POOL = {"name": "fast", "type": "GPU", "ranks": 1}
CPU_POOL = {"name": "cpu", "type": "CPU", "ranks": 2, "cpu": {"coresPerRank": 8}}


def assumed(tmp_path: Path, content: object, spec: HeteroInferenceSpec) -> Hardware:
    path = tmp_path / "hardware.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return assume(spec, load_assumed_hardware(path), source=str(path))


def problems(tmp_path: Path, content: object, spec: HeteroInferenceSpec) -> tuple[str, ...]:
    with pytest.raises(ManifestError) as caught:
        assumed(tmp_path, content, spec)
    return caught.value.problems


def test_pools_become_ranks_of_their_kind_gpu_ranks_first(tmp_path: Path) -> None:
    spec = spec_of(CPU_POOL, GPU_POOL, engine={"gpuMemoryUtilization": 0.5})
    hardware = assumed(tmp_path, FILE, spec)
    assert [(rank.kind, rank.pool, rank.cores) for rank in hardware.ranks] == [
        (PoolType.GPU, "fast", 2), (PoolType.CPU, "cpu", 8), (PoolType.CPU, "cpu", 8),
    ]  # fmt: skip
    gpu, cpu, _ = hardware.ranks
    assert gpu.memory_bytes == 12 * 2**30
    assert gpu.speeds.memory_bandwidth == 900e9
    assert gpu.speeds.flops == {"bfloat16": 1.5e14}
    assert (gpu.speeds.to_device_bandwidth, gpu.speeds.from_device_bandwidth) == (25e9, 24e9)
    assert cpu.memory_bytes == 256 * 2**30
    assert hardware.host_exchange.seconds(10**7) == pytest.approx(60e-6 + 1e-3)


def test_ranks_keep_weights_as_narrow_as_is_assumed(tmp_path: Path) -> None:
    gpu, cpu, _ = assumed(tmp_path, FILE, spec_of(CPU_POOL, GPU_POOL)).ranks
    assert (gpu.weight_bits, cpu.weight_bits) == (frozenset({8, 4}), frozenset({8, 4}))
    content = FILE | {"pools": {"cpu": {"memoryBandwidth": 1e9, "memory": "64Gi", "weightBits": [16]}}}
    assert assumed(tmp_path, content, spec_of(CPU_POOL)).ranks[0].weight_bits == {16}


def test_a_pool_may_have_its_own_and_memory_is_no_more_than_the_manifest_gives(tmp_path: Path) -> None:
    pool = CPU_POOL | {"cpu": {"memoryPerRank": "16Gi"}}
    content = FILE | {"pools": {"cpu": {"memoryBandwidth": 1e9, "memory": "64Gi"}}}
    (first, _) = assumed(tmp_path, content, spec_of(pool)).ranks
    assert first.speeds.memory_bandwidth == 1e9
    assert first.memory_bytes == 16 * 2**30


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"exchange": None}, "exchange: is required"),
        ({"kinds": {"CPU": {}}}, "kinds.CPU.memoryBandwidth: is required"),
        ({"kinds": {"CPU": {"memoryBandwidth": "much"}}}, "kinds.CPU.memoryBandwidth: must be a number"),
        ({"kinds": {"CPU": {"memoryBandwidth": 0}}}, "kinds.CPU.memoryBandwidth: must be more than 0"),
        ({"kinds": {"CPU": {"memoryBandwidth": 1, "weightBits": [5]}}}, "kinds.CPU.weightBits.0: must be 16, 8 or 4"),
        ({"kinds": {"CPU": {"memoryBandwidth": 1, "speed": 3}}}, "kinds.CPU.speed: unknown field"),
        ({"kinds": {"CPU": {"memoryBandwidth": 1, "memory": 5}}}, "kinds.CPU.memory: must be a quantity"),
        ({"kinds": {"CPU": {"memoryBandwidth": 1}}}, "kinds.CPU.memory: is required, since"),
        ({"kinds": {}}, "kinds.CPU: is required, or pools.cpu: the manifest has this pool"),
        ({"kinds": {"cpu": {"memoryBandwidth": 1}}}, "kinds.cpu: unknown field"),
        ({"kinds": {"CPU": {"memoryBandwidth": 1, "expertShare": 2}}}, "kinds.CPU.expertShare: is too large"),
        ({"kinds": {"CPU": {"memoryBandwidth": 1, "ranks": 0}}}, "kinds.CPU.ranks: is too small"),
        ({"pools": {"other": {"memoryBandwidth": 1}}}, "pools.other: the manifest has no such pool"),
    ],
)
def test_every_problem_is_told_by_its_path(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    content = {key: value for key, value in (FILE | change).items() if value is not None}
    assert any(problem.startswith(expected) for problem in problems(tmp_path, content, spec_of(CPU_POOL)))


def test_several_gpus_need_an_exchange_of_their_own(tmp_path: Path) -> None:
    told = problems(tmp_path, FILE, spec_of(GPU_POOL | {"ranks": 2}))
    assert told == ("exchange.device: is required where there are several GPU ranks",)


@pytest.mark.parametrize("content", ["", "- a\n", "a: [", "\x00"])
def test_files_that_hold_something_else_are_errors(tmp_path: Path, content: str) -> None:
    assert problems(tmp_path, content, spec_of(CPU_POOL))


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="cannot be read"):
        load_assumed_hardware(tmp_path / "none.yaml")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_right(path: Path) -> None:
    hardware = assume(spec_of(GPU_POOL | {"ranks": 2}, CPU_POOL), load_assumed_hardware(path))
    assert hardware.num_gpu_ranks == 2
