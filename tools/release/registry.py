"""Pushes to an OCI registry by skopeo, whose credentials (`skopeo login`) count. Never over what is there."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.release.signing import Signer, signature_tag
from tools.release.sources import ReleaseError, run

_SKOPEO: Final = ("skopeo", "--insecure-policy")
"""Sources are files that were made here, which nobody signed."""


@dataclass(frozen=True, slots=True)
class Registry:
    """HOST/PATH of a registry; `plain_http` is for one on this machine."""

    where: str
    signer: Signer | None = None
    plain_http: bool = False

    def push(self, source: str, name: str, tag: str, *, digest: str) -> str:
        """Push what skopeo calls `source`, and sign it if there is a key; its name with its digest.

        A tag that is there is left alone if it is the same. Raises ReleaseError where it is another, or the registry
        names what it got by another digest.
        """
        reference = f"{self.where}/{name}:{tag}"
        there = self._digest_of(reference)
        if there and there != digest:
            raise ReleaseError(f"{reference} is there, and is {there}, not {digest}: a version is pushed once")
        if not there:
            self._copy(source, f"docker://{reference}")
            if (pushed := self._digest_of(reference)) != digest:
                raise ReleaseError(f"{reference} became {pushed or 'nothing'}, and not {digest}")
        if self.signer is not None:
            self._sign(self.signer, f"{self.where}/{name}", digest)
        return f"{self.where}/{name}@{digest}"

    def _sign(self, signer: Signer, repository: str, digest: str) -> None:
        """Add a signature to those that there are."""
        where = f"{repository}:{signature_tag(digest)}"
        with tempfile.TemporaryDirectory(prefix="hetero-signatures-") as layout:
            if self._digest_of(where):
                self._copy(f"docker://{where}", f"oci:{layout}")
            if signer.sign(repository, digest, Path(layout)):
                self._copy(f"oci:{layout}", f"docker://{where}")

    def _copy(self, source: str, target: str) -> None:
        verify = str(not self.plain_http).lower()
        tls = [f"--src-tls-verify={verify}", f"--dest-tls-verify={verify}"]
        run([*_SKOPEO, "copy", *tls, "--quiet", "--preserve-digests", source, target])

    def _digest_of(self, reference: str) -> str:
        """Return the digest of what has a tag; empty where it cannot be told, which pushing then tells better."""
        verify = f"--tls-verify={str(not self.plain_http).lower()}"
        command = [*_SKOPEO, "inspect", verify, "--raw", f"docker://{reference}"]
        try:
            found = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError as error:
            raise ReleaseError("there is no skopeo, which pushes: install it") from error
        return f"sha256:{hashlib.sha256(found.stdout).hexdigest()}" if found.returncode == 0 else ""
