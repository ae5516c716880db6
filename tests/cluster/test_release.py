"""A release in a real OCI registry: pushed, signed, its signatures checked by others' code, and installed from there.

The images are small ones made by hand: what is in real ones is known by their audit, and run by tests/e2e.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hetero_api.contract import VERSION
from tests.cluster.conftest import StartControlPlane
from tests.support.chart_install import installed_operator
from tests.support.helm import CHART, Helm
from tests.support.image_archives import BASE_LAYERS, Image, file, write_saved
from tests.support.kube.client import is_established
from tests.support.kube.tools import find_helm
from tests.support.oci_registry import OciRegistry, SigningKeys
from tools.images.__main__ import write_sums
from tools.images.archive import read_archive, rewrite
from tools.images.catalogue import ROOT, named_images
from tools.release.__main__ import main
from tools.release.chart import NAME, pack_chart

PLACE = "ai/hetero"
NAMES = ("operator", "gateway", "router", "worker-cpu")
SYSTEM = "hetero-system"
OPERATOR = f"hetero-{NAME}-operator"
CRD = "heteroinferences.heteroinference.io"
EXAMPLE = ROOT / "examples/smollm2-cpu.yaml"
TIME = 1_700_000_000


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> SigningKeys:
    return SigningKeys.make(tmp_path_factory.mktemp("keys"), passphrase="long enough")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OciRegistry]:
    with OciRegistry(tmp_path_factory.mktemp("registry")) as registry:
        yield registry


def make_release(folder: Path, content: str = "1") -> Path:
    """What `make release` leaves in a folder, but for wheels, with small images."""
    folder.mkdir()
    for name in NAMES:
        image = Image().with_files({"opt/hetero/name": file(f"{name} {content}")})
        saved = write_saved(folder / "saved", image.layers)
        reference = named_images()[name].reference
        rewrite(saved, folder / f"{name}.tar", reference=reference, base_layers=BASE_LAYERS, created=TIME)
        saved.unlink()
    pack_chart(CHART, folder, values=(CHART / "values.yaml").read_text(encoding="utf-8"), created=TIME)
    (folder / f"CHANGELOG-{VERSION}.md").write_text(f"## {VERSION} (2026-11-27)\n\n- New.\n", encoding="utf-8")
    write_sums(folder)
    return folder


def digests_in(folder: Path) -> Mapping[str, str]:
    return {name: read_archive(folder / f"{name}.tar").digest for name in NAMES}


def push(folder: Path, registry: OciRegistry, *options: str) -> int:
    return main(["push", str(folder), f"{registry.address}/{PLACE}", "--plain-http", *options], {})


@pytest.fixture(scope="module")
def pushed(registry: OciRegistry, keys: SigningKeys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a release that was pushed, signed."""
    folder = make_release(tmp_path_factory.mktemp("release") / "dist")
    assert push(folder, registry, *keys.options) == 0
    return folder


@pytest.mark.parametrize("major", [3, 4])
def test_helm_installs_from_the_registry_and_pods_get_its_images_by_digest(
    major: int, registry: OciRegistry, pushed: Path, start_control_plane: StartControlPlane, tmp_path: Path
) -> None:
    digests, place = digests_in(pushed), f"{registry.address}/{PLACE}"
    cluster = start_control_plane(crds=[]).cluster
    helm = Helm(find_helm(major), tmp_path / "helm", cluster.admin_kubeconfig, major=major)
    where = f"oci://{place}/{NAME}"
    helm.run(
        "install",
        "hetero",
        where,
        f"--version={VERSION}",
        "--plain-http",
        f"--namespace={SYSTEM}",
        "--create-namespace",
    )
    with cluster.client() as client:
        client.wait_for("CustomResourceDefinition", CRD, until=is_established)
        (container,) = client.get("Deployment", OPERATOR, SYSTEM)["spec"]["template"]["spec"]["containers"]
        assert container["image"] == f"{place}/operator@{digests['operator']}"
        models = cluster.create_namespace(client)
        client.apply_file(EXAMPLE, namespace=models)
        with installed_operator(cluster, client, tmp_path, name=OPERATOR, namespace=SYSTEM):
            ranks = client.wait_for("StatefulSet", "smollm2-cpu", models)
            gateway = client.wait_for("Deployment", "smollm2-gateway", models)
    images = {
        container["image"]
        for owner in (ranks, gateway)
        for container in owner["spec"]["template"]["spec"]["containers"]
    }
    assert images == {f"{place}/worker-cpu@{digests['worker-cpu']}", f"{place}/gateway@{digests['gateway']}"}


