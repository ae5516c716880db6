"""Pushes to an OCI registry, and signs there in cosign's format, by skopeo: credentials are those of `skopeo login`.

A signature is an image of its own beside what it signs, under the tag `sha256-DIGEST.sig`: `cosign verify --key` reads
it, and so does every program of containers/image by a policy of type sigstoreSigned.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from tools.release.sources import ReleaseError, run

_SKOPEO: Final = ("skopeo", "--insecure-policy")
"""Sources are files that were made here, which nobody signed."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key as `cosign generate-key-pair` makes it, and a file with its passphrase."""

    path: Path
    passphrase: Path


@dataclass(frozen=True, slots=True)
class Registry:
    """HOST/PATH of a registry; `plain_http` is for one on this machine."""

    where: str
    key: SigningKey | None = None
    plain_http: bool = False

    def push(self, source: str, name: str, tag: str, *, digest: str) -> str:
        """Push what skopeo calls `source`, and sign it if there is a key; its name with its digest.

        A tag that is there is left alone if it is the same, and signed. Raises ReleaseError where it is another, or the
        registry names what it got by another digest.
        """
        reference = f"{self.where}/{name}:{tag}"
        there = self._digest_of(reference)
        if there and there != digest:
            raise ReleaseError(f"{reference} is there, and is {there}, not {digest}: a version is pushed once")
        with tempfile.TemporaryDirectory(prefix="hetero-push-") as folder:
            report = Path(folder) / "digest"
            verify = f"--dest-tls-verify={str(not self.plain_http).lower()}"
            options = [verify, "--quiet", "--preserve-digests", f"--digestfile={report}", *self._sign(Path(folder))]
            where = [f"--registries.d={folder}"]
            run([*_SKOPEO, *where, "copy", *options, source, f"docker://{reference}"])
            pushed = report.read_text(encoding="utf-8").strip()
        if pushed != digest:
            raise ReleaseError(f"{reference} became {pushed}, and not {digest}")
        return f"{self.where}/{name}@{digest}"

    def _sign(self, folder: Path) -> list[str]:
        if self.key is None:
            return []
        host = self.where.partition("/")[0]
        attached = {"docker": {host: {"use-sigstore-attachments": True}}}
        (folder / "release.yaml").write_text(yaml.safe_dump(attached), encoding="utf-8")
        return [f"--sign-by-sigstore-private-key={self.key.path}", f"--sign-passphrase-file={self.key.passphrase}"]

    def _digest_of(self, reference: str) -> str:
        """Return the digest of what has a tag; empty where it cannot be told, which pushing then tells better."""
        verify = f"--tls-verify={str(not self.plain_http).lower()}"
        command = [*_SKOPEO, "inspect", verify, "--raw", f"docker://{reference}"]
        try:
            found = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError as error:
            raise ReleaseError("there is no skopeo, which pushes: install it") from error
        if found.returncode:
            return ""
        return f"sha256:{hashlib.sha256(found.stdout).hexdigest()}"
