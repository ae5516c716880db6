"""Client of the gateway's Admin service, for the launcher, `hetero topology` and the commands that steer a group.

A call that the group's state does not allow raises WrongStateError; a wrong argument raises InvalidRequestError, which
names the fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import grpc

from hetero_api.group_state import GroupState
from hetero_api.sharding import UnitRange
from hetero_api.v1 import admin_pb2, admin_pb2_grpc, ranks_pb2
from hetero_client.access import Access, Calls
from hetero_client.channel import error_from, open_channel
from hetero_client.messages import CacheLayout
from hetero_client.progress import Amount
from hetero_client.wire import dataclass_from

CALL_TIMEOUT_S: Final = 5.0
ADMIN_TIMEOUT_S: Final = 120.0
"""Limit of calls whose work the ranks do in memory."""
WAKE_TIMEOUT_S: Final = 1800.0
"""Limit of calls that may read weights again."""
_UNITS: Final = ("kv_heads", "mlp_columns", "experts")
_UNBOUNDED: Final = -1
"""Size of answers: one holds the profiles of all ranks."""


@dataclass(frozen=True, slots=True)
class StepTimesView:
    """Steps of one kind that a rank did in this epoch, half a second ago or less.

    `exchange_s` is the part of `seconds` in the host exchange: bytes moved, sums, and waits for other ranks.
    """

    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    exchange_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank as the gateway sees it.

    `kv_heads`, `mlp_columns`, `experts` and `expert_columns` are the ranges that it owns in every layer; None while the
    group has not formed, or when the layers differ. Without `expert_columns` its experts are whole.
    """

    rank: int
    pool: str
    pod_name: str
    device: str
    cores: tuple[int, ...]
    pinned: bool
    joined: bool
    kv_heads: UnitRange | None
    mlp_columns: UnitRange | None
    experts: UnitRange | None
    embedding_rows: UnitRange | None
    head_rows: UnitRange | None
    layered: bool
    weight_bytes: int
    kv_bytes: int
    load_s: float
    kernels: tuple[str, ...]
    graph_bytes: int = 0
    """GPU memory that graphs of steps have taken, up to some seconds ago."""
    graph_reserve_bytes: int = 0
    """GPU memory reserved for graphs; 0: the rank records none."""
    weight_formats: tuple[str, ...] = ()
    """Formats of its weights as they are stored and as it keeps them, with the loss."""
    expert_columns: UnitRange | None = None
    """Columns of each of its experts, where these are dealt in slices."""
    weight_notes: tuple[str, ...] = ()
    """Notes on the checkpoint's weights, e.g. which parts of it are not served."""
    numa_nodes: tuple[int, ...] = ()
    """NUMA nodes of its cores."""
    stage: UnitRange | None = None
    """Layers of which it holds any part; None while the group has not formed."""
    decode: StepTimesView = StepTimesView()
    """Steps that only decoded."""
    prefill: StepTimesView = StepTimesView()
    """Other steps."""
    decode_read_bytes: float = 0.0
    """Weights that the decode steps read, by the placement's arithmetic; 0: not predicted."""
    memory_bandwidth: float = 0.0
    """Measured while all ranks read at once, bytes a second; 0: not measured."""
    progress: Amount | None = None
    """Long work that it does; None: none."""


@dataclass(frozen=True, slots=True)
class PlacementOptionView:
    """A placement that was considered; `why_not` says why it is impossible or not allowed."""

    name: str
    mode: str
    chosen: bool
    why_not: str
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    workload_s: float
    weight_shares: tuple[float, ...]
    """Share of the weights by rank, 0 to 1; empty for an impossible placement."""


