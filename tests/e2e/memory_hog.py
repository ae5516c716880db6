"""Runs in a rank's container: takes memory until the kernel has killed the rank for want of it.

The kernel takes the process with the highest score. The rank's is raised, so that it is the rank and not the hog, as if
the rank had grown.
"""

import os
import sys

CHUNK = 32 << 20
MOST = 64 << 30


FORKED = "-m hetero_worker.process.forkserver"


def read(pid: str, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}") as file:
            return file.read().replace("\0", " ")
    except OSError:  # it has ended
        return ""


def resident_pages(pid: str) -> int:
    return int((read(pid, "statm") or "0 0").split()[1])


def is_forked(pid: str) -> bool:
    return FORKED in read(pid, "cmdline")


# A rank is forked from the forkserver and goes by its name; it is the one that holds a model.
rank = max(filter(is_forked, filter(str.isdigit, os.listdir("/proc"))), key=resident_pages, default="")
if not rank:
    sys.exit("no rank runs here")
with open(f"/proc/{rank}/oom_score_adj", "w") as score:
    score.write("1000")
held: list[bytearray] = []
while is_forked(rank) and len(held) * CHUNK < MOST:
    held.append(bytearray(b"x") * CHUNK)
