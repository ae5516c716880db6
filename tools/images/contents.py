"""Which packages an image has, and which of its files are whose.

Read from an archive, not by running the image: what is looked at could lie otherwise. A file above the base belongs to
a Python package if its RECORD names it (byte code goes with its source), to a Debian package if dpkg's list names it,
and is loose otherwise: links and settings of the environment, compiled kernels.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.parser import BytesParser
from email.policy import compat32
from typing import Final, Literal

from packaging.utils import canonicalize_name

from tools.images.archive import File, ImageContent

_MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
_METADATA: Final = re.compile(r"(.*)/([^/]+\.dist-info)/METADATA")
_BYTE_CODE: Final = re.compile(r"(.*/)?__pycache__/(.+)\.cpython-\d+(\.opt-\d)?\.pyc")
_DPKG_STATUS: Final = "var/lib/dpkg/status"
_DPKG_LIST: Final = re.compile(r"var/lib/dpkg/info/([^/:]+)(:[^/]+)?\.list")


@dataclass(slots=True)
class Package:
    """A package of an image. Its files are those above the base."""

    kind: Literal["pypi", "deb"]
    name: str
    version: str
    licences: tuple[str, ...] = ()
    architecture: str = ""
    own: bool = False
    """Whether it was installed above the base."""
    site_packages: str = ""
    metadata: str = ""
    """Path of the file that tells of it, which its RECORD names."""
    recorded: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 by path, as its RECORD says; "" for what has none."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 by path, as they are."""

    @property
    def digest(self) -> str:
        """SHA-256 of its files' paths and hashes, as sha256sum prints them in the order of their paths."""
        lines = (f"{sha256}  {path}\n" for path, sha256 in sorted(self.files.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Contents:
    """An image's packages, in the order of their names, and the files above its base that belong to none."""

    packages: tuple[Package, ...]
    loose: Mapping[str, str]
    """SHA-256 by path."""
    distribution: str
    """`ID-VERSION_ID` of os-release, debian-12 for instance."""
    machine: str
    python: str
    """Version in whose folder the project's packages are, as 3.11; "" if there are none."""


def contents_of(image: ImageContent, *, base_layers: int) -> Contents:
    """Return what an image on a base of so many layers has."""
    above = {path: file for path, file in image.files.items() if file.layer >= base_layers}
    python = [_python_package(path, image.files, base_layers) for path in image.files if _METADATA.fullmatch(path)]
    debian = list(_debian_packages(image.files))
    owners = dict(_debian_owners(image.files, debian))
    vendored = _vendored(python)
    for package in (*vendored, *(it for it in python if it not in vendored)):
        owners |= dict.fromkeys(package.recorded, package)
    loose: dict[str, str] = {}
    for path, file in above.items():
        code = _BYTE_CODE.fullmatch(path)
        source = f"{code[1] or ''}{code[2]}.py" if code else path
        owner = owners.get(path) or owners.get(source) or owners.get(_merged(path))
        (loose if owner is None else owner.files)[path] = file.sha256
    versions = [re.search(r"lib/python(3\.\d+)/", package.site_packages) for package in python if package.own]
    return Contents(
        packages=tuple(sorted([*python, *debian], key=lambda it: (it.kind, it.name, it.version))),
        loose=loose,
        distribution=_distribution(image.files),
        machine=_MACHINES.get(image.config.get("architecture", ""), ""),
        python=next((found[1] for found in versions if found), ""),
    )


def _vendored(packages: Sequence[Package]) -> list[Package]:
    """Return the packages that others ship copies of, as setuptools does, and say that nobody installed them.

    Their files are the others'. The bill of materials names them, for their weaknesses are there, too.
    """
    tellers = Counter(path for package in packages for path in package.recorded)
    vendored = [package for package in packages if tellers[package.metadata] > 1]
    for package in vendored:
        package.own = False
    return vendored


def _python_package(path: str, files: Mapping[str, File], base_layers: int) -> Package:
    found = _METADATA.fullmatch(path)
    assert found is not None
    site_packages, folder = found.groups()
    told = BytesParser(policy=compat32).parsebytes(files[path].content or b"", headersonly=True)
    record = files.get(f"{site_packages}/{folder}/RECORD")
    return Package(
        kind="pypi",
        name=canonicalize_name(str(told["Name"])),
        version=str(told["Version"]),
        licences=tuple(_licences(dict(told.items()), told.get_all("Classifier") or [])),
        own=files[path].layer >= base_layers,
        site_packages=site_packages,
        metadata=path,
        recorded=dict(_record(record.content or b"", site_packages)) if record is not None else {},
    )


def _licences(told: Mapping[str, str], classifiers: list[str]) -> Iterator[str]:
    """Yield an expression of SPDX if there is one, else the names that there are."""
    if expression := told.get("License-Expression"):
        yield expression
        return
    names = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License :: ")]
    short = told.get("License", "").strip()
    yield from names or ([short] if short and "\n" not in short and len(short) < 80 and short != "UNKNOWN" else [])


def _record(content: bytes, site_packages: str) -> Iterator[tuple[str, str]]:
    for row in csv.reader(content.decode().splitlines()):
        if row:
            path = posixpath.normpath(posixpath.join(site_packages, row[0]))
            algorithm, _, encoded = row[1].partition("=")
            yield path, base64.urlsafe_b64decode(f"{encoded}==").hex() if algorithm == "sha256" else ""


def _debian_packages(files: Mapping[str, File]) -> Iterator[Package]:
    status = files.get(_DPKG_STATUS)
    for stanza in (status.content or b"").split(b"\n\n") if status is not None else ():
        told = BytesParser(policy=compat32).parsebytes(stanza + b"\n\n", headersonly=True)
        if told["Package"] and str(told["Status"]).endswith(" installed"):
            yield Package("deb", str(told["Package"]), str(told["Version"]), architecture=str(told["Architecture"]))


def _debian_owners(files: Mapping[str, File], packages: list[Package]) -> Iterator[tuple[str, Package]]:
    known = {package.name: package for package in packages}
    for path, file in files.items():
        listed = _DPKG_LIST.fullmatch(path)
        if listed and listed[1] in known:
            for line in (file.content or b"").decode().splitlines():
                yield _merged(line.lstrip("/")), known[listed[1]]


def _merged(path: str) -> str:
    """Return a path as it is where /bin, /lib and /sbin are links to those below /usr."""
    return f"usr/{path}" if re.match(r"(bin|sbin|lib\w*)/", path) else path


def _distribution(files: Mapping[str, File]) -> str:
    for path in ("usr/lib/os-release", "etc/os-release"):
        content = files[path].content if path in files else None
        if content:
            told = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)', content.decode(), re.M))
            return "-".join(told[key] for key in ("ID", "VERSION_ID") if key in told)
    return ""