def test_the_registry_has_what_was_built_under_its_digest(registry: OciRegistry, pushed: Path) -> None:
    for name, digest in digests_in(pushed).items():
        assert registry.manifest(f"{PLACE}/{name}", VERSION) == registry.manifest(f"{PLACE}/{name}", digest)
        assert registry.tags(f"{PLACE}/{name}") == [VERSION, f"{digest.replace(':', '-')}.sig"]
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    said = subprocess.run(check, cwd=pushed, capture_output=True, text=True, check=True).stdout
    assert f"{NAME}-{VERSION}.tgz: OK" in said
    assert said.count(": OK") == len(NAMES) + 2


def chart_digest(registry: OciRegistry) -> str:
    (found,) = [tag for tag in registry.tags(f"{PLACE}/{NAME}") if tag.endswith(".sig")]
    return found.removesuffix(".sig").replace("-", ":")


def test_signatures_are_those_of_the_key_over_the_digest_and_the_name(
    registry: OciRegistry, pushed: Path, keys: SigningKeys, tmp_path: Path
) -> None:
    stranger = SigningKeys.make(tmp_path, passphrase="")
    for name, digest in {**digests_in(pushed), NAME: chart_digest(registry)}.items():
        whole = f"{PLACE}/{name}"
        assert registry.signed_identities(whole, digest, keys.public, tmp_path) == [f"{registry.address}/{whole}"]
        assert registry.signed_identities(whole, digest, stranger.public, tmp_path) == []


def test_a_second_signature_joins_the_first_and_the_same_is_not_made_twice(
    registry: OciRegistry, keys: SigningKeys, tmp_path: Path
) -> None:
    second = SigningKeys.make(tmp_path, passphrase="")
    folder, place = make_release(tmp_path / "dist", content="3"), "twice"
    for options in (keys.options, keys.options, second.options):
        assert main(["push", str(folder), f"{registry.address}/{place}", "--plain-http", *options], {}) == 0
    for name, digest in digests_in(folder).items():
        for key in (keys, second):
            assert registry.signed_identities(f"{place}/{name}", digest, key.public, tmp_path) == [
                f"{registry.address}/{place}/{name}"
            ]


def test_a_key_that_cosign_would_not_take_is_refused(
    registry: OciRegistry, keys: SigningKeys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_release(tmp_path / "dist")
    assert push(folder, registry, f"--key={keys.private}") == 1
    assert "is no private key in PEM, or its passphrase is another" in capsys.readouterr().err
    command = ["openssl", "genpkey", "-algorithm", "ED25519", "-out", str(tmp_path / "other.pem")]
    subprocess.run(command, check=True, capture_output=True)
    assert push(folder, registry, f"--key={tmp_path / 'other.pem'}") == 1
    assert "is not of ECDSA over P-256" in capsys.readouterr().err


def test_a_version_is_pushed_once(
    registry: OciRegistry, pushed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(pushed, registry) == 0, "the same again changes nothing"
    other = make_release(tmp_path / "dist", content="2")
    assert push(other, registry) == 1
    assert f"{PLACE}/operator:{VERSION} is there, and is {digests_in(pushed)['operator']}" in capsys.readouterr().err


def test_what_was_changed_since_it_was_built_is_not_pushed(
    registry: OciRegistry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_release(tmp_path / "dist")
    with (folder / "gateway.tar").open("ab") as archive:
        archive.write(b"\0")
    assert push(folder, registry) == 1
    assert "gateway.tar is not what SHA256SUMS says" in capsys.readouterr().err


def test_what_is_unreleased_is_not_pushed(
    registry: OciRegistry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_release(tmp_path / "dist")
    (folder / f"CHANGELOG-{VERSION}.md").write_text(f"## {VERSION} (unreleased)\n\n- New.\n", encoding="utf-8")
    write_sums(folder)
    assert push(folder, registry) == 1
    assert f"{VERSION} is unreleased: say python -m tools.release cut" in capsys.readouterr().err
