"""Compiles the native libraries: the exchange beside its source, and the kernels for host cores into this folder.

    python -m hetero_worker.native.build

The package's build hook loads this file by its path, before anything is installed: it needs the standard library
only. No compiler is no error there: the package works without the libraries, and whoever misses one says how to get it.

Nothing here is for this machine's processor alone: what is built runs on every machine of the architecture. Of the
exchange, the loops that profit from wider vectors are chosen when it is loaded; the kernels are compiled once for each
instruction set, and the library chooses among them.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = Path(__file__).parent
EXCHANGE_FOLDER: Final = FOLDER.parent / "distributed"
EXCHANGE_SOURCE: Final = EXCHANGE_FOLDER / "native_exchange.c"
EXCHANGE_HEADER: Final = EXCHANGE_FOLDER / "native_exchange.h"
TCP_SOURCE: Final = EXCHANGE_FOLDER / "native_tcp.c"
EXCHANGE_LIBRARY: Final = EXCHANGE_FOLDER / "libhetero_exchange.so"
COMPUTE_FOLDER: Final = FOLDER / "compute"
COMPUTE_HEADER: Final = COMPUTE_FOLDER / "compute.h"
COMPUTE_LIBRARY: Final = FOLDER / "libhetero_compute.so"
COMPILERS: Final = ("cc", "gcc", "clang")
FLAGS: Final = ("-std=c11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra")
"""Sums must round after each addition, and stay in order: never -ffast-math."""
_KERNEL_FLAGS: Final = ("-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi")
"""Products may be rounded with the sum that they go into; the order of sums is as written."""
_AVX2: Final = ("-mavx2", "-mfma", "-mf16c", "-mprfchw")
_AVX512: Final = (
    *_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512",
)  # fmt: skip
_AVX512_BF16: Final = (*_AVX512, "-mavx512bf16")
_GENERIC: Final = {"generic": ()}
_ARM_INSTRUCTION_SETS: Final = {**_GENERIC, "dotprod": ("-march=armv8.2-a+dotprod",)}
_X86_INSTRUCTION_SETS: Final = {**_GENERIC, "avx2": _AVX2, "avx512": _AVX512, "avx512_bf16": _AVX512_BF16}
_X86_TILES: Final = {
    "amx": (*_AVX512_BF16, "-DHC_BASE=avx512_bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "amx_emulated": (*_AVX2, "-DHC_BASE=avx2", "-DHC_AMX_EMULATED"),
}
"""Sets whose other kernels are those of HC_BASE."""
_ONCE: Final = ("attend_scratch.c", "barrier.c", "library.c", "pack.c", "supports.c", "team.c")
"""Files of the compute library that are compiled without an instruction set's flags; the others are its kernels."""
_TILES_ONLY: Final = ("attend_tiles.c", "linear_int_tiles.c", "linear_tiles.c")
_TILES: Final = (
    *_TILES_ONLY, "attend.c", "attend_span.c", "experts.c", "gated.c", "latent.c", "linear.c", "table.c",
)  # fmt: skip
"""Kernels that multiply with tiles, or call one that does."""
_ROUNDED: Final = ("choose.c", "route.c")
"""Kernels whose products are rounded before they are added: all machines and devices get the same numbers."""
_TIMEOUT_S: Final = 300.0


class BuildError(Exception):
    """Build failure, with its reason."""


class _Unit(NamedTuple):
    """Source file, object name and flags of one call of the compiler."""

    source: Path
    name: str
    flags: tuple[str, ...]


def source_digest(sources: Sequence[Path]) -> str:
    """Return the digest, 16 hex digits, by which a library knows its sources."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def exchange_sources(source: Path = EXCHANGE_SOURCE) -> tuple[Path, ...]:
    """Return all files that the exchange is made from, of which `source` is its main one; this one has the flags."""
    return Path(__file__), EXCHANGE_HEADER, EXCHANGE_FOLDER / "native_waits.h", source, TCP_SOURCE


def compute_sources(folder: Path = COMPUTE_FOLDER) -> list[Path]:
    """Return all files that the compute library is made from; this one has the flags."""
    return [Path(__file__), *sorted([*folder.glob("*.h"), *folder.glob("*.c")])]


def find_compiler() -> list[str]:
    """Return the compiler's command: $CC if it is set, else the first of COMPILERS. Raises BuildError."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [[name] for name in COMPILERS]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    raise BuildError(f"CC={shlex.join(chosen)} is no program" if chosen else f"there is none of {', '.join(COMPILERS)}")


