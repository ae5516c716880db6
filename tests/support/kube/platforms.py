"""Which builds of the programs run on this machine."""

from __future__ import annotations

import platform

from tests.support.kube.errors import ProvisionFailed

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def architecture() -> str:
    """As Kubernetes and Debian call it. Raises ProvisionFailed where no programs can be fetched."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ARCHITECTURES:
        raise ProvisionFailed(
            f"no Kubernetes servers can be fetched for {system} on {machine}: they exist for Linux on "
            f"{' and '.join(ARCHITECTURES)}. Set KUBEBUILDER_ASSETS to a folder that has them"
        )
    return ARCHITECTURES[machine]
