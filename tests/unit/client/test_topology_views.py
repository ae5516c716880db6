"""From GetTopology to what a person sees."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from hetero_api.group_state import GroupState
from hetero_api.sharding import UnitRange
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_client.admin import GroupTopology, topology_from
from hetero_client.cli.console import output, table_of
from hetero_client.cli.tables import StartDisplay, duration, placement_cells, placement_view, rank_phase, topology_line

pytestmark = pytest.mark.unit


def shard(kv: tuple[int, int], mlp: tuple[int, int], *, layers: int = 2) -> ranks_pb2.RankShard:
    layer = ranks_pb2.LayerShard(
        kv_heads=ranks_pb2.UnitRange(begin=kv[0], end=kv[1]), mlp_columns=ranks_pb2.UnitRange(begin=mlp[0], end=mlp[1])
    )
    rows = ranks_pb2.UnitRange(begin=0, end=100)
    return ranks_pb2.RankShard(layers=[layer] * layers, embedding_rows=rows, head_rows=rows)


def topology(
    state: admin_pb2.GroupState.ValueType, *, joined: bool = True, weight_bytes: int = 0, kv_bytes: int = 0
) -> GroupTopology:
    device = ranks_pb2.DeviceReport(kind=ranks_pb2.DEVICE_KIND_CPU, name="EPYC", cpus=[0, 1], pinned=True)
    rank = admin_pb2.RankStatus(
        place=ranks_pb2.RankPlace(rank=0, pool="cpu", pod_name="cpu-0", device=device),
        joined=joined, shard=shard((0, 2), (0, 1024)), weight_bytes=weight_bytes, kv_bytes=kv_bytes, load_s=1.0,
        kernels=["linear=onednn"],
    )  # fmt: skip
    return topology_from(admin_pb2.GetTopologyResponse(name="g", state=state, ranks=[rank]))


@pytest.mark.parametrize(
    ("view", "phase"),
    [
        (topology(admin_pb2.GROUP_STATE_NEW, joined=False), "joining"),
        (topology(admin_pb2.GROUP_STATE_NEW), "joined"),
        (topology(admin_pb2.GROUP_STATE_FORMING), "forming the group"),
        (topology(admin_pb2.GROUP_STATE_LOADING), "loading weights"),
        (topology(admin_pb2.GROUP_STATE_LOADING, weight_bytes=5), "allocating KV cache"),
        (topology(admin_pb2.GROUP_STATE_LOADING, weight_bytes=5, kv_bytes=5), "warming up"),
        (topology(admin_pb2.GROUP_STATE_READY), "ready"),
        (topology(admin_pb2.GROUP_STATE_ASLEEP), "asleep"),
    ],
)
def test_phases_of_a_rank(view: GroupTopology, phase: str) -> None:
    assert rank_phase(view, view.ranks[0]) == phase


def test_placement_row_tells_ranges_and_bytes() -> None:
    view = topology(admin_pb2.GROUP_STATE_READY, weight_bytes=180_400_000, kv_bytes=2_000_000)
    assert list(placement_cells(view.ranks[0]).values()) == [
        "0", "cpu", "EPYC", "0,1", "0..1 (2)", "0..1023 (1024)", "0..99 (100)", "180.4", "2.0", "linear=onednn",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [80, 160])
def test_placement_loses_nothing_on_a_narrow_terminal(width: int) -> None:
    text = io.StringIO()
    view = topology(admin_pb2.GROUP_STATE_READY, weight_bytes=180_400_000, kv_bytes=2_000_000)
    Console(file=text, width=width).print(placement_view(view, width=width))
    for part in ("EPYC", "0,1", "0..1 (2)", "0..1023", "0..99", "180.4", "2.0", "linear=onednn"):
        assert part in text.getvalue()
    assert "…" not in text.getvalue()


def test_rank_without_heads_and_rank_of_some_layers_are_told_apart() -> None:
    none = ranks_pb2.RankShard(layers=[ranks_pb2.LayerShard(mlp_columns=ranks_pb2.UnitRange(begin=0, end=4))] * 2)
    some = ranks_pb2.RankShard(
        layers=[ranks_pb2.LayerShard(kv_heads=ranks_pb2.UnitRange(begin=0, end=3)), ranks_pb2.LayerShard()]
    )
    message = admin_pb2.GetTopologyResponse(
        ranks=[admin_pb2.RankStatus(shard=none), admin_pb2.RankStatus(shard=some), admin_pb2.RankStatus()]
    )
    view = topology_from(message)
    assert view.state == GroupState.NEW
    assert [rank.kv_heads for rank in view.ranks] == [UnitRange(0, 0), None, None]
    assert [placement_cells(rank)["KV heads"] for rank in view.ranks] == ["none", "by layer", "-"]


def test_plain_display_prints_a_line_a_change() -> None:
    text = io.StringIO()
    with StartDisplay(Console(file=text, width=100), ("gateway", "cpu-0")) as display:
        display.gateway_listens("127.0.0.1:5")
        for state in (admin_pb2.GROUP_STATE_NEW, admin_pb2.GROUP_STATE_NEW, admin_pb2.GROUP_STATE_READY):
            display.show(topology(state))
    lines = [line.split("s  ", 1)[1] for line in text.getvalue().splitlines()]
    assert lines == ["gateway, cpu-0: starting", "gateway: listens on 127.0.0.1:5", "cpu-0: joined", "cpu-0: ready"]


def loading(done: int) -> GroupTopology:
    progress = ranks_pb2.Progress(work="reading weights", done=done, total=4_000_000_000, unit="B")
    rank = admin_pb2.RankStatus(joined=True, progress=progress)
    return topology_from(admin_pb2.GetTopologyResponse(state=admin_pb2.GROUP_STATE_LOADING, ranks=[rank]))


def test_long_work_of_ranks_is_a_line_each_ten_seconds() -> None:
    text, now_s = io.StringIO(), 0.0
    with StartDisplay(Console(file=text, width=100), ("gateway", "cpu-0"), clock=lambda: now_s) as display:
        for now_s in (0.0, 5.0, 10.0, 12.0, 20.0):
            display.show(loading(int(now_s * 1e8)))
    assert text.getvalue().splitlines()[1:] == [
        "    0.0 s  cpu-0: loading weights",
        "   10.0 s  cpu-0: reading weights: 1.0 of 4.0 GB · 100 MB/s",
        "   20.0 s  cpu-0: reading weights: 2.0 of 4.0 GB · 100 MB/s",
    ]


def test_long_work_of_ranks_is_a_bar_on_a_terminal() -> None:
    text, now_s = io.StringIO(), 0.0
    console = Console(file=text, width=100, force_terminal=True, legacy_windows=False)
    with StartDisplay(console, ("gateway", "cpu-0"), clock=lambda: now_s) as display:
        display.show(loading(0))
        now_s = 4.0
        display.show(loading(1_000_000_000))
    assert "1.0 of 4.0 GB · 250 MB/s" in text.getvalue()
    assert "━" in text.getvalue()


def test_rank_that_has_not_joined_is_shown_under_its_process_name() -> None:
    text = io.StringIO()
    missing = [admin_pb2.RankStatus(place=ranks_pb2.RankPlace(rank=rank, pool="cpu")) for rank in range(2)]
    with StartDisplay(Console(file=text, width=100), ("gateway", "cpu-0", "cpu-1")) as display:
        display.show(topology_from(admin_pb2.GetTopologyResponse(ranks=missing)))
    lines = [line.split("s  ", 1)[1] for line in text.getvalue().splitlines()]
    assert lines[1:] == ["cpu-0: joining", "cpu-1: joining"]


def test_what_graphs_took_is_told_where_there_may_be_any() -> None:
    status = admin_pb2.RankStatus(kernels=["graphs=35 sizes up to 256"], graph_bytes=412_000_000)
    status.graph_reserve_bytes = 1_100_000_000
    status.weight_notes.append("vision_tower left out (9 tensors, 1.2 MB)")
    (rank,) = topology_from(admin_pb2.GetTopologyResponse(ranks=[status])).ranks
    told = "graphs=35 sizes up to 256, vision_tower left out (9 tensors, 1.2 MB), graphs take 412 of 1100 MB reserved"
    assert placement_cells(rank)["kernels"] == told


@pytest.mark.parametrize("width", [80, 200])
def test_formats_of_weights_are_told_once_for_all_ranks_that_have_them(width: int) -> None:
    lines = ["FP8 in blocks of 128 x 128 -> bfloat16, loss 0.17 %", "NVFP4 -> bfloat16, loss 0.16 %"]
    ranks = [admin_pb2.RankStatus(place=ranks_pb2.RankPlace(rank=rank), weight_formats=lines[rank:]) for rank in (0, 1)]
    text = io.StringIO()
    view = topology_from(admin_pb2.GetTopologyResponse(ranks=ranks))
    Console(file=text, width=width).print(placement_view(view, width=width))
    assert f" rank 0: {lines[0]}\n rank 0, 1: {lines[1]}\n" in text.getvalue()


def test_durations() -> None:
    assert [duration(s) for s in (4.9, 185, 7620)] == ["4s", "3m05s", "2h07m"]


def line_of(**fields: Any) -> str:
    return topology_line(topology_from(admin_pb2.GetTopologyResponse(name="g", epoch=3, **fields)))


def test_the_groups_line_tells_its_cache_and_what_is_asleep() -> None:
    cache: dict[str, Any] = {"cache_layout": admin_pb2.CACHE_LAYOUT_CONTIGUOUS, "block_size": 64, "num_blocks": 4}
    assert line_of(state=admin_pb2.GROUP_STATE_ASLEEP, asleep=["kv", "weights"], **cache) == (
        "g: asleep, epoch 3, exchange none, KV cache contiguous, 4 blocks of 64 tokens, asleep: kv, weights"
    )


def test_the_groups_line_tells_what_it_took_to_rest_and_to_wake() -> None:
    idle = admin_pb2.IdleStatus(rests=True, sleeps=1, sleep_s=0.251, freed_bytes=[1000])
    assert line_of(state=admin_pb2.GROUP_STATE_ASLEEP, asleep=["kv", "weights"], idle=idle) == (
        "g: asleep, epoch 3, exchange none, asleep: kv, weights, rests until the next request (fell asleep in 0.25 s)"
    )
    idle = admin_pb2.IdleStatus(sleeps=2, sleep_s=0.251, wake_s=1.5)
    assert line_of(state=admin_pb2.GROUP_STATE_READY, idle=idle) == (
        "g: ready, epoch 3, exchange none, rested 2 times (fell asleep in 0.25 s, woke in 1.50 s)"
    )


def test_the_groups_line_tells_why_requests_wait() -> None:
    assert line_of(state=admin_pb2.GROUP_STATE_ABORTED, reason="rank 1 is gone", paused_requests=3) == (
        "g: aborted (rank 1 is gone), epoch 3, exchange none, paused requests: 3"
    )


def test_experts_are_shown_in_place_of_columns() -> None:
    layer = ranks_pb2.LayerShard(experts=ranks_pb2.UnitRange(begin=2, end=4))
    message = admin_pb2.GetTopologyResponse(ranks=[admin_pb2.RankStatus(shard=ranks_pb2.RankShard(layers=[layer] * 2))])
    (rank,) = topology_from(message).ranks
    assert rank.experts == UnitRange(2, 4)
    assert placement_cells(rank)["MLP columns"] == "experts 2..3 (2)"


def test_slices_of_experts_are_shown_by_their_columns() -> None:
    units = {"experts": ranks_pb2.UnitRange(end=4), "expert_columns": ranks_pb2.UnitRange(begin=64, end=192)}
    shard = ranks_pb2.RankShard(layers=[ranks_pb2.LayerShard(**units)] * 2)
    (rank,) = topology_from(admin_pb2.GetTopologyResponse(ranks=[admin_pb2.RankStatus(shard=shard)])).ranks
    assert rank.expert_columns == UnitRange(64, 192)
    assert placement_cells(rank)["MLP columns"] == "experts 0..3 (4), columns 64..191 (128) of each"


@pytest.mark.parametrize("name", ["/data/[prod]/m.yaml", "/data/[/x]/m.yaml", "a:smile:b"])
def test_names_in_a_table_are_no_markup(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = table_of("manifest")
    table.add_row(name)
    output().print(table)
    assert name in capsys.readouterr().out
