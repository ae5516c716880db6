"""Fixtures of all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetero_client.home import HeteroHome

DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo model's directory, in the model store of whoever runs the tests."""
    directory = HeteroHome.from_environment().models / "hf" / DEMO_MODEL
    assert (directory / "config.json").exists(), (
        f"{directory} is missing: run `hetero model fetch smollm2-135m-instruct` (`make test` does)"
    )
    return directory


@pytest.fixture(scope="session", autouse=True)
def _quiet_tokenizers() -> None:
    # The tokenizers library warns when a process that used its threads forks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
