"""A real OCI registry on this machine (Debian's docker-registry), and what is in it, asked by plain HTTP."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx
import pytest
import yaml

from tests.support.kube.polling import poll
from tests.support.kube.ports import free_port

READY_TIMEOUT_S: Final = 20.0
PROGRAMS: Final = ("docker-registry", "skopeo")
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_SIGNED: Final = "application/vnd.dev.cosign.simplesigning.v1+json"
_SIGNATURE: Final = "dev.cosignproject.cosign/signature"


class OciRegistry:
    """Serves plain HTTP at `address` from `folder`, while entered."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            pytest.skip(f"no {' and no '.join(missing)}: install Debian's packages of these names")
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"{host}:{free_port()}"
        self._http = httpx.Client(base_url=f"http://{self.address}/v2", trust_env=False, timeout=20)

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

    def _is_ready(self) -> bool:
        try:
            return self._http.get("/").status_code == 200
        except httpx.TransportError:
            return False

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "version": "0.1",
            "log": {"level": "warn", "accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": str(self._folder / "data")}},
            "http": {"addr": self.address},
        }
        (self._folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        log = self._folder / "log"
        with log.open("wb") as file:
            command = ["docker-registry", "serve", str(self._folder / "config.yaml")]
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        poll(self._is_ready, timeout_s=READY_TIMEOUT_S, describe=log.read_text)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait(READY_TIMEOUT_S)
