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
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ADOPTION_S = 10.0


def dying_with_parent(program: list[str], *, signal_number: int) -> list[str]:
    """Return the command line that starts `program` so that it gets the signal when this process, its parent, dies."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(signal_number)), *program]


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, and have to wait for their end. Raises OSError."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_adopter(adopter_pid: int, *, signal_number: int) -> None:
    """For a process whose parent has just ended: get the signal when the adopter dies. Ends if it is dead already."""
    deadline = time.monotonic() + ADOPTION_S
    while os.getppid() != adopter_pid:
        if time.monotonic() > deadline:
            sys.exit(1)
        time.sleep(0.001)
    _die_with(adopter_pid, signal_number)


def main(arguments: list[str]) -> None:
    """Arrange the signal, then become the program of the remaining arguments."""
    parent_pid, signal_number, program = int(arguments[0]), int(arguments[1]), arguments[2:]
    _die_with(parent_pid, signal_number)
    os.execvp(program[0], program)


def _die_with(parent_pid: int, signal_number: int) -> None:
    _prctl(PR_SET_PDEATHSIG, int(signal_number))
    if os.getppid() != parent_pid:
        sys.exit(1)  # The parent died before the line above.


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    main(sys.argv[1:])