@dataclass(frozen=True, slots=True)
class ExchangeTimeView:
    """Time of an all-reduce of one size."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PlacementView:
    """The placements that were considered, the one in force, and its predicted and measured speed.

    `step_time_ratio` is measured over predicted seconds of recent steps that only decoded. It and
    `measured_tokens_per_second` are 0 before the first such step.
    """

    options: tuple[PlacementOptionView, ...]
    reason: str
    predicted_tokens_per_second: float
    measured_tokens_per_second: float
    step_time_ratio: float
    host_times: tuple[ExchangeTimeView, ...]
    device_times: tuple[ExchangeTimeView, ...]


@dataclass(frozen=True, slots=True)
class IdleView:
    """Rest of a group without requests (spec.idle), with the figures of the last time.

    While it `rests` it accepts requests, and wakes with the first. `freed_bytes`: of each rank's device.
    """

    rests: bool
    sleeps: int
    sleep_s: float
    wake_s: float
    freed_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupTopology:
    """The group as the gateway sees it. `cache_layout` is None until there is a cache."""

    name: str
    state: GroupState
    epoch: int
    ranks: tuple[RankView, ...]
    exchange: str
    reason: str
    failed: bool
    block_size: int
    num_blocks: int
    cache_layout: CacheLayout | None = None
    asleep: tuple[str, ...] = ()
    paused_requests: int = 0
    placement_mode: str = ""
    """Mode in force, in the words of spec.placement.mode; empty until it is decided."""
    placement: PlacementView | None = None
    """None until it is decided."""
    exchange_reason: str = ""
    """Why the exchange is not the fastest; "" if it is."""
    model_source: str = ""
    """Origin of weights that were changed on their way; "" for others."""
    speculation: str = ""
    """How tokens are proposed and what has come of it; "" if none are."""
    idle: IdleView | None = None
    """Rest of a group without requests; None before its first."""
    tokens_per_second: float = 0.0
    """Tokens generated a second of stepping, of late; 0 before any."""
    stalled_s: float = 0.0
    """Age of the step that the ranks compute; 0 while none is."""


@dataclass(frozen=True, slots=True)
class StatsView:
    """Counts of scheduler and block pool since the gateway started, and gauges, all of one moment between two steps.

    `num_blocks`, the null block excluded, are free or used; `cached_blocks` are free ones that a prefix can find.
    """

    running_requests: int
    waiting_requests: int
    num_blocks: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    finished_requests: int
    proposed_tokens: int
    accepted_tokens: int
    proposals: int


@dataclass(frozen=True, slots=True)
class CacheView:
    """The KV cache after a reset. `num_blocks` excludes the null block; `kv_bytes` is by rank."""

    block_size: int
    num_blocks: int
    kv_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankProfile:
    """Profile of one rank: a readable table, and a gzipped trace in Chrome's JSON format, b"" unless asked for."""

    table: str
    trace: bytes


@dataclass(frozen=True, slots=True)
class ExpertsView:
    """Result of `place_experts`: experts moved, tokens counted, predicted seconds of a decode step before and after."""

    moved_experts: int
    counted_tokens: int
    step_s_before: float
    step_s_after: float


