"""A CPU rank's runner, loaded and working off steps, in a process that tells what of a GPU's driver it touched.

    python -m tests.support.quiet_step MODEL

Prints a line for each device file of the driver that is open or mapped, and one if torch.cuda was initialised: nothing
at all is right. (A library that is merely mapped makes no context: a build of torch may come with it.) Needs no
pydantic, as hetero_worker's command line does.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch

from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.distributed.exchange import LocalExchange
from tests.support.mixed_runners import work_off
from tests.support.random_model import INTERMEDIATE_SIZE, NUM_KV_HEADS, VOCAB_SIZE
from tests.support.rank_shares import Shares

_DEVICE_FILE = re.compile(r"/dev/nvidia\S*")
WHOLE = Shares(kv_heads=((NUM_KV_HEADS,),), mlp_columns=((INTERMEDIATE_SIZE,),), vocab_rows=(VOCAB_SIZE,))


def device_files() -> set[str]:
    """Of this process."""
    opened = (os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path))
    return set(_DEVICE_FILE.findall("\n".join([Path("/proc/self/maps").read_text(encoding="utf-8"), *opened])))


def main(model: Path) -> None:
    platform = cpu_backend(memory_bytes=2 << 30)
    platform.open()
    platform.measure()
    work_off(platform, model, WHOLE, 0, LocalExchange())
    for file in sorted(device_files()):
        print(f"has {file}")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        print("torch.cuda was initialised")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
