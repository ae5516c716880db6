"""Fixtures of all tests, and how hard Hypothesis tries.

`make test` tries each property with the profile `quick`, `make test-all` with `default`, too;
`pytest --hypothesis-profile=nightly --timeout=0 tests/unit` tries for hours.

No profile judges by the clock. The first strings that Hypothesis draws in a fresh clone wait for its tables of Unicode,
and machines that run tests are busy.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest
from hypothesis import HealthCheck, settings

from hetero_api.host.memory import out_of_memory_kills
from hetero_client.home import HeteroHome
from hetero_client.model_store.demo_model import demo_directory

# Here, at import, because pytest loads the profile that its command line names between this and the tests' modules.
for _profile, _max_examples in (("quick", 50), ("default", 200), ("nightly", 10_000)):
    settings.register_profile(
        _profile, max_examples=_max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("default")


_STACKS = pytest.StashKey[TextIO]()


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


_dead_workers: list[str] = []


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Have a worker of xdist write its stacks to a file if a signal ends it; xdist itself says only that it is gone."""
    if folder := getattr(config, "workerinput", {}).get("stacks"):
        config.stash[_STACKS] = Path(folder, "stacks").open("w", encoding="utf-8")  # noqa: SIM115 - for good
        faulthandler.enable(config.stash[_STACKS])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist where to write them."""
    node.workerinput["stacks"] = str(node.config._tmp_path_factory.mktemp("stacks", numbered=True))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Note how a worker of xdist ended that should not have."""
    if error is not None:
        process = node.gateway._io.popen
        status = process.wait(timeout=60)
        stacks = "\n".join(path.read_text(encoding="utf-8") for path in Path(node.workerinput["stacks"]).iterdir())
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        kills = out_of_memory_kills()
        _dead_workers.append(f"{node.gateway.id}: {how}; processes killed for want of memory so far: {kills}\n{stacks}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how workers of xdist ended that should not have."""
    if _dead_workers:
        terminalreporter.section("workers that ended")
        for text in _dead_workers:
            terminalreporter.write_line(text)


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
