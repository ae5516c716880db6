"""Becomes another program that gets a signal when its parent dies.

    python -I -S death_signal.py PARENT_PID SIGNAL PROGRAM [ARGUMENT ...]

Who starts ranks or gateways starts them through this file, so that none outlives it even when it is killed with
SIGKILL. Linux keeps PR_SET_PDEATHSIG over execve, and ties it to the parent *thread*. It is a program of its own, and
not a `preexec_fn`, because Python code between fork and exec can deadlock in a process that has threads, as gRPC's
clients do. It uses the standard library only, so that it starts in milliseconds.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def dying_with_parent(program: list[str], *, signal_number: int) -> list[str]:
    """The command line that starts `program` so that it gets the signal when this process, its parent, dies."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(signal_number)), *program]


def main(arguments: list[str]) -> None:
    parent_pid, signal_number, program = int(arguments[0]), int(arguments[1]), arguments[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(1)  # The parent died before the line above.
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
