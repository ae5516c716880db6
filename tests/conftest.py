"""Fixtures of all tests, and how hard Hypothesis tries.

`pytest --hypothesis-profile=nightly --timeout=0 tests/unit` tries for hours.

No profile judges by the clock. The first strings that Hypothesis draws in a fresh clone wait for its tables of Unicode,
and machines that run tests are busy.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hetero_client.home import HeteroHome
from hetero_client.model_store.demo_model import demo_directory

# Here, at import, because pytest loads the profile that its command line names between this and the tests' modules.
for _profile, _max_examples in (("default", 200), ("nightly", 10_000)):
    settings.register_profile(
        _profile, max_examples=_max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("default")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo model's directory, which `hetero model fetch smollm2-135m-instruct` makes (`make test` does)."""
    return demo_directory(HeteroHome.from_environment())


@pytest.fixture(scope="session", autouse=True)
def _quiet_tokenizers() -> None:
    # The tokenizers library warns when a process that used its threads forks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
