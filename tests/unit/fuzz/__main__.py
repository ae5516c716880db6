"""Fuzzes readers of bytes from elsewhere, guided by coverage (atheris, which is libFuzzer for Python).

    python -m tests.unit.fuzz                      # every target for 30 minutes, one after another
    python -m tests.unit.fuzz --seconds 60 gguf    # one of them for a minute

A finding ends its target; its bytes are kept in tests/unit/fuzz/findings, which makes them a test. Inputs that reach
new code are kept in a cache outside the repository, so that the next run begins where this one ended; the shortest of
them go to tests/unit/fuzz/corpus with --keep, where tests and other machines have them. Figures go to
bench/results/fuzz-DATE.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.home import RESULTS
from bench.machine import describe

if TYPE_CHECKING:
    from tests.unit.fuzz.target import Target

FINDINGS: Final = Path(__file__).parent / "findings"
CORPUS: Final = Path(__file__).parent / "corpus"
_MOST_KEPT: Final = 100
_MOST_KEPT_BYTES: Final = 4096
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
    parser.add_argument("--keep", action="store_true", help="write what the cache has to the corpus, and fuzz nothing")
    options = parser.parse_args()
    if unknown := set(options.targets) - TARGETS.keys():
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    names = options.targets or [*TARGETS]
    if options.keep:
        for name in names:
            _keep(name)
        return 0
    outcomes = fuzz(names, seconds=options.seconds)
    failed = [name for name in names if not outcomes.get(name, _LOST).passed]
    file = RESULTS / f"fuzz-{datetime.now(UTC):%Y-%m-%d-%H%M%S}.json"
    figures = {name: asdict(outcome) for name, outcome in outcomes.items()}
    content = {**describe(), "seconds": options.seconds, "targets": figures}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"findings of {', '.join(failed)} are in {FINDINGS}" if failed else "no findings")
    return 1 if failed else 0


def corpus_of(name: str) -> list[bytes]:
    """Return the inputs of a target that the repository keeps; none for a target that is new."""
    path = CORPUS / f"{name}.zip"
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as archive:
        return [archive.read(each) for each in archive.namelist()]


def _keep(name: str) -> None:
    """Write the shortest inputs that a target's cache has to its archive, which is the same for the same inputs."""
    files = sorted((_CACHE / name).glob("*"), key=lambda file: (file.stat().st_size, file.name))
    inputs = sorted({file.read_bytes() for file in files if file.stat().st_size <= _MOST_KEPT_BYTES}, key=len)
    CORPUS.mkdir(exist_ok=True)
    with zipfile.ZipFile(CORPUS / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for data in inputs[:_MOST_KEPT]:
            archive.writestr(zipfile.ZipInfo(hashlib.sha256(data).hexdigest()[:16]), data, zipfile.ZIP_DEFLATED)
    print(f"{name}: {min(len(inputs), _MOST_KEPT)} of {len(files)} inputs kept")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one target; None where the fuzzer did not say."""

    passed: bool
    inputs: int | None
    edges: int | None


_LOST: Final = Outcome(passed=False, inputs=None, edges=None)


def fuzz(
    names: Sequence[str], *, seconds: int, seed: int = 0, findings: Path = FINDINGS, cache: Path = _CACHE
) -> dict[str, Outcome]:
    """Fuzz targets in turn and print their figures; return the outcomes by name, of those that ended.

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
        outcomes = {}
        for line in process.stdout:
            told = json.loads(line)
            outcome = outcomes[told["name"]] = Outcome(**told["outcome"])
            print(f"{told['name']}: {outcome.inputs} inputs, {outcome.edges} edges{told['log']}", flush=True)
        if process.wait():
            log.seek(0)
            print(log.read().decode(errors="replace")[-6000:], flush=True)
    return outcomes


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
        outcome = Outcome(passed, int(executed[1]) if executed else None, int(covered[-1]) if covered else None)
        told = {"name": name, "outcome": asdict(outcome), "log": "" if passed else f"\n{said[-8000:]}"}
        print(json.dumps(told), flush=True)
    return 0


def _fuzz(target: Target, order: Mapping[str, Any]) -> None:
    """Fuzz one target in this process, which ends with it."""
    import atheris

    corpus, findings = Path(order["cache"]) / target.name, Path(order["findings"]) / target.name
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate([*target.seeds(), *corpus_of(target.name)]):
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
