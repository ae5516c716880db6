"""Make the peers' environments and turn models into their formats; what is there already is left as it is.

    python -m bench.peers.install [--only NAME ...] [--model NAME ...]

What does not install is told with the reason and the log, and the rest goes on; exit status 1 then.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

from bench.home import BenchHome
from bench.peers.environments import ENVIRONMENTS, OWN, PeerError, install
from bench.peers.formats import FORMATS, ensure
from bench.shapes import DEMO, MODELS, directory_of

Step = tuple[str, Callable[[], object]]
"""What is done, in words, and the doing of it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    every = list(ENVIRONMENTS)
    parser.add_argument("--only", nargs="*", choices=every, default=every, help="peers; default: all")
    parser.add_argument("--model", nargs="*", choices=MODELS, default=[DEMO], help=f"to convert; default: {DEMO}")
    arguments = parser.parse_args()
    home = BenchHome.from_environment()
    failures = attempt((f"environment {name}", partial(install, home, name)) for name in arguments.only)
    for model in arguments.model:
        failures += attempt(conversions(home, model, (OWN, *arguments.only)))
    return 1 if failures else 0


def conversions(home: BenchHome, model: str, environments: Iterable[str]) -> list[Step]:
    """Into all formats that one of the environments makes."""
    directory, wanted = directory_of(model, home), set(environments)
    names = [name for name, format_ in FORMATS.items() if format_.environment in wanted]
    return [(f"{model} as {name}", partial(ensure, home, model, directory, name)) for name in names]


def attempt(steps: Iterable[Step]) -> int:
    """Carry out all steps and tell of each; how many failed."""
    failures = 0
    for what, step in steps:
        began_s = time.monotonic()
        try:
            step()
        except PeerError as error:
            failures += 1
            print(f"{what}: FAILED: {error}", flush=True)
        else:
            print(f"{what}: there ({time.monotonic() - began_s:.0f} s)", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
