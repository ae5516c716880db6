"""A base image made on this machine of Debian's packages, for where no registry is in reach.

debootstrap's smallest variant with Python, and without what no container reads (lists, caches, manuals, translations).
Licences stay. It takes root, a minute, and a mirror of Debian.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tools.debian import RELEASE, NoDebianSources, mirror
from tools.images.builders import Builder, ImageError

REFERENCE: Final = f"localhost/hetero-base:{RELEASE}"
PACKAGES: Final = ("python3", "python3-venv", "ca-certificates")
"""python3-venv makes the environment that installs packages; public images of Python have it, too."""
ENVIRONMENT: Final = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_UNREAD: Final = (
    "var/lib/apt/lists/*",
    "var/cache/apt/archives/*.deb",
    "var/cache/apt/*.bin",
    "var/cache/debconf/*-old",
    "var/log/*",
    "usr/share/locale/*",
    "usr/share/man/*",
    "usr/share/info/*",
)
_DOCUMENTATION: Final = Path("usr/share/doc")
_LICENCE: Final = "copyright"


def make_base(builder: Builder, *, reference: str = REFERENCE, mirror_url: str = "") -> None:
    """Make the image and import it as `reference`. No `mirror_url`: the machine's own. Raises ImageError."""
    if os.geteuid() != 0:
        raise ImageError("debootstrap makes a root with its owners and devices: run this as root")
    if shutil.which("debootstrap") is None:
        raise ImageError("there is no debootstrap: apt-get install debootstrap")
    try:
        source = mirror_url or mirror()
    except NoDebianSources as error:
        raise ImageError(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="hetero-base-") as folder:
        root, archive = Path(folder) / "root", Path(folder) / "root.tar"
        _run(["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", RELEASE, str(root), source])
        for path in unread(root):
            _remove(path)
        _run(["tar", "--numeric-owner", "-C", str(root), "-cf", str(archive), "."])
        builder.import_root(archive, reference, ENVIRONMENT)


def unread(root: Path) -> Iterator[Path]:
    """What no container reads. Programs that only look whether a folder is there find it still.

    A package's documentation may be a link to another's, so that a file comes twice.
    """
    for pattern in _UNREAD:
        yield from sorted(root.glob(pattern))
    for path in sorted((root / _DOCUMENTATION).glob("*/*")):
        if path.name != _LICENCE:
            yield path


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    if subprocess.run(command, check=False).returncode:
        raise ImageError(f"{command[0]} failed; it says why above")
