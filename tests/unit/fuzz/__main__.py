"""Fuzzes readers of bytes from elsewhere, guided by coverage (atheris, which is libFuzzer for Python).

    python -m tests.unit.fuzz                      # every target for 30 minutes, one after another
    python -m tests.unit.fuzz --seconds 60 gguf    # one of them for a minute

A finding ends its target; its bytes are kept in tests/unit/fuzz/findings, which makes them a test. Inputs that reach
new code are kept in a cache outside the repository, so that the next run begins where this one ended.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

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
"""First argument of a process that fuzzes one target; the others are its name and libFuzzer's arguments."""


def main() -> int:
    """Fuzz the targets that the command line names, or all; return the exit status."""
    if sys.argv[1:2] == [_INSIDE]:
        return _fuzz(sys.argv[2], sys.argv[3:])
    from tests.unit.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(prog="python -m tests.unit.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=1800, help="for each target; default: %(default)s")
    options = parser.parse_args()
    if unknown := set(options.targets) - TARGETS.keys():
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    failed = [name for name in options.targets or TARGETS if not fuzz(name, seconds=options.seconds)]
    print(f"findings of {', '.join(failed)} are in {FINDINGS}" if failed else "no findings")
    return 1 if failed else 0


def fuzz(name: str, *, seconds: int, seed: int = 0, findings: Path = FINDINGS, cache: Path = _CACHE) -> bool:
    """Fuzz one target in a process of its own and print its figures; return whether nothing was found.

    `seed`: of the inputs, which are then the same each time; 0: others each time.
    """
    corpus = cache / name
    corpus.mkdir(parents=True, exist_ok=True)
    (findings / name).mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "tests.unit.fuzz", _INSIDE, name, str(corpus), f"-max_total_time={seconds}",
        f"-artifact_prefix={findings / name}/", f"-timeout={_ONE_INPUT_S}", f"-rss_limit_mb={_MOST_MIB}",
        f"-max_len={_MOST_BYTES}", "-print_final_stats=1", f"-seed={seed}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONHASHSEED": str(seed) if seed else "random"}
    done = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    executed = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
    covered = re.findall(r"\bcov: (\d+)", done.stderr)
    print(f"{name}: {executed[1] if executed else '?'} inputs, {covered[-1] if covered else '?'} edges", flush=True)
    if done.returncode:
        print(done.stdout[-2000:] + done.stderr[-6000:], flush=True)
    return done.returncode == 0


def _fuzz(name: str, arguments: list[str]) -> int:
    """Fuzz one target in this process, which ends with it."""
    import atheris  # type: ignore[import-untyped]  # it has no types

    with atheris.instrument_imports(include=_PRODUCT):
        from tests.unit.fuzz.targets import TARGETS
    target = TARGETS[name]
    for number, seed in enumerate(target.seeds()):
        (Path(arguments[0]) / f"seed-{number}").write_bytes(seed)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        random_ = random.Random(seed)
        if random_.random() < 0.3:
            return bytes(atheris.Mutate(data, max_size))
        return target.mutate(data, random_)[:max_size]

    def take(data: bytes) -> None:
        target.check(data)

    atheris.Setup([sys.argv[0], *arguments], take, custom_mutator=mutate)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
