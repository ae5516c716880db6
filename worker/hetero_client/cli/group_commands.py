"""`hetero ps`, `hetero topology` and `hetero down`: show and stop the groups of this machine."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Final

import typer

from hetero_client.cli import options
from hetero_client.cli.console import output, print_data, print_json, print_note
from hetero_client.errors import LaunchError

DOWN_TIMEOUT_S: Final = 15.0
LOOK_S: Final = 0.05


def ps(as_json: options.JsonOption = False) -> None:
    """List the groups that run on this machine.

    \b
    hetero ps
    hetero ps --json | jq -r .inference
    """
    from hetero_client.cli.tables import groups_table
    from hetero_client.home import HeteroHome
    from hetero_client.launcher.run_directory import running_groups

    groups = running_groups(HeteroHome.from_environment())
    if as_json:
        for group in groups:
            print_json(asdict(group))
    elif groups:
        output().print(groups_table(groups))
    else:
        print_note("no local group runs; start one with: hetero up FILE")


def topology(
    admin_address: options.AdminAddressOption = None,
    group: options.GroupOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show a group's state, where every rank is and which part of the model it holds.

    \b
    hetero topology
    hetero topology --json | jq '.ranks[].kv_heads'
    """
    from hetero_client.cli.tables import options_view, placement_view, topology_line

    with options.admin_client(admin_address, group) as admin:
        view = admin.topology()
    if as_json:
        print_json(asdict(view))
        return
    print_data(topology_line(view))
    console = output()
    console.print(placement_view(view, width=console.width))
    if view.model_source:
        console.print(f"weights: {view.model_source}", markup=False)
    if view.exchange_reason:
        console.print(f"exchange {view.exchange}: {view.exchange_reason}", markup=False)
    if view.placement is not None:
        console.print(options_view(view.placement))


def down(
    name: Annotated[str | None, typer.Argument(help="Name of the group; optional when only one runs.")] = None,
) -> None:
    """Stop a local group, like Ctrl-C in its terminal, and wait until it has ended.

    \b
    hetero down
    hetero down smollm2
    """
    from hetero_api.host.file_lock import is_held
    from hetero_client.home import HeteroHome
    from hetero_client.launcher.run_directory import RunDirectory

    group = options.local_group(name)
    lock = RunDirectory.for_group(HeteroHome.from_environment(), group.name).lock.path
    with suppress(ProcessLookupError):
        os.kill(group.pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_TIMEOUT_S
    while is_held(lock):
        if time.monotonic() > deadline:
            raise LaunchError(f"group {group.name!r} (pid {group.pid}) did not stop within {DOWN_TIMEOUT_S:g} s")
        time.sleep(LOOK_S)
    print_note(f"{group.name} is stopped")