class AdminClient:
    """Client of `hetero.v1.Admin` at `address` ("host:port"); `token` is the administrator's, if one is required.

    `access` has the certificates of a group whose inside is encrypted.
    """

    def __init__(self, address: str, *, token: str | None = None, access: Access | None = None) -> None:
        """Raise CredentialsError where the token would travel unencrypted between machines."""
        self.address = address
        access = replace(access or Access(), api_key=token or "")
        self._channel = open_channel(address, access, max_answer_bytes=_UNBOUNDED)
        self._stub = Calls(admin_pb2_grpc.AdminStub(self._channel), access.metadata)

    def topology(self, *, timeout_s: float = CALL_TIMEOUT_S, wait_for_ready: bool = False) -> GroupTopology:
        """Return the place and the shard of every rank.

        `wait_for_ready` waits for a gateway that cannot be reached, up to the timeout. Without a waiting call, a
        channel that has lost its server rarely tries to connect again.
        """
        request = admin_pb2.GetTopologyRequest()
        return topology_from(self._call(self._stub.GetTopology, request, timeout_s, wait_for_ready=wait_for_ready))

    def stats(self, *, timeout_s: float = CALL_TIMEOUT_S, wait_for_ready: bool = False) -> StatsView:
        """Return the counts of scheduler and block pool; `wait_for_ready` as in `topology`."""
        request = admin_pb2.GetStatsRequest()
        answer = self._call(self._stub.GetStats, request, timeout_s, wait_for_ready=wait_for_ready)
        return dataclass_from(StatsView, answer)

    def reset_cache(
        self,
        *,
        layout: CacheLayout = CacheLayout.PAGED,
        block_size: int = 0,
        num_blocks: int = 0,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> CacheView:
        """Replace the KV cache of all ranks. Needs an idle, READY group.

        A block size or number of 0 leaves the choice to the gateway.
        """
        request = admin_pb2.ResetCacheRequest(
            layout=admin_pb2.CacheLayout.Value(f"CACHE_LAYOUT_{layout.name}"),
            block_size=block_size,
            num_blocks=num_blocks,
        )
        return dataclass_from(CacheView, self._call(self._stub.ResetCache, request, timeout_s))

    def sleep(self, level: int = 1, *, timeout_s: float = ADMIN_TIMEOUT_S) -> tuple[int, ...]:
        """Free memory until `wake_up`; return the bytes freed by each rank. Needs an idle, READY group."""
        return tuple(self._call(self._stub.Sleep, admin_pb2.SleepRequest(level=level), timeout_s).freed_bytes)

    def wake_up(self, tags: Iterable[str] = (), *, timeout_s: float = WAKE_TIMEOUT_S) -> tuple[str, ...]:
        """Wake weights and cache, or only those that `tags` name; return the tags that still sleep.

        Tags are "weights" and "kv". Needs an ASLEEP group.
        """
        return tuple(self._call(self._stub.WakeUp, admin_pb2.WakeUpRequest(tags=tags), timeout_s).asleep)

    def drain(self, *, timeout_s: float | None = None) -> None:
        """Refuse new requests for good; return once those in flight have ended."""
        self._call(self._stub.Drain, admin_pb2.DrainRequest(), timeout_s)

    def profile(
        self, duration_s: float, *, with_trace: bool = False, timeout_s: float | None = None
    ) -> tuple[RankProfile, ...]:
        """Profile the ranks for `duration_s`, at most 60 s, while they serve; return profiles in rank order."""
        request = admin_pb2.ProfileRequest(duration_s=duration_s, with_trace=with_trace)
        limit_s = duration_s + ADMIN_TIMEOUT_S if timeout_s is None else timeout_s
        answer = self._call(self._stub.Profile, request, limit_s)
        return tuple(dataclass_from(RankProfile, rank) for rank in answer.ranks)

    def place_experts(self, *, timeout_s: float = WAKE_TIMEOUT_S) -> ExpertsView:
        """Move experts to the ranks that are fastest with them. Needs a READY group whose model has experts."""
        request = admin_pb2.PlaceExpertsRequest()
        return dataclass_from(ExpertsView, self._call(self._stub.PlaceExperts, request, timeout_s))

    def update_weights(self, *, timeout_s: float = WAKE_TIMEOUT_S) -> tuple[int, ...]:
        """Read the model's files again in place of the weights that serve. Needs an idle, READY group.

        Returns the bytes of each rank's weights, in rank order.
        """
        return tuple(self._call(self._stub.UpdateWeights, admin_pb2.UpdateWeightsRequest(), timeout_s).weight_bytes)

    def load_adapter(self, name: str, directory: str, *, timeout_s: float = WAKE_TIMEOUT_S) -> None:
        """Load a LoRA adapter from a directory on every rank, while requests run. Needs a READY group."""
        self._call(self._stub.LoadAdapter, admin_pb2.LoadAdapterRequest(name=name, directory=directory), timeout_s)

    def unload_adapter(self, name: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        """Forget an adapter that no request uses."""
        self._call(self._stub.UnloadAdapter, admin_pb2.UnloadAdapterRequest(name=name), timeout_s)

    def adapters(self, *, timeout_s: float = ADMIN_TIMEOUT_S) -> dict[str, str]:
        """Return the directories of the adapters that are loaded, by their names."""
        answer = self._call(self._stub.ListAdapters, admin_pb2.ListAdaptersRequest(), timeout_s)
        return {adapter.name: adapter.directory for adapter in answer.adapters}

    def _call(self, method: Any, request: Any, timeout_s: float | None, *, wait_for_ready: bool = False) -> Any:
        try:
            return method(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError as error:
            raise error_from(error, address=self.address) from error

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def topology_from(message: admin_pb2.GetTopologyResponse) -> GroupTopology:
    """Return a GetTopology answer as a dataclass."""
    layout = _word(admin_pb2.CacheLayout.Name(message.cache_layout), "CACHE_LAYOUT_")
    return dataclass_from(
        GroupTopology,
        message,
        state=GroupState.from_proto(message.state),
        ranks=tuple(_rank(rank) for rank in message.ranks),
        exchange=_word(ranks_pb2.ExchangeKind.Name(message.exchange), "EXCHANGE_KIND_"),
        cache_layout=CacheLayout(layout) if layout else None,
        placement=placement_from(message.placement) if message.HasField("placement") else None,
        idle=dataclass_from(IdleView, message.idle) if message.idle.sleeps else None,
    )


def placement_from(message: admin_pb2.PlacementReport) -> PlacementView:
    """Return a report as a dataclass."""
    return dataclass_from(
        PlacementView,
        message,
        options=tuple(dataclass_from(PlacementOptionView, option) for option in message.options),
        host_times=tuple(ExchangeTimeView(time.bytes, time.seconds) for time in message.host_times),
        device_times=tuple(ExchangeTimeView(time.bytes, time.seconds) for time in message.device_times),
    )


def _word(name: str, prefix: str) -> str:
    """Return the name of an enum's value in lower case without its prefix; "" for an unspecified one."""
    word = name.removeprefix(prefix).lower()
    return "" if word == "unspecified" else word


def _rank(message: admin_pb2.RankStatus) -> RankView:
    place, layers = message.place, message.shard.layers
    kv_heads, mlp_columns, experts = (_common(layers, name) for name in ("kv_heads", "mlp_columns", "experts"))
    return dataclass_from(
        RankView,
        message,
        rank=place.rank,
        pool=place.pool,
        pod_name=place.pod_name,
        device=place.device.name,
        cores=tuple(place.device.cpus),
        numa_nodes=tuple(place.device.numa_nodes),
        pinned=place.device.pinned,
        kv_heads=kv_heads,
        mlp_columns=mlp_columns,
        experts=experts,
        expert_columns=_common(layers, "expert_columns"),
        embedding_rows=_range(message.shard.embedding_rows) if layers else None,
        head_rows=_range(message.shard.head_rows) if layers else None,
        layered=bool(layers) and None in (kv_heads, mlp_columns, experts),
        stage=_stage(layers) if layers else None,
        decode=dataclass_from(StepTimesView, message.decode),
        prefill=dataclass_from(StepTimesView, message.prefill),
        progress=dataclass_from(Amount, message.progress) if message.HasField("progress") else None,
    )


def _stage(layers: Sequence[ranks_pb2.LayerShard]) -> UnitRange:
    """Return the first to the last layer of which any part is held."""
    held = [index for index, layer in enumerate(layers) if any(_range(getattr(layer, name)).size for name in _UNITS)]
    return UnitRange(held[0], held[-1] + 1) if held else UnitRange(0, 0)


def _common(layers: Iterable[ranks_pb2.LayerShard], name: str) -> UnitRange | None:
    """Return the range of that name that all layers share, None if there is none."""
    ranges = {_range(getattr(layer, name)) for layer in layers}
    return ranges.pop() if len(ranges) == 1 else None


def _range(message: ranks_pb2.UnitRange) -> UnitRange:
    return UnitRange(message.begin, message.end)
