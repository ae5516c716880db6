"""The bill of materials of an image: CycloneDX, which vulnerability scanners and `cosign attest` take.

It names the image by its digest, every package with the hash of its files as they are there, and every file above the
base that belongs to no package. So it says of each file above the base what it has to be, and the audit compares. The
same image gives the same bytes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from tools.images.archive import ImageContent
from tools.images.builders import ImageError
from tools.images.contents import Contents, Package, contents_of

FILES: Final = "heteroinference:files:sha256"
"""Property of a package: `Package.digest`."""
BASE_LAYERS: Final = "heteroinference:base:layers"
"""Property of the image: how many of its layers are its base's."""


def make_sbom(image: ImageContent, *, name: str, repository: str, base_layers: int, created: int) -> str:
    """Return the document's text."""
    contents = contents_of(image, base_layers=base_layers)
    purl = PackageURL("oci", None, name, image.digest, {"repository_url": repository})
    subject = Component(
        type=ComponentType.CONTAINER, name=name, version=image.digest, bom_ref=str(purl), purl=purl,
        properties=[Property(name=BASE_LAYERS, value=str(base_layers))],
    )  # fmt: skip
    parts = [*(_package(it, contents) for it in contents.packages), *_loose(contents.loose)]
    bom = Bom(components=parts, serial_number=uuid.uuid5(uuid.NAMESPACE_URL, str(purl)))
    bom.metadata.component = subject
    bom.metadata.timestamp = datetime.fromtimestamp(created, UTC)
    bom.register_dependency(subject, parts)
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def package_url(package: Package, contents: Contents) -> PackageURL:
    """Return what databases of advisories know a package by."""
    if package.kind == "pypi":
        return PackageURL("pypi", None, package.name, package.version)
    qualifiers = {"arch": package.architecture, "distro": contents.distribution}
    return PackageURL("deb", contents.distribution.partition("-")[0], package.name, package.version, qualifiers)


def reference(package: Package, contents: Contents) -> str:
    """Return what a package is called in the document: the same one may be in the base and above it."""
    where = f"#{package.site_packages}" if package.site_packages else ""
    return f"{package_url(package, contents)}{where}"


def _package(package: Package, contents: Contents) -> Component:
    return Component(
        type=ComponentType.LIBRARY, name=package.name, version=package.version, purl=package_url(package, contents),
        bom_ref=reference(package, contents), licenses=_licences(package.licences),
        properties=[Property(name=FILES, value=package.digest)],
    )  # fmt: skip


def _licences(names: tuple[str, ...]) -> list[License]:
    """Return what the licences are: an expression of SPDX alone, or names."""
    if len(names) == 1:
        return [LicenseFactory().make_from_string(names[0])]
    return [LicenseFactory().make_with_name(name) for name in names]


def _loose(files: Mapping[str, str]) -> Iterator[Component]:
    for path, sha256 in sorted(files.items()):
        hashes = [HashType(alg=HashAlgorithm.SHA_256, content=sha256)]
        yield Component(type=ComponentType.FILE, name=f"/{path}", bom_ref=f"file:/{path}", hashes=hashes)


@dataclass(frozen=True, slots=True)
class Sbom:
    """What the audit reads of a bill of materials."""

    digest: str
    base_layers: int
    packages: Mapping[str, str]
    """Digest of a package's files, by its reference."""
    loose: Mapping[str, str]
    """SHA-256 by path."""


def read_sbom(text: str) -> Sbom:
    """Return what `make_sbom` wrote. Raises ImageError where it is no valid CycloneDX, or another's."""
    error = next(iter(JsonStrictValidator(SchemaVersion.V1_6).validate_str(text, all_errors=True) or ()), None)
    if error is not None:
        raise ImageError(f"the bill of materials is no CycloneDX 1.6: {error}")
    document = json.loads(text)
    try:
        subject, parts = document["metadata"]["component"], document.get("components", [])
        return Sbom(
            digest=subject["version"],
            base_layers=int(_property(subject, BASE_LAYERS)),
            packages={it["bom-ref"]: _property(it, FILES) for it in parts if it["type"] == "library"},
            loose={it["name"].lstrip("/"): it["hashes"][0]["content"] for it in parts if it["type"] == "file"},
        )
    except (KeyError, ValueError) as error:
        raise ImageError(f"the bill of materials is not one that `make images SAVE=…` writes: {error}") from error


def _property(component: Mapping[str, Any], name: str) -> str:
    return str(next(it["value"] for it in component.get("properties", [{"name": name}]) if it["name"] == name))