def build_exchange(
    target: Path = EXCHANGE_LIBRARY, *, source: Path = EXCHANGE_SOURCE, flags: Sequence[str] = ()
) -> Path:
    """Compile the exchange and return the library. A process that has loaded an old one keeps it. Raises BuildError."""
    compiler = find_compiler()
    with _replacing(target) as made:
        defined = f'-DHX_SOURCE="{source_digest(exchange_sources(source))}"'
        sources = str(source), str(TCP_SOURCE)
        _run([*compiler, *FLAGS, *flags, defined, f"-I{EXCHANGE_FOLDER}", "-shared", "-o", str(made), *sources])
    return target


def build_compute(target: Path = COMPUTE_LIBRARY, *, folder: Path = COMPUTE_FOLDER, flags: Sequence[str] = ()) -> Path:
    """Compile the compute library, as `build_exchange`."""
    compiler = find_compiler()
    base = (*FLAGS, *flags, f'-DHC_SOURCE="{source_digest(compute_sources(folder))}"', f"-I{folder}")
    with _replacing(target) as made:
        units = _compute_units(folder, compiler)
        objects = [made.parent / f"{unit.name}.o" for unit in units]

        def compile_unit(unit: _Unit, made: Path) -> None:
            _run([*compiler, *base, *unit.flags, "-c", "-o", str(made), str(unit.source)])

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(compile_unit, units, objects))
        _run([*compiler, *flags, "-shared", "-pthread", "-o", str(made), *map(str, objects), "-lm"])
    return target


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield a path in an empty folder; the file that is then there takes the target's place. Raises BuildError."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
            yield (made := Path(folder) / target.name)
            os.replace(made, target)
    except OSError as error:
        raise BuildError(f"{target.parent} takes no new file: {error}") from error


def _compute_units(folder: Path, compiler: Sequence[str]) -> list[_Unit]:
    sources = [source for source in sorted(folder.glob("*.c")) if source.name not in _ONCE]
    kernels = [source for source in sources if source.name not in _TILES_ONLY]
    tiles = [source for source in sources if source.name in _TILES]
    machine = _run([*compiler, "-dumpmachine"]).partition("-")[0]
    isas = {"x86_64": _X86_INSTRUCTION_SETS, "aarch64": _ARM_INSTRUCTION_SETS}.get(machine, _GENERIC)
    compiled = [(kernels, isas), (tiles, _X86_TILES if machine == "x86_64" else {})]
    unknown = {isa for _, sets in compiled for isa, flags in sets.items() if not _knows(compiler, flags)}
    if unknown:
        print(f"there are no kernels for {', '.join(sorted(unknown))}: {compiler[0]} is too old", file=sys.stderr)
    return [
        *(_Unit(folder / name, Path(name).stem, ()) for name in _ONCE),
        *(
            _Unit(source, f"{source.stem}-{isa}", (*_kernel_flags(source), *flags, f"-DHC_ISA={isa}"))
            for sources, sets in compiled
            for isa, flags in sets.items()
            if isa not in unknown
            for source in sources
        ),
    ]


def _knows(compiler: Sequence[str], flags: tuple[str, ...]) -> bool:
    try:
        _run([*compiler, *flags, "-fsyntax-only", "-xc", os.devnull])
    except BuildError:
        return False
    return True


def _kernel_flags(source: Path) -> tuple[str, ...]:
    return (*_KERNEL_FLAGS, "-ffp-contract=off") if source.name in _ROUNDED else _KERNEL_FLAGS


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{shlex.join(command)}: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def main() -> int:
    """Build both libraries and return the exit status."""
    try:
        print(f"built {build_exchange()}")
        print(f"built {build_compute()}")
    except BuildError as error:
        print(f"the native libraries were not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
