"""The first five minutes in seconds: from `git clone`, and from `pip install` of a wheel, to the first token.

    python -m bench.first_token clone [--keep-pip-cache]
    python -m bench.first_token wheel [--wheel FILE] [--keep-pip-cache]

*clone*: a clone of this checkout's last commit, then `make demo` in it. *wheel*: the wheel of this checkout (or FILE),
a fresh virtual environment, `pip install 'WHEEL[local]'`, then `hetero run`. Both fetch the demo model into a home
folder of their own, and pip uses no cache unless it is asked to. Prints seconds from the first command to the line
"ready", and to the first piece of the answer. The speed of the network is in these figures.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from bench import machine

ROOT: Final = Path(__file__).resolve().parent.parent
READY: Final = b"ready: 127.0.0.1"
QUESTION: Final = "In three sentences, explain why the sky is blue."


def steps_of(what: str, folder: Path, wheel: Path | None) -> list[list[str]]:
    """The commands of a way to the first token; the last one answers."""
    if what == "clone":
        repo = str(folder / "repo")
        return [["git", "clone", "--quiet", str(ROOT), repo], ["make", "-C", repo, "demo"]]
    python = folder / "venv/bin/python"
    assert wheel is not None
    return [
        [sys.executable, "-m", "venv", str(folder / "venv")],
        [str(python), "-m", "pip", "install", "--quiet", f"{wheel}[local]"],
        [str(folder / "venv/bin/hetero"), "run", "smollm2-135m-instruct", QUESTION, "--temperature", "0"],
    ]


def made_wheel(folder: Path) -> Path:
    """A wheel of this checkout with its native libraries; making it does not count."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(folder / "dist"), str(ROOT)], check=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def follow(command: list[str], environment: dict[str, str], began_s: float) -> tuple[float, float] | None:
    """Run a command; seconds since `began_s` until it is ready and until its first token, None if it never is."""
    ready_s = first_s = 0.0
    seen = b""
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        while piece := os.read(process.stdout.fileno(), 65_536):
            seen += piece
            if not ready_s and READY in seen:
                ready_s = time.monotonic() - began_s
            if ready_s and not first_s and seen.partition(READY)[2].partition(b"\n")[2].strip():
                first_s = time.monotonic() - began_s
    if process.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{seen[-2000:].decode(errors='replace')}")
    return (ready_s, first_s) if first_s else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("clone", "wheel"))
    parser.add_argument("--wheel", type=Path, help="with its native libraries; default: one is made")
    parser.add_argument("--keep-pip-cache", action="store_true", help="let pip use what it fetched before")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetero-first-token-") as name:
        folder = Path(name)
        wheel = (arguments.wheel or made_wheel(folder)) if arguments.what == "wheel" else None
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HETERO_"))}
        environment = kept | {"HETERO_HOME": str(folder / "home"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        environment |= {} if arguments.keep_pip_cache else {"PIP_NO_CACHE_DIR": "1"}
        began_s, found = time.monotonic(), None
        for command in steps_of(arguments.what, folder, wheel):
            found = follow(command, environment, began_s)
        if found is None:
            raise RuntimeError("no token came")
        about = machine.describe()
        print(f"{arguments.what}: ready after {found[0]:.1f} s, first token after {found[1]:.1f} s")
        print(f"{about['machine']['cpu']}, {about['machine']['cores']} threads, {about['date']}, {about['revision']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
