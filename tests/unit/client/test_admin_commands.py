"""`hetero reset-cache`, `sleep`, `wake` and the other commands of an administrator against a scripted Admin service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from typer.testing import CliRunner, Result

from hetero_api.contract import EXIT_FAILURE, EXIT_OK, EXIT_USAGE
from hetero_api.v1 import admin_pb2, admin_pb2_grpc
from hetero_client.cli.main import app

pytestmark = pytest.mark.unit

COMMANDS = ("reset-cache", "sleep", "wake", "drain", "profile", "place-experts", "update-weights")


class ScriptedAdmin(admin_pb2_grpc.AdminServicer):
    """Remembers what was asked; `refusal` ends every call."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refusal: status_pb2.Status | None = None
        self.placed = admin_pb2.PlaceExpertsResponse(
            moved_experts=6, counted_tokens=12_345, step_s_before=0.025, step_s_after=0.0125
        )

    def _take(self, request: Any, context: Any) -> None:
        self.asked.append(request)
        if self.refusal is not None:
            context.abort_with_status(rpc_status.to_status(self.refusal))

    def GetTopology(self, request: Any, context: Any) -> admin_pb2.GetTopologyResponse:  # noqa: N802
        return admin_pb2.GetTopologyResponse(name="g")

    def GetStats(self, request: Any, context: Any) -> admin_pb2.GetStatsResponse:  # noqa: N802
        return admin_pb2.GetStatsResponse()

    def ResetCache(self, request: Any, context: Any) -> admin_pb2.ResetCacheResponse:  # noqa: N802
        self._take(request, context)
        return admin_pb2.ResetCacheResponse(block_size=32, num_blocks=100, kv_bytes=[2_000_000, 0])

    def Sleep(self, request: Any, context: Any) -> admin_pb2.SleepResponse:  # noqa: N802
        self._take(request, context)
        return admin_pb2.SleepResponse(freed_bytes=[1_500_000])

    def WakeUp(self, request: Any, context: Any) -> admin_pb2.WakeUpResponse:  # noqa: N802
        self._take(request, context)
        return admin_pb2.WakeUpResponse(asleep=["kv"] if request.tags else [])

    def UpdateWeights(self, request: Any, context: Any) -> admin_pb2.UpdateWeightsResponse:  # noqa: N802
        self._take(request, context)
        return admin_pb2.UpdateWeightsResponse(weight_bytes=[2_500_000_000, 500_000_000])

    def LoadAdapter(self, request: Any, context: Any) -> admin_pb2.LoadAdapterResponse:  # noqa: N802
        self._take(request, context)
        return admin_pb2.LoadAdapterResponse()

    def UnloadAdapter(self, request: Any, context: Any) -> admin_pb2.UnloadAdapterResponse:  # noqa: N802
        self._take(request, context)
        return admin_pb2.UnloadAdapterResponse()

    def ListAdapters(self, request: Any, context: Any) -> admin_pb2.ListAdaptersResponse:  # noqa: N802
        self._take(request, context)
        loaded = admin_pb2.LoadedAdapter(name="sql", directory="/adapters/sql", requests=3)
        return admin_pb2.ListAdaptersResponse(adapters=[loaded])

    def Drain(self, request: Any, context: Any) -> admin_pb2.DrainResponse:  # noqa: N802
        self._take(request, context)
        return admin_pb2.DrainResponse()

    def Profile(self, request: Any, context: Any) -> admin_pb2.ProfileResponse:  # noqa: N802
        self._take(request, context)
        traces = [b"zero", b""] if request.with_trace else [b"", b""]
        return admin_pb2.ProfileResponse(
            ranks=[admin_pb2.RankProfile(table=f"table {i}", trace=trace) for i, trace in enumerate(traces)]
        )

    def PlaceExperts(self, request: Any, context: Any) -> admin_pb2.PlaceExpertsResponse:  # noqa: N802
        self._take(request, context)
        return self.placed


class Bench:
    def __init__(self) -> None:
        self.admin = ScriptedAdmin()
        self._server = grpc.server(futures.ThreadPoolExecutor(1))
        admin_pb2_grpc.add_AdminServicer_to_server(self.admin, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--admin-address", self.address])


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("HETERO_HOME", str(tmp_path / "home"))
    bench = Bench()
    yield bench
    bench.stop()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches_with_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == EXIT_OK
    assert f"hetero {command}" in result.stdout.split("Options")[0].split("\n", 2)[2]


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], admin_pb2.ResetCacheRequest(layout=admin_pb2.CACHE_LAYOUT_PAGED)),
        (["--layout", "contiguous"], admin_pb2.ResetCacheRequest(layout=admin_pb2.CACHE_LAYOUT_CONTIGUOUS)),
        (
            ["--block-size", "32", "--num-blocks", "100"],
            admin_pb2.ResetCacheRequest(layout=admin_pb2.CACHE_LAYOUT_PAGED, block_size=32, num_blocks=100),
        ),
    ],
)
def test_reset_cache_asks_for_what_is_given(
    bench: Bench, arguments: list[str], asked: admin_pb2.ResetCacheRequest
) -> None:
    result = bench.run("reset-cache", *arguments)
    assert bench.admin.asked == [asked]
    assert result.stdout == "KV cache: 100 blocks of 32 tokens; rank 0 2.0 MB, rank 1 0.0 MB\n"


