"""What a model's URI names: hf://ORG/NAME, pvc://CLAIM/PATH, oci://IMAGE#PATH, file:///PATH."""

from __future__ import annotations

from typing import Final, NamedTuple

HUB: Final = "hf"
CLAIM: Final = "pvc"
IMAGE: Final = "oci"
NODE: Final = "file"
_IMAGE_FOLDER: Final = "models"
"""Where a model lies in an image that does not say otherwise."""


class ModelUri(NamedTuple):
    """A URI in its parts."""

    scheme: str
    source: str
    """The Hub's repository, the claim, or the image; "" for file://."""
    path: str
    """Folder within it, without slashes at its ends; of file:// the absolute path on the node."""


def parse_model_uri(uri: str) -> ModelUri:
    """The parts of a URI that the spec has accepted."""
    scheme, _, rest = uri.partition("://")
    if scheme == CLAIM:
        claim, _, path = rest.partition("/")
        return ModelUri(scheme, claim, path.strip("/"))
    if scheme == IMAGE:
        image, _, path = rest.partition("#")
        return ModelUri(scheme, image, path.strip("/") or _IMAGE_FOLDER)
    if scheme == NODE:
        return ModelUri(scheme, "", "/" + rest.strip("/"))
    return ModelUri(scheme, rest, "")
