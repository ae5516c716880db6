"""A certificate authority of one control plane, made fresh and thrown away with it.

Made with the openssl program (3.0 or newer), which every machine that runs these tests has, rather than with one more
package. Extensions are complete and critical where they should be: Python 3.13 verifies strictly.
Keys are EC P-256: generating one costs milliseconds.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.support.kube.errors import BinariesMissing, ProvisionFailed

Usage = Literal["clientAuth", "serverAuth"]

VALID_DAYS = 30


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Two PEM files."""

    certificate: Path
    key: Path


class Authority:
    """Issues certificates below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.certificate = folder / "ca.crt"
        self.key = folder / "ca.key"

    def create(self) -> None:
        """A new CA key and certificate."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        extensions = [
            "basicConstraints=critical,CA:true",
            "keyUsage=critical,keyCertSign,cRLSign,digitalSignature",
            "subjectKeyIdentifier=hash",
        ]
        self._request("ca", _subject("test-ca", ()), extensions, signer=[])

    def issue(
        self,
        name: str,
        *,
        common_name: str,
        usage: Usage,
        organizations: Sequence[str] = (),
        alternative_names: Sequence[str] = (),
    ) -> KeyPair:
        """A certificate in `name`.crt and .key. Kubernetes reads the user from CN and the groups from O."""
        extensions = [
            "basicConstraints=critical,CA:false",
            "keyUsage=critical,digitalSignature",
            f"extendedKeyUsage={usage}",
            "subjectKeyIdentifier=hash",
            "authorityKeyIdentifier=keyid",
        ]
        if alternative_names:
            extensions.append(f"subjectAltName={','.join(alternative_names)}")
        signer = ["-CA", str(self.certificate), "-CAkey", str(self.key)]
        return self._request(name, _subject(common_name, organizations), extensions, signer=signer)

    def signing_key(self, name: str) -> Path:
        """A bare private key, for service-account tokens."""
        path = self._folder / f"{name}.key"
        _openssl("ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", str(path))
        return path

    def _request(self, name: str, subject: str, extensions: Sequence[str], *, signer: Sequence[str]) -> KeyPair:
        pair = KeyPair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        config = self._folder / f"{name}.cnf"
        config.write_text(
            "[req]\nprompt=no\nutf8=yes\ndistinguished_name=subject\nx509_extensions=extensions\n"
            f"[subject]\n{subject}\n[extensions]\n" + "\n".join(extensions) + "\n",
            encoding="utf-8",
        )
        # fmt: off
        _openssl(
            "req", "-x509", "-config", str(config), *signer, "-days", str(VALID_DAYS), "-sha256",
            "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", str(pair.key), "-out", str(pair.certificate),
        )
        # fmt: on
        return pair


def _subject(common_name: str, organizations: Sequence[str]) -> str:
    lines = [f"{index}.O={organization}" for index, organization in enumerate(organizations)]
    return "\n".join([*lines, f"CN={common_name}"])


def _openssl(*arguments: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise BinariesMissing("the openssl program is needed for the control plane's certificates; install openssl")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ProvisionFailed(f"openssl {' '.join(arguments[:2])} failed: {done.stderr.strip()}")
