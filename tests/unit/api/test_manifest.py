"""A manifest is read whole, or every problem is told with its path."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_api.errors import ManifestError
from hetero_api.host.topology import NumaPolicy
from hetero_api.manifest import find_unserved, load_manifest, parse_manifest
from hetero_api.spec_model import DType
from hetero_api.spec_pools import PoolType

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[3]

GOOD = """
apiVersion: heteroinference.io/v1alpha1
kind: HeteroInference
metadata: {name: demo}
spec:
  model: {uri: "hf://org/name", dtype: float32}
  pools:
    - {name: gpu, type: GPU, ranks: 2, ranksPerPod: 2}
    - {name: cpu, type: CPU, ranks: 2, cpu: {coresPerRank: 4, memoryPerRank: 16Gi, numa: {policy: Required}}}
"""

BAD = [
    ("coresPerRank: 4", "coresPerRank: 1.5", "spec.pools[1].cpu.coresPerRank: must be a whole number, not 1.5"),
    ("coresPerRank: 4", "coresPerRank: '4'", "spec.pools[1].cpu.coresPerRank: must be a whole number, not '4'"),
    ("coresPerRank", "corePerRank", "spec.pools[1].cpu.corePerRank: unknown field; did you mean coresPerRank?"),
    ("dtype: float32", "dtype: fp8", "spec.model.dtype: must be one of auto, float32, bfloat16, float16, not 'fp8'"),
    ("dtype: float32", "zzz: 1", "spec.model.zzz: unknown field; known here: uri, revision, dtype"),
    ("ranks: 2, ranksPerPod", "ranks: 0, ranksPerPod", "spec.pools[0].ranks: must be at least 1, not 0"),
    ("ranks: 2, ranksPerPod", "ranks: 3, ranksPerPod", "spec.pools[0].ranks: must be a multiple of ranksPerPod"),
    ("ranks: 2, ranksPerPod", "ranks: 64, ranksPerPod", "spec.pools: must hold at most 64 ranks together"),
    ("name: cpu", "name: gpu", "spec.pools[1].name: 'gpu' is used by another pool"),
    ("name: cpu", "name: CPU_0", "spec.pools[1].name: must be of lower-case letters"),
    ("16Gi", "16GiB", "spec.pools[1].cpu.memoryPerRank: must be a quantity such as 16Gi, not '16GiB'"),
    (" memoryPerRank: 16Gi,", "", "spec.pools[1].cpu.memoryPerRank: is required when numa.policy is Required"),
    ("type: GPU", "type: TPU", "spec.pools[0].type: must be one of GPU, CPU, not 'TPU'"),
    ("type: GPU", "type: CPU, gpu: {}", "spec.pools[0].gpu: is for pools of type GPU; this pool's type is CPU"),
    ("hf://", "s3://", "spec.model.uri: must start with one of hf://, pvc://, oci://, file://"),
    ('uri: "hf://org/name", ', "", "spec.model.uri: is required"),
    ("kind: HeteroInference", "kind: Pod", "kind: must be HeteroInference, not 'Pod'"),
    ("v1alpha1", "v1", "apiVersion: must be heteroinference.io/v1alpha1"),
    ("name: demo", "name: Not_A_Label", "metadata.name: must be of lower-case letters"),
    ("spec:", "spec:\n  replicas: 33", "spec.replicas: must be at most 32, not 33"),
    ("spec:", "spec:\n  suspend: maybe", "spec.suspend: must be true or false"),
    ("spec:", "spec:\n  engine: [1]", "spec.engine: must be a mapping"),
    ("spec:", "spec:\n  placement: {shares: {mlp: [1, 2]}}", "spec.placement.shares.mlp: must hold one weight"),
    ("spec:", "spec:\n  placement: {shares: {mlp: [0, 0, 0, 0]}}", "spec.placement.shares.mlp: must give something"),
    ("spec:", "spec:\n  engine: {gpuMemoryUtilization: 0}", "spec.engine.gpuMemoryUtilization: must be more than 0"),
    ("spec:", "spec: [", "is no valid YAML"),
    ("spec:", "created: 2025-02-30\nspec:", "is no valid YAML"),
    ("spec:", f"deep: {'[' * 3000}{']' * 3000}\nspec:", "is no valid YAML"),
]


def test_a_good_manifest_is_typed_and_has_its_defaults() -> None:
    manifest = parse_manifest(GOOD)
    spec = manifest.spec
    assert (spec.model.dtype, spec.world_size, spec.engine.block_size) == (DType.FLOAT32, 4, 16)
    cpu = spec.pools[1].cpu_or_default
    assert (cpu.cores_per_rank, cpu.memory_per_rank, cpu.numa.policy) == (4, 16 * 2**30, NumaPolicy.REQUIRED)


@pytest.mark.parametrize(("old", "new", "message"), BAD, ids=[f"{o}->{n}"[:60] for o, n, _ in BAD])
def test_a_bad_manifest_names_the_path_and_the_fix(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ManifestError) as caught:
        parse_manifest(GOOD.replace(old, new, 1), source="demo.yaml")
    assert any(problem.startswith(message) or message in problem for problem in caught.value.problems)
    assert str(caught.value).startswith("demo.yaml: ")


def test_every_problem_is_told_at_once() -> None:
    text = GOOD.replace("ranks: 2, ranksPerPod", "ranks: 0, ranksPerPod").replace("16Gi", "lots")
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "spec.pools[0].ranks",
        "spec.pools[1].cpu.memoryPerRank",
    ]


def test_gpu_pools_hold_the_low_ranks_wherever_they_stand() -> None:
    lines = GOOD.strip().splitlines()
    swapped = "\n".join([*lines[:-2], lines[-1], lines[-2]])
    pools = parse_manifest(swapped).spec.pools_in_rank_order
    assert [pool.type for pool in pools] == [PoolType.GPU, PoolType.CPU]


@pytest.mark.parametrize("cached", ["auto", "float32", "bfloat16", "float16"])
def test_gpu_ranks_cache_any_type(cached: str) -> None:
    """GOOD has GPU ranks, and computes in float32."""
    assert not find_unserved(parse_manifest(GOOD.rstrip() + f"\n  engine: {{kvCacheDtype: {cached}}}\n").spec)


def test_only_gpu_ranks_compute_in_float16() -> None:
    text = GOOD.replace("float32", "float16")
    (problem,) = find_unserved(parse_manifest(text).spec)
    assert problem.startswith("spec.model.dtype: float16: CPU ranks do not compute in float16")
    gpus = "\n".join(line for line in text.splitlines() if "type: CPU" not in line)
    assert not find_unserved(parse_manifest(gpus).spec)


def test_status_is_left_aside_and_unknown_metadata_kept_by_kubernetes() -> None:
    text = GOOD.replace("{name: demo}", "{name: demo, uid: abc, labels: {a: b}}") + "\nstatus: {whatever: 1}\n"
    assert parse_manifest(text).metadata.name == "demo"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_valid(path: Path) -> None:
    assert load_manifest(path).spec.pools


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"absent\.yaml: cannot be read: No such file"):
        load_manifest(tmp_path / "absent.yaml")
