"""Fuzzes readers of bytes from elsewhere, guided by coverage (atheris, which is libFuzzer for Python).

    python -m tests.unit.fuzz                      # every target for 30 minutes, one after another
    python -m tests.unit.fuzz --seconds 60 gguf    # one of them for a minute

A finding ends its target; its bytes are kept in tests/unit/fuzz/findings, which makes them a test. Inputs that reach
new code are kept in a cache outside the repository, so that the next run begins where this one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.unit.fuzz.target import Target

FINDINGS: Final = Path(__file__).parent / "findings"
_ROOT: Final = Path(__file__).parents[3]
_CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hetero" / "fuzz"
_PRODUCT: Final = [
    "hetero_api", "hetero_client", "hetero_gateway", "hetero_operator", "hetero_placement", "hetero_worker"
]  # fmt: skip
_ONE_INPUT_S: Final = 20
_MOST_MIB: Final = 3072
_MOST_BYTES: Final = 1 << 16
_INSIDE: Final = "--inside"
"""First argument of the process that fuzzes; the others are names of targets."""


def main() -> int:
    """Fuzz the targets that the command line names, or all; return the exit status."""
    from tests.unit.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(prog="python -m tests.unit.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=1800, help="for each target; default: %(default)s")
    options = parser.parse_args()
    if unknown := set(options.targets) - TARGETS.keys():
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    failed = fuzz(options.targets or [*TARGETS], seconds=options.seconds)
    print(f"findings of {', '.join(failed)} are in {FINDINGS}" if failed else "no findings")
    return 1 if failed else 0


def fuzz(
    names: Sequence[str], *, seconds: int, seed: int = 0, findings: Path = FINDINGS, cache: Path = _CACHE
) -> list[str]:
    """Fuzz targets in turn and print their figures; return the names of those where something was found.

    One process reads the product so that its coverage is counted, which takes seconds, and forks for each target.
    `seed`: of the inputs, which are then the same each time; 0: others each time.
    """
    order = {"seconds": seconds, "seed": seed, "findings": str(findings), "cache": str(cache)}
    command = [sys.executable, "-m", "tests.unit.fuzz", _INSIDE, json.dumps(order), *names]
    environment = {**os.environ, "PYTHONHASHSEED": str(seed) if seed else "random"}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        passed = []
        for line in process.stdout:
            outcome = json.loads(line)
            passed += [outcome["name"]] * outcome["passed"]
            print(outcome["text"], flush=True)
        if process.wait():
            log.seek(0)
            print(log.read().decode(errors="replace")[-6000:], flush=True)
    return [name for name in names if name not in passed]


def _fuzz_inside(order: Mapping[str, Any], names: Sequence[str]) -> int:
    """Fuzz targets, each in a fork of this process, and print a line of JSON for each."""
    import atheris  # type: ignore[import-untyped]  # it has no types

    with atheris.instrument_imports(include=_PRODUCT):
        from tests.unit.fuzz.targets import TARGETS
    for name in names:
        with tempfile.TemporaryFile() as log:
            if not (child := os.fork()):
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                _fuzz(TARGETS[name], order)
                os._exit(os.EX_SOFTWARE)  # libFuzzer ends its process
            passed = os.waitpid(child, 0)[1] == 0
            log.seek(0)
            said = log.read().decode(errors="replace")
        executed = re.search(r"number_of_executed_units:\s*(\d+)", said)
        covered = re.findall(r"\bcov: (\d+)", said)
        text = f"{name}: {executed[1] if executed else '?'} inputs, {covered[-1] if covered else '?'} edges"
        outcome = {"name": name, "passed": passed, "text": text if passed else f"{text}\n{said[-8000:]}"}
        print(json.dumps(outcome), flush=True)
    return 0


def _fuzz(target: Target, order: Mapping[str, Any]) -> None:
    """Fuzz one target in this process, which ends with it."""
    import atheris

    corpus, findings = Path(order["cache"]) / target.name, Path(order["findings"]) / target.name
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    arguments = [
        str(corpus), f"-max_total_time={order['seconds']}", f"-artifact_prefix={findings}/", f"-timeout={_ONE_INPUT_S}",
        f"-rss_limit_mb={_MOST_MIB}", f"-max_len={_MOST_BYTES}", "-print_final_stats=1", f"-seed={order['seed']}",
    ]  # fmt: skip

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        random_ = random.Random(seed)
        if random_.random() < 0.3:
            return bytes(atheris.Mutate(data, max_size))
        return target.mutate(data, random_)[:max_size]

    def take(data: bytes) -> None:
        target.check(data)

    atheris.Setup([sys.argv[0], *arguments], take, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(_fuzz_inside(json.loads(sys.argv[2]), sys.argv[3:]) if sys.argv[1:2] == [_INSIDE] else main())
