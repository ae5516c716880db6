"""`hetero up` on a machine that has GPUs, which the host plays (pseudo_gpu.py).

    python -m tests.support.pseudo_gpu_up up FILE --port 0

PYTHONPATH has to name the repository. Ranks are bound to nothing and have one thread each: tests share few cores.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hetero_api.errors import HeteroError
from hetero_api.host.gpus import Gpu
from hetero_api.host.topology import LogicalCore, NumaPolicy
from hetero_api.manifest import load_manifest
from hetero_client.cli.main import report
from hetero_client.cli.serving import serve_until_stopped
from hetero_client.home import HeteroHome
from hetero_client.launcher.commands import Programs
from hetero_client.launcher.local_group import LocalGroupConfig
from hetero_client.launcher.local_plan import LocalPlan, plan_locally
from tests.support.local_group import GroupFile
from tests.support.measured_up import SharedMeasurements

MODULE = "tests.support.pseudo_gpu_up"
RANK = (sys.executable, "-m", "tests.support.pseudo_gpu_rank")
NUM_GPUS = 8
_MEMORY_BYTES = 16 * 2**30
_FILE_SCHEME = "file://"


def write_mixed_manifest(
    folder: Path,
    *,
    model: Path,
    gpus: int,
    cpus: int,
    mode: str = "Tensor",
    shares: Mapping[str, list[int]] | None = None,
    engine: Mapping[str, Any] | None = None,
    devices: list[int] | None = None,
    max_model_len: int | None = None,
    exchange: str = "Auto",
    recovery: Mapping[str, Any] | None = None,
) -> GroupFile:
    """A HeteroInference of GPU and CPU ranks over a model directory; shares are in rank order, GPU ranks first."""
    pools: list[dict[str, Any]] = [
        {
            "name": "gpu",
            "type": "GPU",
            "ranks": gpus,
            "ranksPerPod": gpus,
            "gpu": {"coresPerRank": 1, **({"devices": devices} if devices else {})},
        }
    ]
    if cpus:
        cpu = {"coresPerRank": 1, "memoryPerRank": "2Gi", "numa": {"policy": "None"}}
        pools.append({"name": "cpu", "type": "CPU", "ranks": cpus, "cpu": cpu})
    resource = {
        "apiVersion": "heteroinference.io/v1alpha1",
        "kind": "HeteroInference",
        "metadata": {"name": "mixed"},
        "spec": {
            "model": {
                "uri": f"{_FILE_SCHEME}{model}",
                "dtype": "float32",
                **({"maxModelLen": max_model_len} if max_model_len else {}),
            },
            "pools": pools,
            "placement": {"mode": mode, "shares": dict(shares or {})},
            "exchange": {"kind": exchange},
            "engine": dict(engine or {}),
            "recovery": dict(recovery or {}),
        },
    }
    path = folder / "mixed.yaml"
    path.write_text(yaml.safe_dump(resource), encoding="utf-8")
    return GroupFile("mixed", path)


def up(manifest: Path) -> int:
    home = HeteroHome.from_environment()
    try:
        resource = load_manifest(manifest)
        planned = plan_locally(
            resource,
            cores=[LogicalCore(number, 0, number) for number in range(32)],
            memory_bytes=_MEMORY_BYTES,
            gpus=[Gpu(number) for number in range(NUM_GPUS)],
        )
        ranks = [replace(rank, cores=(), num_threads=1, numa_policy=NumaPolicy.NONE) for rank in planned.ranks]
        plan, draft = LocalPlan(tuple(ranks), planned.warnings), resource.spec.engine.speculative.draft
        config = LocalGroupConfig(
            resource=resource,
            manifest=manifest,
            model_dir=Path(resource.spec.model.uri.removeprefix(_FILE_SCHEME)),
            draft_dir=None if draft is None else Path(draft.uri.removeprefix(_FILE_SCHEME)),
            plan=plan,
            port=0,
            http_port=0,
            programs=Programs(rank=RANK, forkserver=(*RANK, "forkserver")),
            measurements=SharedMeasurements.for_group(home, "mixed", resource, plan=plan),
        )
        serve_until_stopped(config, home=home)
    except HeteroError as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(up(Path(sys.argv[2])))
