"""Commands for running groups: `hetero ps`, `topology` and `down`, and those of the gateway's Admin service.

`reset-cache`, `sleep`, `wake`, `drain`, `profile`, `place-experts` and `update-weights` steer a group.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from hetero_client.cli import options
from hetero_client.cli.console import output, print_data, print_json, print_note
from hetero_client.errors import LaunchError
from hetero_client.messages import CacheLayout

if TYPE_CHECKING:
    from hetero_client.admin import RankProfile


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
        console.print(f"weights: {view.model_source}")
    if view.exchange_reason:
        console.print(f"exchange {view.exchange}: {view.exchange_reason}")
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


MB = 1_000_000


class Tag(StrEnum):
    """Parts of a group that can sleep."""

    WEIGHTS = "weights"
    KV = "kv"


def reset_cache(
    layout: Annotated[
        CacheLayout, typer.Option(help="Blocks of a fixed size, or one block a request.")
    ] = CacheLayout.PAGED,
    block_size: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Default: spec.engine.blockSize. Only for paged.")
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Default: as many as memory and the longest sequences allow.")
    ] = None,
    admin_address: options.AdminAddressOption = None,
    group: options.GroupOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Replace the KV cache of an idle group; cached prefixes are lost.

    \b
    hetero reset-cache
    hetero reset-cache --layout contiguous
    hetero reset-cache --block-size 32 --num-blocks 512
    """
    with options.admin_client(admin_address, group) as admin:
        cache = admin.reset_cache(layout=layout, block_size=block_size or 0, num_blocks=num_blocks or 0)
    blocks = f"{cache.num_blocks} blocks of {cache.block_size} tokens"
    _print(asdict(cache), f"KV cache: {blocks}; {_of_ranks(cache.kv_bytes)}", as_json=as_json)


def sleep(
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1 keeps the weights in host memory; 2 drops them, to be read again.")
    ] = 1,
    admin_address: options.AdminAddressOption = None,
    group: options.GroupOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Free memory of an idle group. It refuses requests until it is woken.

    \b
    hetero sleep
    hetero sleep --level 2
    """
    with options.admin_client(admin_address, group) as admin:
        freed_bytes = admin.sleep(level)
    _print({"freed_bytes": freed_bytes}, f"asleep; freed: {_of_ranks(freed_bytes)}", as_json=as_json)


def wake(
    tags: Annotated[
        list[Tag] | None, typer.Argument(metavar="[weights] [kv]", help="Parts to wake. Default: all that sleep.")
    ] = None,
    admin_address: options.AdminAddressOption = None,
    group: options.GroupOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Wake a sleeping group; it serves again once weights and KV cache are back.

    \b
    hetero wake
    hetero wake weights
    """
    with options.admin_client(admin_address, group) as admin:
        asleep = admin.wake_up(tags or ())
    _print({"asleep": asleep}, f"still asleep: {', '.join(asleep)}" if asleep else "awake", as_json=as_json)


def drain(
    timeout_s: options.TimeoutOption = None,
    admin_address: options.AdminAddressOption = None,
    group: options.GroupOption = None,
) -> None:
    """Make a group refuse new requests for good, and wait until those in flight have ended.

    \b
    hetero drain
    hetero drain --timeout 60
    """
    with options.admin_client(admin_address, group) as admin:
        admin.drain(timeout_s=timeout_s)
    print_note("drained: no request is in flight")


