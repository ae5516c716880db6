"""Runs in a rank's container: takes memory until the kernel has killed the rank for want of it.

The kernel takes the process with the highest score. The rank's is raised, so that it is the rank and not the hog, as if
the rank had grown.
"""

import os
import sys

CHUNK = 32 << 20
MOST = 64 << 30


def command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().replace("\0", " ")
    except OSError:  # it has ended
        return ""


def is_rank(pid: str) -> bool:
    return "-m hetero_worker " in command(pid)


ranks = [pid for pid in os.listdir("/proc") if pid.isdigit() and is_rank(pid)]
if not ranks:
    sys.exit("no rank runs here")
with open(f"/proc/{ranks[0]}/oom_score_adj", "w") as score:
    score.write("1000")
held: list[bytearray] = []
while is_rank(ranks[0]) and len(held) * CHUNK < MOST:
    held.append(bytearray(b"x") * CHUNK)
