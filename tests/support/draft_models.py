"""Draft models for tests: a model without its last layers, which agrees with it now and then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def without_layers(model: Path, directory: Path, *, number: int) -> Path:
    """Copy a model into `directory` without its last `number` layers; the weights stay in its files."""
    shutil.copytree(model, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    config["num_hidden_layers"] -= number
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    (directory / "config.json").write_text(json.dumps(config))
    return directory