def profile(
    seconds: Annotated[float, typer.Option("--seconds", "-s", help="How long to record, at most 60.")] = 5.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", file_okay=False, help="Folder for each rank's trace (for chrome://tracing or Perfetto)."
        ),
    ] = None,
    admin_address: options.AdminAddressOption = None,
    group: options.GroupOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Profile the ranks while requests are served, and show where the time went.

    \b
    hetero profile
    hetero profile --seconds 10 --trace traces/
    """
    if trace is not None:
        _make_folder(trace)
    with options.admin_client(admin_address, group) as admin:
        profiles = admin.profile(seconds, with_trace=trace is not None)
    files = _write_traces(trace, profiles) if trace is not None else [None] * len(profiles)
    if as_json:
        ranks = zip(profiles, files, strict=True)
        print_json({"ranks": [{"table": rank.table, "trace": file} for rank, file in ranks]})
        return
    for rank, (record, file) in enumerate(zip(profiles, files, strict=True)):
        print_data(f"rank {rank}\n{record.table}")
        if file is not None:
            print_note(f"trace of rank {rank}: {file}")


def place_experts(
    admin_address: options.AdminAddressOption = None,
    group: options.GroupOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Move experts to the ranks that compute them fastest, by how often tokens chose them. Requests run on.

    \b
    hetero place-experts
    """
    with options.admin_client(admin_address, group) as admin:
        placed = admin.place_experts()
    text = (
        f"experts moved: {placed.moved_experts}; over {placed.counted_tokens} counted tokens a decode "
        f"step takes {1e3 * placed.step_s_after:.3f} ms instead of {1e3 * placed.step_s_before:.3f} ms (predicted)"
    )
    if not placed.moved_experts:
        text = f"no expert moved: over {placed.counted_tokens} counted tokens the gain would be too small"
    _print(asdict(placed), text, as_json=as_json)


def update_weights(
    admin_address: options.AdminAddressOption = None,
    group: options.GroupOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Have an idle group read the model's files again, after new weights of the same shapes were written there.

    The KV cache stays allocated; what it cached is forgotten.

    \b
    hetero update-weights
    """
    with options.admin_client(admin_address, group) as admin:
        weight_bytes = admin.update_weights()
    text = f"weights updated; now held: {_of_ranks(weight_bytes)}"
    _print({"weight_bytes": weight_bytes}, text, as_json=as_json)


def load_adapter(
    name: Annotated[str, typer.Argument(help="Name that requests ask for.")],
    directory: Annotated[str, typer.Argument(help="The adapter's directory on every rank.")],
    admin_address: options.AdminAddressOption = None,
    group: options.GroupOption = None,
) -> None:
    """Load a LoRA adapter that PEFT saved, while requests run.

    \b
    hetero load-adapter sql /adapters/sql
    """
    with options.admin_client(admin_address, group) as admin:
        admin.load_adapter(name, directory)
    print_data(f"adapter {name} loaded from {directory}")


def unload_adapter(
    name: Annotated[str, typer.Argument(help="The adapter's name.")],
    admin_address: options.AdminAddressOption = None,
    group: options.GroupOption = None,
) -> None:
    """Forget a LoRA adapter that no request uses.

    \b
    hetero unload-adapter sql
    """
    with options.admin_client(admin_address, group) as admin:
        admin.unload_adapter(name)
    print_data(f"adapter {name} unloaded")


def adapters(
    admin_address: options.AdminAddressOption = None,
    group: options.GroupOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """List the LoRA adapters that are loaded.

    \b
    hetero adapters
    """
    with options.admin_client(admin_address, group) as admin:
        loaded = admin.adapters()
    text = "\n".join(f"{name} {directory}" for name, directory in loaded.items()) or "no adapters are loaded"
    _print(loaded, text, as_json=as_json)


def _print(data: Any, text: str, *, as_json: bool) -> None:
    """Print a result: the data as JSON, or the text."""
    if as_json:
        print_json(data)
    else:
        print_data(text)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"--trace {folder}: {error.strerror}") from error


def _write_traces(folder: Path, profiles: Sequence[RankProfile]) -> list[str | None]:
    """Write the traces; return the file of each rank, None where it has no trace."""
    files: list[str | None] = []
    for rank, record in enumerate(profiles):
        path = folder / f"rank-{rank}.trace.json.gz"
        if record.trace:
            path.write_bytes(record.trace)
        files.append(str(path) if record.trace else None)
    return files


def _of_ranks(num_bytes: Sequence[int]) -> str:
    return ", ".join(f"rank {rank} {count / MB:.1f} MB" for rank, count in enumerate(num_bytes))