def test_sleep_and_wake(bench: Bench) -> None:
    assert bench.run("sleep", "--level", "2").stdout == "asleep; freed: rank 0 1.5 MB\n"
    assert bench.run("wake", "weights").stdout == "still asleep: kv\n"
    assert bench.run("wake").stdout == "awake\n"
    assert bench.admin.asked == [
        admin_pb2.SleepRequest(level=2), admin_pb2.WakeUpRequest(tags=["weights"]), admin_pb2.WakeUpRequest(),
    ]  # fmt: skip


def test_drain_says_when_it_is_done(bench: Bench) -> None:
    result = bench.run("drain", "--timeout", "5")
    assert (result.exit_code, result.stdout) == (EXIT_OK, "")
    assert "no request is in flight" in result.stderr


def test_profile_prints_tables_and_writes_traces(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "traces"
    result = bench.run("profile", "--seconds", "2", "--trace", str(folder))
    assert result.stdout == "rank 0\ntable 0\nrank 1\ntable 1\n"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"rank-0.trace.json.gz": b"zero"}
    assert bench.run("profile").exit_code == EXIT_OK
    assert bench.admin.asked == [
        admin_pb2.ProfileRequest(duration_s=2, with_trace=True), admin_pb2.ProfileRequest(duration_s=5),
    ]  # fmt: skip


def test_a_trace_folder_that_cannot_be_is_told_before_anything_is_recorded(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = bench.run("profile", "--trace", str(tmp_path / "file" / "below"))
    assert (result.exit_code, bench.admin.asked) == (EXIT_USAGE, [])


def test_place_experts_says_what_moved_and_what_for(bench: Bench) -> None:
    assert bench.run("place-experts").stdout == (
        "experts moved: 6; over 12345 counted tokens a decode step takes 12.500 ms instead of 25.000 ms (predicted)\n"
    )
    bench.admin.placed = admin_pb2.PlaceExpertsResponse(counted_tokens=10, step_s_before=0.025, step_s_after=0.025)
    assert bench.run("place-experts").stdout == (
        "no expert moved: over 10 counted tokens the gain would be too small\n"
    )
    assert bench.admin.asked == [admin_pb2.PlaceExpertsRequest()] * 2


def test_adapters_are_loaded_listed_and_unloaded(bench: Bench) -> None:
    assert bench.run("load-adapter", "sql", "/adapters/sql").stdout == "adapter sql loaded from /adapters/sql\n"
    assert bench.run("adapters").stdout == "sql /adapters/sql\n"
    assert bench.run("unload-adapter", "sql").stdout == "adapter sql unloaded\n"
    assert bench.admin.asked == [
        admin_pb2.LoadAdapterRequest(name="sql", directory="/adapters/sql"),
        admin_pb2.ListAdaptersRequest(),
        admin_pb2.UnloadAdapterRequest(name="sql"),
    ]


def test_update_weights_says_what_each_rank_holds(bench: Bench) -> None:
    assert bench.run("update-weights").stdout == "weights updated; now held: rank 0 2500.0 MB, rank 1 500.0 MB\n"
    assert bench.admin.asked == [admin_pb2.UpdateWeightsRequest()]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("update-weights", {"weight_bytes": [2_500_000_000, 500_000_000]}),
        ("reset-cache", {"block_size": 32, "num_blocks": 100, "kv_bytes": [2_000_000, 0]}),
        ("sleep", {"freed_bytes": [1_500_000]}),
        ("wake", {"asleep": []}),
        ("profile", {"ranks": [{"table": "table 0", "trace": None}, {"table": "table 1", "trace": None}]}),
        (
            "place-experts",
            {"moved_experts": 6, "counted_tokens": 12_345, "step_s_before": 0.025, "step_s_after": 0.0125},
        ),
    ],
)
def test_answers_as_json(bench: Bench, command: str, expected: dict[str, Any]) -> None:
    assert json.loads(bench.run(command, "--json").stdout) == expected


@pytest.mark.parametrize("command", COMMANDS)
def test_a_group_in_the_wrong_state_is_one_line_and_a_failure(bench: Bench, command: str) -> None:
    bench.admin.refusal = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message="it is NEW: wait")
    result = bench.run(command)
    assert result.exit_code == EXIT_FAILURE
    assert result.stderr.splitlines() == ["hetero: it is NEW: wait"]


def test_a_wrong_argument_names_its_field_and_is_a_usage_error(bench: Bench) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="num_blocks", description="must be at least 16")
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    bench.admin.refusal = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="bad", details=[detail])
    result = bench.run("reset-cache", "--num-blocks", "1")
    assert result.exit_code == EXIT_USAGE
    assert result.stderr.splitlines() == ["hetero: num_blocks: must be at least 16"]
