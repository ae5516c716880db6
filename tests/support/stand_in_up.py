"""`hetero up` (or, with a prompt, `hetero run`) with stand-in programs for gateway and ranks.

STAND_IN_GPUS=N makes it a machine with N devices, STAND_IN_DP=N starts the group beside N others of the manifest.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hetero_api.errors import HeteroError
from hetero_api.host.gpus import Gpu
from hetero_api.host.topology import LogicalCore
from hetero_api.manifest import load_manifest
from hetero_client import ChatMessage, SamplingParams
from hetero_client.cli.main import report
from hetero_client.cli.serving import answer_once, serve_until_stopped
from hetero_client.home import HeteroHome
from hetero_client.launcher.commands import Programs
from hetero_client.launcher.local_group import LocalGroupConfig
from hetero_client.launcher.local_plan import plan_locally

PROGRAMS = Programs(
    gateway=(sys.executable, "-m", "tests.support.stand_in_gateway"),
    rank=(sys.executable, "-m", "tests.support.stand_in_rank"),
    forkserver=(sys.executable, "-m", "tests.support.stand_in_rank", "forkserver"),
)


def stand_in_config(manifest: Path, *, port: int, with_forkserver: bool) -> LocalGroupConfig:
    """What `hetero up` would make of the manifest on a machine of two cores (with GPUs: of eight)."""
    resource = load_manifest(manifest)
    num_gpus, dp_local_rank = int(os.environ.get("STAND_IN_GPUS", "0")), int(os.environ.get("STAND_IN_DP", "0"))
    plan = plan_locally(
        resource,
        cores=[LogicalCore(number, 0, number) for number in range(8 if num_gpus else 2)],
        memory_bytes=8 * 2**30,
        gpus=[Gpu(number) for number in range(num_gpus)],
        dp_local_rank=dp_local_rank,
    )
    return LocalGroupConfig(
        resource=resource,
        manifest=manifest,
        model_dir=manifest.parent,
        plan=plan,
        port=port,
        http_port=0,
        programs=PROGRAMS,
        environment=dict(os.environ),
        with_forkserver=with_forkserver,
        dp_local_rank=dp_local_rank,
    )


def main(manifest: Path, *, port: int, with_forkserver: bool, prompt: str | None) -> int:
    home = HeteroHome.from_environment()
    try:
        config = stand_in_config(manifest, port=port, with_forkserver=with_forkserver)
        if prompt is None:
            serve_until_stopped(config, home=home)
        else:
            chat = [ChatMessage("user", prompt)]
            answer_once(config, chat, sampling=SamplingParams(), home=home, as_json=False)
    except HeteroError as error:
        return report(error)
    return 0


if __name__ == "__main__":
    path, port, forkserver, *prompt = sys.argv[1:]
    sys.exit(main(Path(path), port=int(port), with_forkserver=forkserver == "yes", prompt=next(iter(prompt), None)))
