"""Program that outlives a killed supervisor just long enough to see that its children end.

    python -I -S warden.py GRACE_S    with pids, one a line, on standard input

SIGTERM at the supervisor's death (`hetero_api.host.death_signal`) asks children to end; one that hangs would stay. When
the supervisor dies or ends, it closes this program's standard input. After the grace time the process groups of all
pids that it wrote get SIGKILL, unless they ended before. Processes are held by pidfd, so a pid that was reused is never
hit. Standard library only.
"""

import os
import select
import signal
import sys
import time


def main(arguments: list[str]) -> None:
    """Read pids until the supervisor is gone, then kill what is left of them after `arguments[0]` seconds."""
    grace_s = float(arguments[0])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    processes: dict[int, int] = {}
    for line in sys.stdin:
        pid = int(line)
        try:
            processes[os.pidfd_open(pid)] = pid
        except ProcessLookupError:
            continue
    for pid in survivors(processes, grace_s):
        os.killpg(pid, signal.SIGKILL)


def survivors(processes: dict[int, int], grace_s: float) -> list[int]:
    """Return the pids still alive after the grace time, or at once when there are none.

    `processes` maps pidfds to pids.
    """
    poller = select.poll()
    for pidfd in processes:
        poller.register(pidfd, select.POLLIN)
    alive = dict(processes)
    deadline = time.monotonic() + grace_s
    while alive and (left_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poller.poll(left_s * 1000):
            poller.unregister(pidfd)
            del alive[pidfd]
    return list(alive.values())


if __name__ == "__main__":
    main(sys.argv[1:])
