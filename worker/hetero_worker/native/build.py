"""Compiles the native library into this folder.

    python -m hetero_worker.native.build

The package's build hook loads this file by its path, before anything is installed: it needs the standard library
only. No compiler is no error there: the package works without the library, and `library.load` says how to get it.

Nothing here is for this machine's processor alone: what is built runs on every machine of the architecture, and the
loops that profit from wider vectors are chosen when the library is loaded.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
SOURCE: Final = FOLDER / "exchange.c"
HEADER: Final = FOLDER / "exchange.h"
LIBRARY: Final = FOLDER / "libhetero_exchange.so"
COMPILERS: Final = ("cc", "gcc", "clang")
FLAGS: Final = ("-std=c11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra")
"""Sums must round after each addition, and stay in order: never -ffast-math."""
_TIMEOUT_S: Final = 120.0


class BuildError(Exception):
    """The library cannot be built; the text says why."""


def source_digest(sources: Sequence[Path] = (HEADER, SOURCE)) -> str:
    """What a library says that it was built from: 16 hex digits."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str]:
    """The compiler's command: $CC if it is set, else the first of COMPILERS. Raises BuildError."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [[name] for name in COMPILERS]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    raise BuildError(f"CC={shlex.join(chosen)} is no program" if chosen else f"there is none of {', '.join(COMPILERS)}")


def build(target: Path = LIBRARY, *, source: Path = SOURCE, flags: Sequence[str] = ()) -> Path:
    """Compile; the target is replaced at once, so a process that has the old one loaded keeps it. Raises BuildError."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        made = Path(folder) / target.name
        defined = f'-DHX_SOURCE="{source_digest((HEADER, source))}"'
        command = [*compiler, *FLAGS, *flags, defined, f"-I{FOLDER}", "-shared", "-o", str(made), str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{shlex.join(command)}: {error}") from error
        if done.returncode:
            raise BuildError(f"{shlex.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
        os.replace(made, target)
    return target


def main() -> int:
    try:
        print(f"built {build()}")
    except BuildError as error:
        print(f"the native exchange was not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
