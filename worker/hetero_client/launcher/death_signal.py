"""Becomes another program that gets SIGTERM when its parent dies.

    python -I -S death_signal.py PARENT_PID PROGRAM [ARGUMENT ...]

The launcher starts every child through this file, so that none outlives it even when it is killed with
SIGKILL. Linux keeps PR_SET_PDEATHSIG over execve. It is a program of its own, and not a `preexec_fn`, because
Python code between fork and exec can deadlock in a process that has threads, as gRPC's clients do.
It uses the standard library only, so that it starts in milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent_pid, program = int(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(1)  # The parent died before the line above.
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
