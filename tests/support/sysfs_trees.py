"""Folders that look like /sys/devices/system of several machines.

`tests/data/sysfs` has one listing a machine. `vm_2_cpus` was recorded, with `record`, on a virtual machine of two CPUs.
The others are written after the kernel's documents of these files (cputopology.rst, sysfs-devices-node,
sysfs-devices-system-cpu) for machines of their kind, as smaller siblings of what is sold; nobody's machine was recorded
for them.

A listing has a line a file: `path = content`. In a path `{0-3,8}` and `{a,b}` stand for each of theirs, so that a line
is good for all files of one content; in a content `\\n` is a new line, and another ends it. `#` begins a comment.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

_DATA: Final = Path(__file__).parent.parent / "data" / "sysfs"
_BRACES: Final = re.compile(r"\{([^}]*)\}")
_RECORDED: Final = (
    "cpu/online",
    "cpu/offline",
    "cpu/possible",
    "cpu/present",
    "cpu/smt/active",
    "cpu/cpu[0-9]*/online",
    "cpu/cpu[0-9]*/topology/*_list",
    "cpu/cpu[0-9]*/topology/*_id",
    "cpu/cpu[0-9]*/cache/index3/shared_cpu_list",
    "node/online",
    "node/possible",
    "node/has_*",
    "node/node[0-9]*/cpulist",
    "node/node[0-9]*/distance",
    "node/node[0-9]*/meminfo",
)

MACHINES: Final = tuple(sorted(path.stem for path in _DATA.glob("*.txt")))
"""Names of all listings."""


def write_tree(machine: str, root: Path, *, hidden: Iterable[str] = ()) -> Path:
    """Lay a machine's files down under `root`, but for those that a pattern of `hidden` matches; gives `root`."""
    patterns = tuple(hidden)
    for path, content in _files((_DATA / f"{machine}.txt").read_text()):
        if not any(fnmatch(path, pattern) for pattern in patterns):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content)
    return root


def record(root: Path) -> str:
    """The listing of a real tree, a line a file: all that is known to tell of CPUs, nodes and their memory."""
    paths = sorted({path for pattern in _RECORDED for path in root.glob(pattern)})
    return "".join(f"{path.relative_to(root)} = {_one_line(path.read_text())}".rstrip() + "\n" for path in paths)


def _one_line(content: str) -> str:
    return content.removesuffix("\n").replace("\n", "\\n")


def _files(listing: str) -> Iterator[tuple[str, str]]:
    for line in listing.splitlines():
        if line and not line.startswith("#"):
            pattern, _, content = line.partition(" =")
            for path in _expand(pattern):
                yield path, content.removeprefix(" ").replace("\\n", "\n") + "\n"


def _expand(pattern: str) -> Iterator[str]:
    parts = _BRACES.split(pattern)  # plain, alternatives, plain, …
    choices = [_alternatives(part) if index % 2 else [part] for index, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def _alternatives(text: str) -> list[str]:
    names: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        names += map(str, range(int(first), int(last) + 1)) if dash and first.isdecimal() else [part]
    return names
