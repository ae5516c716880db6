"""The command lines of a local group's ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_api.host.topology import NumaPolicy
from hetero_client.home import HeteroHome
from hetero_client.launcher.commands import GatewayPorts, GroupCommands, Programs
from hetero_client.launcher.local_plan import RankProcess
from hetero_client.launcher.run_directory import RunDirectory

pytestmark = pytest.mark.unit

RANK = RankProcess(
    name="cpu-0", pool="cpu", ordinal=0, local_rank=0, device="cpu", cores=(0, 1), num_threads=2,
    numa_policy=NumaPolicy.BEST_EFFORT, memory_bytes=1 << 30,
)  # fmt: skip


@pytest.mark.parametrize("folder", [Path("/kept"), None])
def test_ranks_are_told_where_packed_weights_are_kept(tmp_path: Path, folder: Path | None) -> None:
    run = RunDirectory.for_group(HeteroHome(tmp_path), "g")
    commands = GroupCommands(Programs(rank=("rank",)), tmp_path, run, packed_weights=folder)
    options = commands.rank(RANK, "127.0.0.1:1").forked_argv or ()
    told = dict(zip(options[::2], options[1::2], strict=True))
    assert told.get("--packed-weights-dir") == (None if folder is None else "/kept")


def test_a_router_has_a_door_where_one_is_asked_for_and_the_next_gateway_has_it_too(tmp_path: Path) -> None:
    commands = GroupCommands(Programs(), tmp_path, RunDirectory(tmp_path))
    addresses = {
        name: f"127.0.0.1:{port}" for port, name in enumerate(("inference", "http", "admin", "ranks"), start=1)
    }
    assert "--router-port" not in commands.gateway(GatewayPorts.from_addresses({**addresses, "router": ""})).argv
    argv = commands.gateway(GatewayPorts.from_addresses({**addresses, "router": "127.0.0.1:9"})).argv
    assert argv[argv.index("--router-port") + 1] == "9"


def test_only_the_first_gateway_writes_where_it_listens(tmp_path: Path) -> None:
    commands = GroupCommands(Programs(), tmp_path, RunDirectory(tmp_path))
    first, later = (commands.gateway(GatewayPorts(1, 2), is_first=is_first).argv for is_first in (True, False))
    assert "--state-file" in first
    assert "--state-file" not in later  # a full disk would end it


def test_gateway_and_ranks_are_told_where_the_draft_model_is(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    commands = GroupCommands(Programs(), tmp_path, run, draft_dir=tmp_path / "small")
    for argv in (commands.gateway(GatewayPorts(0, 0)).argv, commands.rank(RANK, "127.0.0.1:1").argv):
        assert argv[argv.index("--draft") + 1] == str(tmp_path / "small")
    without = GroupCommands(Programs(), tmp_path, run)
    assert "--draft" not in without.rank(RANK, "127.0.0.1:1").argv


def test_the_gateway_is_told_where_adapters_are_in_their_order(tmp_path: Path) -> None:
    folders = (tmp_path / "b", tmp_path / "a")
    commands = GroupCommands(Programs(), tmp_path, RunDirectory(tmp_path), adapter_dirs=folders)
    argv = commands.gateway(GatewayPorts(0, 0)).argv
    assert argv[-4:] == ("--adapter", str(folders[0]), "--adapter", str(folders[1]))
    assert "--adapter" not in commands.rank(RANK, "127.0.0.1:1").argv
