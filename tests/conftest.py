"""Fixtures of all tests, and how hard Hypothesis tries.

`make test` tries each property with the profile `quick`, `make test-all` with `default`, too;
`pytest --hypothesis-profile=nightly --timeout=0 tests/unit` tries for hours.

No profile judges by the clock. The first strings that Hypothesis draws in a fresh clone wait for its tables of Unicode,
and machines that run tests are busy.
"""

from __future__ import annotations

import gc
import os
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hetero_client.home import HeteroHome
from hetero_client.model_store.demo_model import demo_directory

# Here, at import, because pytest loads the profile that its command line names between this and the tests' modules.
for _profile, _max_examples in (("quick", 50), ("default", 200), ("nightly", 10_000)):
    settings.register_profile(
        _profile, max_examples=_max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("default")


def extended_tests() -> frozenset[str]:
    """Return the files and tests that only `make test-all` runs, as in the beginning of their node ids."""
    return frozenset(tomllib.loads(Path(__file__).with_name("extended.toml").read_text(encoding="utf-8")))


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark tests of extended.toml, so that `make test` can leave them out."""
    extended = extended_tests()
    for item in items:
        file, _, test = item.nodeid.partition("::")
        if {file, f"{file}::{test.partition('[')[0]}", item.nodeid} & extended:
            item.add_marker(pytest.mark.extended)


def pytest_collection_finish() -> None:
    """Leave thousands of tests out of every collection of garbage, which commands of ranks ask for."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter free all of it at its end: libraries report what is left as leaks."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip an extended test that continuous integration has no time for: CPUs differ by a factor of four."""
    until = os.environ.get("HETERO_EXTENDED_TESTS_UNTIL")
    if until and time.time() > float(until) and item.get_closest_marker("extended"):
        pytest.skip("continuous integration has no time left on this machine; `make test-rest` runs it")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo model's directory, which `hetero model fetch smollm2-135m-instruct` makes (`make test` does)."""
    return demo_directory(HeteroHome.from_environment())


@pytest.fixture(scope="session", autouse=True)
def _quiet_tokenizers() -> None:
    # The tokenizers library warns when a process that used its threads forks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
