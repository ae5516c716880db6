"""A real OCI registry on this machine (Debian's docker-registry), what is in it, and keys that sign it."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import httpx
import pytest
import yaml

from tests.support.kube.ports import free_port
from tests.support.served_program import ServedProgram

PROGRAMS: Final = ("docker-registry", "skopeo")
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_SIGNED: Final = "application/vnd.dev.cosign.simplesigning.v1+json"
_SIGNATURE: Final = "dev.cosignproject.cosign/signature"


class OciRegistry(ServedProgram):
    """Serves plain HTTP at `address` from `folder`, while entered."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            pytest.skip(f"no {' and no '.join(missing)}: install Debian's packages of these names")
        self._folder = folder
        self.address = f"{host}:{free_port()}"
        folder.mkdir(parents=True, exist_ok=True)
        http = httpx.Client(base_url=f"http://{self.address}/v2", trust_env=False, timeout=20)
        super().__init__(log=folder / "log", http=http, ready_path="/")

    def manifest(self, name: str, reference: str) -> Mapping[str, Any]:
        """A manifest, by tag or digest."""
        answer = self._http.get(f"/{name}/manifests/{reference}", headers={"accept": _MANIFEST})
        answer.raise_for_status()
        found: Mapping[str, Any] = json.loads(answer.content)
        return found

    def blob(self, name: str, digest: str) -> bytes:
        answer = self._http.get(f"/{name}/blobs/{digest}")
        answer.raise_for_status()
        return answer.content

    def tags(self, name: str) -> list[str]:
        return sorted(self._http.get(f"/{name}/tags/list").json()["tags"])

    def signed_identities(self, name: str, digest: str, public_key: Path, folder: Path) -> list[str]:
        """What signatures in cosign's format call an image: those that OpenSSL finds to be a key's, over its digest."""
        identities = []
        for layer in self.manifest(name, f"{digest.replace(':', '-')}.sig")["layers"]:
            assert layer["mediaType"] == _SIGNED
            payload = self.blob(name, layer["digest"])
            (folder / "payload").write_bytes(payload)
            (folder / "signature").write_bytes(base64.b64decode(layer["annotations"][_SIGNATURE]))
            command = ["openssl", "dgst", "-sha256", "-verify", str(public_key), "-signature", "signature", "payload"]
            valid = subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0
            critical = json.loads(payload)["critical"]
            assert critical["type"] == "cosign container image signature"
            if valid and critical["image"]["docker-manifest-digest"] == digest:
                identities.append(str(critical["identity"]["docker-reference"]))
        return identities

    def _command(self) -> Sequence[str]:
        settings = {
            "version": "0.1",
            "log": {"level": "warn", "accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": str(self._folder / "data")}},
            "http": {"addr": self.address},
        }
        (self._folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        return ["docker-registry", "serve", str(self._folder / "config.yaml")]


@dataclass(frozen=True)
class SigningKeys:
    """A pair of keys as docs/releases.md makes them."""

    folder: Path
    options: tuple[str, ...]

    @classmethod
    def make(cls, folder: Path, *, passphrase: str) -> Self:
        private, secret = folder / "release.key", folder / "passphrase"
        secret.write_text(f"{passphrase}\n")
        cipher = ["-aes-256-cbc", "-pass", f"file:{secret}"] if passphrase else []
        make = ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", *cipher, "-out", str(private)]
        public = ["-pubout", "-out", str(folder / "release.pub")]
        show = ["pkey", "-in", str(private), "-passin", f"file:{secret}", *public]
        for command in (make, show):
            subprocess.run(["openssl", *command], check=True, capture_output=True)
        return cls(folder, (f"--key={private}", *((f"--passphrase-file={secret}",) if passphrase else ())))

    @property
    def private(self) -> Path:
        return self.folder / "release.key"

    @property
    def public(self) -> Path:
        return self.folder / "release.pub"
