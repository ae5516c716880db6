"""`hetero top`: rates and events of looks, the picture on wide and narrow terminals, and one picture of a server."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from hetero_api.contract import EXIT_FAILURE, EXIT_OK
from hetero_api.sharding import UnitRange
from hetero_api.v1 import admin_pb2, admin_pb2_grpc, ranks_pb2
from hetero_client.admin import StatsView, topology_from
from hetero_client.cli.live.history import MAX_EVENTS, History, Look
from hetero_client.cli.live.picture import bar_of, cache_line, frame, load_line
from hetero_client.cli.main import app
from hetero_client.wire import dataclass_from

pytestmark = pytest.mark.unit

READY, ABORTED, FORMING = (admin_pb2.GROUP_STATE_READY, admin_pb2.GROUP_STATE_ABORTED, admin_pb2.GROUP_STATE_FORMING)


def units(begin: int, end: int) -> ranks_pb2.UnitRange:
    return ranks_pb2.UnitRange(begin=begin, end=end)


def rank(number: int, *, steps: int = 0, exchange_s: float = 0.0) -> admin_pb2.RankStatus:
    """One of two ranks that share heads, columns and rows; a decode step takes 10 ms."""
    half = [units(0, 2), units(2, 3)][number]
    layer = ranks_pb2.LayerShard(kv_heads=half, mlp_columns=units(768 * number, 768 * (number + 1)))
    rows = units(100 * number, 100 * (number + 1))
    device = ranks_pb2.DeviceReport(name="EPYC", cpus=[2 * number, 2 * number + 1], numa_nodes=[number], pinned=True)
    return admin_pb2.RankStatus(
        place=ranks_pb2.RankPlace(rank=number, pool="cpu", pod_name=f"cpu-{number}", device=device),
        joined=True, shard=ranks_pb2.RankShard(layers=[layer] * 30, embedding_rows=rows, head_rows=rows),
        weight_bytes=180_000_000, kv_bytes=20_000_000, kernels=["isa=avx512"],
        decode=ranks_pb2.StepTimes(steps=steps, rows=steps, seconds=0.01 * steps, exchange_s=exchange_s * steps),
        decode_read_bytes=40e6 * steps, memory_bandwidth=10e9,
    )  # fmt: skip


def answer(
    state: admin_pb2.GroupState.ValueType = READY, *, epoch: int = 1, steps: int = 0, reason: str = "", **fields: Any
) -> admin_pb2.GetTopologyResponse:
    ranks = [rank(0, steps=steps, exchange_s=0.002), rank(1, steps=steps, exchange_s=0.005)]
    return admin_pb2.GetTopologyResponse(
        name="g", state=state, epoch=epoch, ranks=ranks, reason=reason, exchange=ranks_pb2.EXCHANGE_KIND_SHM, **fields
    )


def counts(**given: int) -> admin_pb2.GetStatsResponse:
    return admin_pb2.GetStatsResponse(**{"num_blocks": 40, "free_blocks": 30, "used_blocks": 10, **given})


def look(at_s: float, topology: admin_pb2.GetTopologyResponse | None = None, **given: int) -> Look:
    view = topology_from(topology or answer())
    return Look(at_s, f"12:00:{at_s:02.0f}", view, dataclass_from(StatsView, counts(**given)))


def history(*looks: Look) -> History:
    found = History()
    for each in looks:
        found.add(each)
    return found


def test_rates_are_of_the_last_seconds() -> None:
    old = look(0, generated_tokens=0, prompt_tokens=0, steps=0)
    first = look(10, generated_tokens=1000, prompt_tokens=100, cached_tokens=0, steps=100)
    last = look(14, generated_tokens=1400, prompt_tokens=120, cached_tokens=60, steps=140, running_requests=3)
    found = history(old, first, last)
    assert (found.rates().generated, found.rates().prompt, found.rates().steps) == (100.0, 20.0, 10.0)
    assert load_line(found) == "100.0 tokens/s · prompts 20.0 tokens/s · 10.0 steps/s · 3 running, 0 waiting"


def test_one_look_tells_the_gateways_own_rate_and_no_other() -> None:
    found = history(look(1, answer(tokens_per_second=42.0, paused_requests=2, stalled_s=9.0), preemptions=1))
    assert load_line(found) == (
        "42.0 tokens/s · 0 running, 0 waiting · 2 paused · 1 preempted · a step takes 9 s already"
    )


def test_counts_of_a_new_gateway_give_no_negative_rates() -> None:
    found = history(look(1, generated_tokens=500, steps=50), look(2, answer(tokens_per_second=7.0), steps=1))
    assert found.rates().generated == 7.0


def test_times_of_steps_are_of_the_window_and_else_of_the_epoch() -> None:
    slow = answer(steps=100)
    for each in slow.ranks:
        each.decode.seconds = 10.0  # a warm-up of 100 ms a step
    fast = answer(steps=150)
    for each in fast.ranks:
        each.decode.seconds = 10.0 + 50 * 0.02
        each.decode.exchange_s = slow.ranks[each.place.rank].decode.exchange_s + 50 * 0.005
    found = history(look(1, slow), look(2, fast))
    pace = found.decode_pace(0)
    assert (pace.steps, round(pace.step_s, 6), round(pace.exchange_share, 6)) == (50, 0.02, 0.25)
    assert found.prefill_pace(0).steps == 0
    assert history(look(1, slow), look(2, slow)).decode_pace(0).step_s == 0.1
    assert history(look(1, fast), look(2, answer(epoch=2, steps=10))).decode_pace(0).steps == 10


def test_events_tell_of_a_lost_epoch_and_how_long_healing_took() -> None:
    found = history(
        look(1), look(2, answer(ABORTED, reason="rank 1 is lost")), look(3, answer(FORMING, epoch=2)),
        look(4, answer(epoch=2)), look(5, answer(epoch=2)),
    )  # fmt: skip
    assert list(found.events) == [
        "12:00:02  epoch 1 is aborted (rank 1 is lost)",
        "12:00:03  epoch 2 is forming",
        "12:00:04  epoch 2 is ready, after 2.0 s",
    ]


def test_events_tell_of_a_gateway_that_does_not_answer_once() -> None:
    found = history(look(1))
    found.note_silence("12:00:02", at_s=2, problem="nothing answers")
    found.note_silence("12:00:03", at_s=3, problem="nothing answers")
    found.add(look(5))
    found.add(look(6))
    assert list(found.events) == ["12:00:02  nothing answers", "12:00:05  the gateway answers again, after 3.0 s"]


def test_only_the_last_events_are_kept() -> None:
    found = history(*(look(n, answer(epoch=n)) for n in range(1, 20)))
    assert [event.split("  ")[1] for event in found.events][-1] == "epoch 19 is ready"
    assert len(found.events) == MAX_EVENTS


@pytest.mark.parametrize(
    ("part", "total", "bar"),
    [
        ((0, 10), 10, "██████████"), ((0, 5), 10, "█████·····"), ((5, 10), 10, "·····█████"),
        ((9, 10), 1000, "█·········"), ((999, 1000), 1000, "·········█"), ((3, 3), 10, "··········"),
        ((0, 0), 0, "··········"),
    ],
)  # fmt: skip
def test_a_bar_shows_where_a_part_lies(part: tuple[int, int], total: int, bar: str) -> None:
    assert bar_of(UnitRange(*part), total, cells=10) == bar


def test_the_cache_line_tells_use_and_hits() -> None:
    found = history(look(1, cached_blocks=4, prompt_tokens=30, cached_tokens=10))
    assert cache_line(found) == (
        "KV cache ██········ 25%: 10 of 40 blocks used, 4 cached · 25% of prompt tokens found there"
    )


def shown(found: History, width: int) -> str:
    text = io.StringIO()
    Console(file=text, width=width).print(frame(found, width=width))
    return text.getvalue()


def test_a_wide_picture_tells_all_of_a_rank() -> None:
    lines = shown(history(look(1, answer(steps=100))), 160).splitlines()
    (line,) = [line for line in lines if line.split()[:1] == ["1"]]
    for part in ("2-3", "██████████ 30", "███ 1", "·····█████ 768", "·····█████ 100", "10 ms", "50%", "80%", "200"):
        assert part in line
    assert any("rank 0, 1: EPYC, isa=avx512" in line for line in lines)


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_picture_loses_no_cell(width: int) -> None:
    text = shown(history(look(1, answer(steps=100))), width)
    assert "…" not in text
    assert "··███" in text
    assert "10 ms" in text
    assert max(map(len, text.splitlines())) <= width


class PlayedAdmin(admin_pb2_grpc.AdminServicer):
    """One answer."""

    def GetTopology(self, request: Any, context: Any) -> admin_pb2.GetTopologyResponse:  # noqa: N802
        return answer(steps=100, tokens_per_second=55.5)

    def GetStats(self, request: Any, context: Any) -> admin_pb2.GetStatsResponse:  # noqa: N802
        return counts(running_requests=4)


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    admin_pb2_grpc.add_AdminServicer_to_server(PlayedAdmin(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_once_prints_one_picture(address: str) -> None:
    result = CliRunner().invoke(app, ["top", "--once", "--admin-address", address])
    assert result.exit_code == EXIT_OK, result.output
    assert result.stdout.splitlines()[:2] == [
        "g: ready, epoch 1, exchange shm", "55.5 tokens/s · 4 running, 0 waiting",
    ]  # fmt: skip


def test_a_server_that_is_not_there_is_an_error(tmp_path: Any) -> None:
    result = CliRunner().invoke(app, ["top", "--once", "--admin-address", f"unix:{tmp_path / 'none.sock'}"])
    assert result.exit_code == EXIT_FAILURE
    assert result.stderr.startswith("hetero: ")
