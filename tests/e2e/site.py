"""Where the end-to-end tests run: on nodes of our own, or on the cluster that KUBECONFIG names.

Environment:
KUBECONFIG             use that cluster. Its nodes pull the images, and tests that take a node in hand are skipped.
                       It needs room for two ranks (a core and 2 GiB each), a gateway (600m, 1 GiB) and what the chart
                       asks for: two nodes of two cores will do, as long as no kubelet reserves a whole core.
HETERO_IMAGE_REGISTRY  registry and folder that such a cluster pulls our images from; default: the chart's.
HETERO_E2E_MODEL_URI   model there, with the files that `hetero model fetch smollm2-135m-instruct` brings, as pvc://CLAIM;
                       default: the Hub's, fetched by the pods, which says the same things in other words.
HETERO_E2E_NAMESPACE   namespace there that exists, with the claim in it; default: a new one that is deleted in the end.
HETERO_E2E_IMAGES      without KUBECONFIG: folder with the images as archives (`make test-e2e` fills and sets it). GPU
                       ranks' is used when it is there: `make images IMAGES=worker-gpu SAVE=FOLDER`.
HETERO_E2E_ARTIFACTS   folder for logs and outputs that are worth keeping; default: a temporary one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.harness.access import client_of
from tests.e2e.harness.node import Node
from tests.e2e.harness.node_settings import NodePlan
from tests.e2e.harness.programs import find_node_programs
from tests.e2e.harness.real_cluster import RealCluster
from tests.support.helm import Helm
from tests.support.kube.binaries import find_binaries
from tests.support.kube.client import Client, Object
from tests.support.kube.tools import find_helm, find_kubectl
from tools.images.catalogue import named_images
from tools.images.settings import CPU_IMAGES

KUBECTL_TIMEOUT_S = 120.0
HUB_MODEL = "hf://HuggingFaceTB/SmolLM2-135M-Instruct"
RANKS_ONLY = "ranks-only"
CPU_WORKER = "worker-cpu"
CLAIM = "models"


@dataclass(frozen=True, slots=True)
class Site:
    """A cluster for the tests of one run."""

    kubeconfig: Path
    client: Client
    artifacts: Path
    model: Path
    """SmolLM2 on this machine."""
    helm: Helm
    chart_values: Mapping[str, Any]
    environment: Mapping[str, str]
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """Our own; none where the cluster is somebody else's."""
    real: RealCluster | None = None
    images: frozenset[str] = frozenset()
    """Whole names of the images that our own nodes were given."""

    @property
    def model_uri(self) -> str:
        return f"pvc://{CLAIM}" if self.nodes else self.environment.get("HETERO_E2E_MODEL_URI", HUB_MODEL)

    @property
    def has_our_files(self) -> bool:
        """Whether pods serve the very files that this machine has, so that greedy text is the same to the letter."""
        return self.model_uri != HUB_MODEL

    @property
    def tolerations(self) -> list[Object]:
        """Of ranks: one of our nodes is for them alone."""
        return [{"key": RANKS_ONLY, "operator": "Exists"}] if self.nodes else []

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """What kubectl prints. Raises subprocess.CalledProcessError, whose note is what it complained of."""
        command = [str(find_kubectl()), f"--kubeconfig={self.kubeconfig}", *arguments]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=False, timeout=KUBECTL_TIMEOUT_S
        )
        if done.returncode:
            error = subprocess.CalledProcessError(done.returncode, command)
            error.add_note(done.stderr)
            raise error
        return done.stdout

    def keep(self, name: str, text: str) -> None:
        """As a file among the artifacts."""
        (self.artifacts / name).write_text(text, encoding="utf-8")

    def create_namespace(self, name: str) -> str:
        """One in which Pod Security `restricted` is enforced, where the cluster can, with the model's claim in it."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
        self.client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        if self.nodes:
            for manifest in model_claim(self.model, name):
                self.client.apply(manifest)
        return name


@contextmanager
def open_site(environment: Mapping[str, str], folder: Path, model: Path) -> Iterator[Site]:
    """The site that the environment asks for; one of our own is gone afterwards."""
    artifacts = artifacts_folder(environment, folder)
    if environment.get("KUBECONFIG"):
        with _foreign(environment, folder, artifacts, model) as site:
            yield site
    else:
        with _own(environment, folder, artifacts, model) as site:
            yield site


@contextmanager
def _foreign(environment: Mapping[str, str], folder: Path, artifacts: Path, model: Path) -> Iterator[Site]:
    kubeconfig = Path(environment["KUBECONFIG"])
    registry = environment.get("HETERO_IMAGE_REGISTRY")
    with client_of(kubeconfig) as client:
        yield Site(
            kubeconfig,
            client,
            artifacts,
            model,
            Helm(find_helm(3), folder / "helm", kubeconfig),
            {"images": {"registry": registry}} if registry else {},
            environment,
        )


@contextmanager
def _own(environment: Mapping[str, str], folder: Path, artifacts: Path, model: Path) -> Iterator[Site]:
    images = list(image_archives(environment).values())
    with own_nodes(environment, folder, model, plans=node_plans(), images=images, artifacts=artifacts) as site:
        yield site


@contextmanager
def own_nodes(
    environment: Mapping[str, str],
    folder: Path,
    model: Path,
    *,
    plans: Sequence[NodePlan],
    images: Sequence[Path],
    artifacts: Path | None = None,
) -> Iterator[Site]:
    """Nodes on this machine, each with images from archives; gone afterwards."""
    artifacts = artifacts or artifacts_folder(environment, folder)
    real = RealCluster(
        plans, images=images, logs=artifacts / "logs", binaries=find_binaries(nodes=True), programs=find_node_programs()
    )
    with real, real.cluster.client() as client:
        kubeconfig = real.cluster.admin_kubeconfig
        yield Site(
            kubeconfig,
            client,
            artifacts,
            readable_copy(model, real.folder / "model"),
            Helm(find_helm(3), folder / "helm", kubeconfig),
            # What a test of two cores leaves for others than ranks.
            {"resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}},
            environment,
            real.nodes,
            real,
            frozenset(map(image_name, images)),
        )


def artifacts_folder(environment: Mapping[str, str], folder: Path) -> Path:
    """Where logs and outputs are kept: as the environment says, or in a test's own folder."""
    artifacts = Path(environment.get("HETERO_E2E_ARTIFACTS") or folder / "artifacts")
    artifacts.mkdir(parents=True, exist_ok=True)
    return artifacts


