"""The process that outlives pytest by a moment and leaves nothing running.

Everyone who uses a control plane holds a shared lock on the file `users` in its folder; the kernel drops the lock when
a process ends, however it ends. The keeper waits for the exclusive lock: once it has it, nobody is left, and it kills
the control plane's processes. So a control plane can be shared by several test processes, none of which has to be the
last one, and a killed pytest leaves no servers behind. (A parent-death signal would fire when the *thread* that started
a server ends, and knows only one parent.)

Run as a script, with nothing but the standard library: `python keeper.py FOLDER`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
from pathlib import Path

USERS = "users"
RECORD = "cluster.json"
"""Says how to reach the control plane, as long as it runs."""
STATE = "etcd"
"""Where etcd's data lie, or a link to where they lie."""


def main(folder: Path) -> None:
    with (folder / USERS).open("a") as users:
        fcntl.flock(users, fcntl.LOCK_EX)
        (folder / RECORD).unlink(missing_ok=True)  # who joins now must see that it is over
        for record in folder.glob("*.pid"):
            _kill(int(record.read_text()), folder)
            record.unlink(missing_ok=True)
        state = folder / STATE
        shutil.rmtree(state.resolve(), ignore_errors=True)
        if state.is_symlink():
            state.unlink()


def _kill(pid: int, folder: Path) -> None:
    """Kill the process, unless its number has passed on to one that has nothing to do with this folder."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
