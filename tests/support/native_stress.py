"""Builds the native exchange, or a mutant of it, with its stress driver, and runs that."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from hetero_worker.native.build import EXCHANGE_FOLDER, EXCHANGE_SOURCE, TCP_SOURCE, find_compiler

DRIVER = Path(__file__).parent / "native" / "exchange_stress.c"
THREAD_SANITIZER = ("-O1", "-g", "-DHX_ONE_VERSION", "-fsanitize=thread")
ADDRESS_SANITIZER = ("-O1", "-g", "-DHX_ONE_VERSION", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_PROBE = "int main(void) { return 0; }\n"


def build_stress(folder: Path, *flags: str, source: Path = EXCHANGE_SOURCE) -> Path:
    """The driver with `source` for the exchange through shared memory. Warnings are errors."""
    program = folder / "exchange_stress"
    _compile([*flags, str(source), str(DRIVER)], program)
    return program


def build_tcp_stress(folder: Path, *flags: str, source: Path = TCP_SOURCE) -> Path:
    """The driver with `source` for the exchange over TCP."""
    program = folder / "tcp_stress"
    _compile([*flags, "-DOVER_TCP", str(EXCHANGE_SOURCE), str(source), str(DRIVER)], program)
    return program


def run_stress(
    program: Path, *, ranks: int, rounds: int, seed: int = 1, under: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """`under` is a program that runs others."""
    command = [*under, str(program), str(ranks), str(rounds), str(seed)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


def mutant(folder: Path, was: str, becomes: str, *, source: Path = EXCHANGE_SOURCE) -> Path:
    """Return the C source with one change. Raises AssertionError unless the text stands there exactly once."""
    text = source.read_text()
    assert text.count(was) == 1, f"{was!r} stands {text.count(was)} times in {source.name}"
    changed = folder / source.name
    changed.write_text(text.replace(was, becomes))
    return changed


def lacks(folder: Path, flags: Sequence[str]) -> str:
    """Why this machine's compiler cannot build and run programs with these flags; empty if it can."""
    source, program = folder / "probe.c", folder / "probe"
    source.write_text(_PROBE)
    try:
        _compile([*flags, str(source)], program)
    except AssertionError as error:
        return str(error)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    return f"exit status {done.returncode}: {done.stderr.strip()[-500:]}" if done.returncode else ""


def _compile(arguments: Sequence[str], program: Path) -> None:
    warnings = ("-Wall", "-Wextra", "-Wconversion", "-Werror")
    command = [
        *find_compiler(),
        "-std=c11",
        *warnings,
        f"-I{EXCHANGE_FOLDER}",
        *arguments,
        "-o",
        str(program),
        "-lpthread",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