def node_plans() -> list[NodePlan]:
    """Two nodes, so that two ranks have a core each for themselves on a machine of two cores.

    Each kubelet gives away what the other reserves: node-1 keeps the first core for what shares, node-2 the last. On a
    small machine a rank's core is its own among the pods of its node, and not among those of the other.
    """
    last = str((os.cpu_count() or 2) - 1)
    return [NodePlan("node-1"), NodePlan("node-2", reserved_cores=last, taints=[f"{RANKS_ONLY}=true:NoSchedule"])]


def image_archives(environment: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, Path]:
    """The images that were built, by their whole names. Fails, saying how, when one that all need, or of `more`, is
    missing."""
    folder = environment.get("HETERO_E2E_IMAGES")
    found = {image_name(path): path for path in sorted(Path(folder).glob("*.tar"))} if folder else {}
    missing = [name for name in map(whole_image_name, (*CPU_IMAGES, *more)) if name not in found]
    assert not missing, f"HETERO_E2E_IMAGES is {folder!r} and holds no {', '.join(missing)}: run `make test-e2e`"
    return found


def whole_image_name(name: str) -> str:
    """What the chart pulls for an image of this short name."""
    return named_images()[name].reference


def image_name(archive: Path) -> str:
    """The first name of the image in a docker archive."""
    with tarfile.open(archive) as packed:
        manifest = packed.extractfile("manifest.json")
        assert manifest is not None, f"{archive} is no docker archive"
        return str(json.load(manifest)[0]["RepoTags"][0])


def readable_copy(model: Path, target: Path) -> Path:
    """A copy that pods may read, whose user is nobody of this machine; the original may be its owner's alone."""
    shutil.copytree(model, target)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def model_claim(model: Path, namespace: str) -> list[Object]:
    """A volume of this machine with the model, and the claim `models` that is bound to it."""
    name = f"{CLAIM}-{namespace}"
    size = {"storage": "1Gi"}
    volume = {
        "capacity": size,
        "accessModes": ["ReadOnlyMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"namespace": namespace, "name": CLAIM},
        "hostPath": {"path": str(model), "type": "Directory"},
    }
    claim = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "volumeName": name,
        "resources": {"requests": size},
    }
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": CLAIM, "namespace": namespace},
            "spec": claim,
        },
    ]
