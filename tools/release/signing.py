"""Signatures as cosign keeps them in a registry, made with a key of one's own: no service is asked, nothing is logged.

What is signed is a payload ("simple signing") that names a digest. It is a layer of an image of its own under the tag
`sha256-DIGEST.sig`, with the signature as the layer's annotation. `cosign verify --key` reads that, and so do
containers/image's policies of type sigstoreSigned. The key is ECDSA over P-256, whose signatures are over SHA-256.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tools.images.archive import CONFIG, MANIFEST
from tools.release.layout import add_blob, read_manifest, write_index
from tools.release.sources import ReleaseError

_PAYLOAD: Final = "application/vnd.dev.cosign.simplesigning.v1+json"
_SIGNATURE: Final = "dev.cosignproject.cosign/signature"
_ECDSA: Final = ec.ECDSA(hashes.SHA256())


def signature_tag(digest: str) -> str:
    """Return the tag that signatures of an image have."""
    return f"{digest.replace(':', '-')}.sig"


@dataclass(frozen=True, slots=True)
class Signer:
    """A private key."""

    key: ec.EllipticCurvePrivateKey

    @classmethod
    def load(cls, path: Path, passphrase: Path | None) -> Signer:
        """Read a key in PEM, as `openssl genpkey` writes it; a passphrase is the first line of a file.

        Raises ReleaseError.
        """
        try:
            secret = passphrase.read_bytes().splitlines()[0] if passphrase else None
            key = serialization.load_pem_private_key(path.read_bytes(), secret)
        except (OSError, ValueError, TypeError, IndexError) as error:
            problem = f"KEY: {path} is no private key in PEM, or its passphrase is another"
            raise ReleaseError(f"{problem}: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ReleaseError(f"KEY: {path} is not of ECDSA over P-256: see docs/releases.md")
        return cls(key)

    def sign(self, repository: str, digest: str, layout: Path) -> bool:
        """Add a signature to the layout of an image's signatures, which may be empty; False if it has one of this key.

        `repository` is HOST/PATH/NAME.
        """
        before = read_manifest(layout)
        layers: list[dict[str, Any]] = list(before["layers"]) if before else []
        if any(self._made(layer, layout, digest) for layer in layers):
            return False
        identity, image = {"docker-reference": repository}, {"docker-manifest-digest": digest}
        critical = {"identity": identity, "image": image, "type": "cosign container image signature"}
        payload = json.dumps({"critical": critical, "optional": None}, separators=(",", ":")).encode()
        signature = base64.b64encode(self.key.sign(payload, _ECDSA)).decode()
        layers.append({"mediaType": _PAYLOAD, **add_blob(layout, payload), "annotations": {_SIGNATURE: signature}})
        rootfs = {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]}
        config = json.dumps({"architecture": "", "os": "", "config": {}, "rootfs": rootfs}).encode()
        described = {"mediaType": CONFIG, **add_blob(layout, config)}
        write_index(layout, {"schemaVersion": 2, "mediaType": MANIFEST, "config": described, "layers": layers})
        return True

    def _made(self, layer: Mapping[str, Any], layout: Path, digest: str) -> bool:
        """Whether a signature is this key's, and over a digest."""
        payload = (layout / "blobs" / layer["digest"].replace(":", "/")).read_bytes()
        if hashlib.sha256(payload).hexdigest() != layer["digest"].removeprefix("sha256:"):
            return False
        try:
            self.key.public_key().verify(base64.b64decode(layer["annotations"][_SIGNATURE]), payload, _ECDSA)
        except InvalidSignature:
            return False
        return bool(json.loads(payload)["critical"]["image"]["docker-manifest-digest"] == digest)
