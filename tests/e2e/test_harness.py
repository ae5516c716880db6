"""The parts of the harness that need no cluster to be judged."""

from __future__ import annotations

import struct
import tarfile
from pathlib import Path

import pytest

from tests.e2e.harness.access import client_of
from tests.e2e.harness.dns import A, answer, parse, services
from tests.e2e.harness.image_archive import write_archive
from tests.e2e.harness.network import Addresses
from tests.e2e.harness.node_settings import NodeFiles, NodePlan, kubelet_config, kubelet_flags
from tests.e2e.site import CPU_WORKER, image_archives, image_name, whole_image_name
from tests.support.kube.client import Object
from tests.support.kube.errors import ProvisionFailed
from tests.support.kube.kubeconfigs import Credentials, write_kubeconfig
from tests.support.kube.versions import Version

OLD, NEW = Version(1, 20, 2), Version(1, 34, 0)
AAAA = 28


def query(name: str, kind: int = A) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!2H", kind, 1)


class Directory:
    """Stands in for the API client: two Services and the pods behind one of them."""

    def find(self, kind: str, name: str, namespace: str) -> Object | None:
        objects: dict[tuple[str, str], Object] = {
            ("Service", "front"): {"spec": {"clusterIP": "10.0.0.9"}},
            ("Service", "ranks"): {"spec": {"clusterIP": "None"}},
            ("Endpoints", "ranks"): {
                "subsets": [{"addresses": [{"ip": "10.200.10.3", "hostname": "x-0"}, {"ip": "10.200.11.4"}]}]
            },
        }
        return objects.get((kind, name)) if namespace == "ns" else None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("front.ns.svc.cluster.local", ["10.0.0.9"]),
        ("ranks.ns.svc.cluster.local", ["10.200.10.3", "10.200.11.4"]),
        ("x-0.ranks.ns.svc.cluster.local", ["10.200.10.3"]),
        ("x-1.ranks.ns.svc.cluster.local", None),
        ("front.other.svc.cluster.local", None),
        ("front.ns.svc.cluster.local.ns.svc.cluster.local", None),
        ("example.com", None),
    ],
)
def test_names_are_those_of_services_and_their_pods(name: str, expected: list[str] | None) -> None:
    assert services(Directory())(name) == expected  # type: ignore[arg-type]


def test_an_answer_repeats_the_question_and_has_an_address_a_record() -> None:
    reply = answer(parse(query("Front.ns")), {"front.ns": ["10.0.0.9", "10.0.0.10"]}.get)
    assert struct.unpack_from("!6H", reply) == (7, 0x8580, 1, 2, 0, 0)
    assert reply[-4:] == bytes([10, 0, 0, 10])


def test_a_name_without_the_type_that_is_asked_for_exists_all_the_same() -> None:
    reply = answer(parse(query("front", AAAA)), {"front": ["10.0.0.9"]}.get)
    assert struct.unpack_from("!6H", reply)[1:4] == (0x8580, 1, 0)
    unknown = answer(parse(query("back")), {"front": ["10.0.0.9"]}.get)
    assert struct.unpack_from("!6H", unknown)[1] == 0x8583


@pytest.mark.parametrize("message", [b"", b"\0" * 11, b"\0" * 12, query("front")[:-1]])
def test_what_is_no_query_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"short|questions|cut off"):
        parse(message)


def files(folder: Path) -> NodeFiles:
    return NodeFiles(
        folder,
        folder / "k",
        folder / "ca",
        folder / "crt",
        folder / "key",
        "10.200.0.10",
        "10.200.0.2",
        "unix:///c",
        "he2e-n0",
    )


def test_a_kubelet_is_told_what_its_version_understands(tmp_path: Path) -> None:
    plan = NodePlan("n", taints=["a=b:NoSchedule"])
    old, new = (kubelet_config(plan, files(tmp_path), version) for version in (OLD, NEW))
    assert "memoryManagerPolicy" not in old
    assert new["memoryManagerPolicy"] == "Static"
    assert new["reservedMemory"] == [{"numaNode": 0, "limits": {"memory": "500Mi"}}]
    assert new["containerRuntimeEndpoint"] == "unix:///c"
    assert "--container-runtime=remote" in kubelet_flags(plan, files(tmp_path), OLD)
    assert not any(flag.startswith("--container-runtime") for flag in kubelet_flags(plan, files(tmp_path), NEW))
    assert "--register-with-taints=a=b:NoSchedule" in kubelet_flags(plan, files(tmp_path), OLD)


def test_cores_are_reserved_by_number_or_by_amount(tmp_path: Path) -> None:
    by_amount = kubelet_config(NodePlan("n"), files(tmp_path), OLD)
    by_number = kubelet_config(NodePlan("n", reserved_cores="1"), files(tmp_path), OLD)
    assert (by_amount["kubeReserved"]["cpu"], "reservedSystemCPUs" in by_amount) == ("100m", False)
    assert (by_number["reservedSystemCPUs"], "cpu" in by_number["kubeReserved"]) == ("1", False)
    assert kubelet_config(NodePlan("n", static=False), files(tmp_path), NEW)["cpuManagerPolicy"] == "none"


def test_a_kubeconfig_with_a_token_or_a_certificate_is_enough(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("the authority")
    path = write_kubeconfig(
        tmp_path / "config",
        server="https://10.0.0.1:6443",
        credentials=Credentials(token="t"),
        ca_file=tmp_path / "ca.crt",
    )
    with client_of(path) as client:
        assert client.server == "https://10.0.0.1:6443"
    path.write_text(path.read_text().replace("token: t", "exec: {command: login}"))
    with pytest.raises(ProvisionFailed, match="logs in with a program"), client_of(path):
        pass


def test_an_image_is_an_archive_that_names_itself(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "a.tar", "localhost/a:1", {"a": b"program"}, ["/a"])
    assert image_name(archive) == "localhost/a:1"
    with tarfile.open(archive) as packed:
        (layer,) = [name for name in packed.getnames() if name.endswith("/layer.tar")]
        inner = packed.extractfile(layer)
        assert inner is not None
        with tarfile.open(fileobj=inner) as content:
            assert content.getmember("a").mode == 0o755


def test_images_are_found_by_their_names_and_missed_by_name(tmp_path: Path) -> None:
    names = ["operator", "gateway", CPU_WORKER, "worker-gpu"]
    for number, name in enumerate(names):
        write_archive(tmp_path / f"{number}.tar", whole_image_name(name), {"a": b"program"}, ["/a"])
    environment = {"HETERO_E2E_IMAGES": str(tmp_path)}
    assert image_archives(environment) == {
        whole_image_name(name): tmp_path / f"{number}.tar" for number, name in enumerate(names)
    }
    (tmp_path / "3.tar").unlink()
    assert len(image_archives(environment)) == 3
    (tmp_path / "2.tar").unlink()
    with pytest.raises(AssertionError, match=r"holds no \S+/worker-cpu:\S+: run `make test-e2e`"):
        image_archives(environment)
    with pytest.raises(AssertionError, match="is None and holds no"):
        image_archives({})


def test_addresses_of_nodes_and_pods_do_not_meet() -> None:
    addresses = Addresses(200)
    assert (addresses.machine, addresses.name_server, addresses.node(1)) == ("10.200.0.1", "10.200.0.2", "10.200.0.11")
    assert (addresses.pods(1), addresses.gateway(1)) == ("10.200.11.0/24", "10.200.11.1")
