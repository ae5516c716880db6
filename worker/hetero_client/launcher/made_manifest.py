"""The manifest of a model that a user named without one: all of this machine, as far as a first start needs.

One rank a NUMA node, with all of its cores but those that launch work on GPUs, and one rank a GPU. Which of them
compute what is decided when they have said how fast they are (placement mode Auto).
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml

from hetero_api.contract import API_VERSION, GROUP, KIND
from hetero_api.host.cgroup import cgroup_limits
from hetero_api.host.gpus import Gpu, visible_gpus
from hetero_api.host.topology import CpuTopology, LogicalCore
from hetero_api.spec_pools import GpuSpec
from hetero_client.home import HeteroHome, write_atomically
from hetero_client.model_store.resolve import obtain_model
from hetero_client.model_store.store import ModelStore, Report, check_model_directory

MANIFEST_SUFFIXES: Final = (".yaml", ".yml")
MODEL_LENGTH: Final = 8192
"""Longest prompt plus completion of a manifest that is made, where the model allows so many tokens."""
MAX_NAME_CHARS: Final = 40
_GPU_CORES: Final[int] = GpuSpec.model_fields["cores_per_rank"].default


@dataclass(frozen=True, slots=True)
class MadeManifest:
    """A manifest, as YAML, and its resource's name."""

    name: str
    text: str

    @classmethod
    def of_model(
        cls,
        what: str,
        *,
        home: HeteroHome,
        report: Report,
        quantization: str = "none",
        max_model_len: int | None = None,
    ) -> MadeManifest:
        """Return a manifest that serves a model on all of this machine; fetch the model first if it is not here.

        `max_model_len` None: the model's own, at most MODEL_LENGTH. Raises ModelStoreError.
        """
        uri, directory = obtain_model(what, ModelStore(home), report=report)
        length = max_model_len or min(check_model_directory(directory).max_position, MODEL_LENGTH)
        fields: dict[str, Any] = {"maxModelLen": length}
        if quantization != "none":
            fields["quantization"] = str(quantization)
        name = resource_name(PurePosixPath(what).name.removesuffix(".gguf"))
        manifest = make_manifest(
            uri, name=name, cores=CpuTopology.of_this_process().cores, gpus=visible_gpus(os.environ), model=fields,
            cpu_quota=cgroup_limits().cpus,
        )  # fmt: skip
        return cls(name, yaml.safe_dump(manifest, sort_keys=False))

    def keep(self, home: HeteroHome) -> Path:
        """Write it to the home folder; return its path."""
        home.made.mkdir(parents=True, exist_ok=True)
        path = home.made / f"{self.name}.yaml"
        write_atomically(path, self.text)
        return path


def make_manifest(
    uri: str,
    *,
    name: str,
    cores: Sequence[LogicalCore],
    gpus: Sequence[Gpu],
    model: dict[str, Any],
    cpu_quota: float | None = None,
) -> dict[str, Any]:
    """Return a HeteroInference of the model at `uri` on these cores and GPUs.

    `name`: of the resource; see `resource_name`. `model`: further fields of spec.model. `cpu_quota`: CPUs of time that
    this process may use, None for all.
    """
    pools = [*_gpu_pool(gpus), *_cpu_pool(cores, len(gpus), math.ceil(cpu_quota or len(cores)))]
    return {
        "apiVersion": f"{GROUP}/{API_VERSION}",
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {"model": {"uri": uri, **model}, "pools": pools},
    }


def resource_name(text: str) -> str:
    """Return a resource's name that is like a model's: a DNS label that begins with a letter."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:MAX_NAME_CHARS].strip("-")
    return words or "model"


def _gpu_pool(gpus: Sequence[Gpu]) -> list[dict[str, Any]]:
    if not gpus:
        return []
    return [{"name": "gpu", "type": "GPU", "ranks": len(gpus), "ranksPerPod": len(gpus)}]


def _cpu_pool(cores: Sequence[LogicalCore], num_gpus: int, most_cores: int) -> list[dict[str, Any]]:
    """Return the pool of CPU ranks; none where launching work on GPUs takes all cores."""
    found = Counter(node for _, node in {(core.physical, core.node) for core in cores})
    # Ranks of a pool are equal: a node with few cores would make all others small.
    nodes = [count for count in found.values() if 2 * count >= max(found.values())]
    nodes = nodes[: -(-most_cores // min(nodes))]
    cores_per_rank = min(*nodes, most_cores // len(nodes)) - -(-_GPU_CORES * num_gpus // len(nodes))
    if cores_per_rank < 1:
        return []
    return [{"name": "cpu", "type": "CPU", "ranks": len(nodes), "cpu": {"coresPerRank": cores_per_rank}}]
