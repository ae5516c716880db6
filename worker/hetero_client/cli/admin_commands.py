"""Admin commands for a running group: `hetero reset-cache`, `sleep`, `wake`, `drain`, `profile`, `place-experts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_client.cli import options
from hetero_client.cli.console import print_data, print_json, print_note

if TYPE_CHECKING:
    from hetero_client.admin import RankProfile

MB = 1_000_000


class Layout(StrEnum):
    """Copy of hetero_client.admin.CacheLayout, which `--help` does not import."""

    PAGED = "paged"
    CONTIGUOUS = "contiguous"


class Tag(StrEnum):
    """Parts of a group that can sleep."""

    WEIGHTS = "weights"
    KV = "kv"


def reset_cache(
    layout: Annotated[Layout, typer.Option(help="Blocks of a fixed size, or one block a request.")] = Layout.PAGED,
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
    from hetero_client.admin import CacheLayout

    with options.admin_client(admin_address, group) as admin:
        cache = admin.reset_cache(layout=CacheLayout(layout), block_size=block_size or 0, num_blocks=num_blocks or 0)
    if as_json:
        print_json(asdict(cache))
        return
    print_data(f"KV cache: {cache.num_blocks} blocks of {cache.block_size} tokens; {_of_ranks(cache.kv_bytes)}")


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
    if as_json:
        print_json({"freed_bytes": freed_bytes})
        return
    print_data(f"asleep; freed: {_of_ranks(freed_bytes)}")


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
    if as_json:
        print_json({"asleep": asleep})
        return
    print_data(f"still asleep: {', '.join(asleep)}" if asleep else "awake")


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
    """Move experts of an idle group to the ranks that compute them fastest, by how often tokens chose them.

    \b
    hetero place-experts
    """
    with options.admin_client(admin_address, group) as admin:
        placed = admin.place_experts()
    if as_json:
        print_json(asdict(placed))
        return
    if not placed.moved_experts:
        print_data(f"no expert moved: over {placed.counted_tokens} counted tokens the gain would be too small")
        return
    print_data(
        f"experts moved: {placed.moved_experts}; over {placed.counted_tokens} counted tokens a decode "
        f"step takes {1e3 * placed.step_s_after:.3f} ms instead of {1e3 * placed.step_s_before:.3f} ms (predicted)"
    )


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
    if as_json:
        print_json({"weight_bytes": weight_bytes})
        return
    print_data(f"weights updated; now held: {_of_ranks(weight_bytes)}")


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
