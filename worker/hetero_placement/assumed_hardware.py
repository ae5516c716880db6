"""Hardware that is not there: a YAML file says how fast each kind of rank, or each pool, is taken to be.

    kinds:                              # ranks of a pool that `pools` does not name
      GPU:
        memory: 24Gi                    # of a rank; default: what the manifest says, where it does
        memoryBandwidth: 900e9          # bytes a second that are really reached
        flops: {bfloat16: 150e12}       # of a large matrix product; left out: computing takes no time
        bus: {toDevice: 25e9, fromDevice: 25e9, latencySeconds: 10e-6}
      CPU:
        memory: 256Gi
        memoryBandwidth: 370e9
        flops: {bfloat16: 5e12, float32: 2e12}
        expertShare: 0.45               # part of both that a layer of experts reaches; default: 1
        weightBits: [8, 4]              # widths it keeps weights in that are stored so; default: [8, 4]
        ranks: 2                        # of the machine, and cores of each: needed where no manifest is given
        cores: 32
    pools: {fast: {...}}                # the same by the pool's name
    exchange:
      host: {latencySeconds: 60e-6, bandwidth: 10e9}     # one all-reduce in host memory
      device: {latencySeconds: 15e-6, bandwidth: 200e9}  # one among GPU ranks; needed if there are several

Numbers may be written as 900e9 (YAML takes it for text, which is read as a number). Every problem is told by its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError

from hetero_api.contract import API_VERSION, GROUP, KIND
from hetero_api.errors import ManifestError
from hetero_api.manifest import parse_resource, read_document
from hetero_api.spec import HeteroInference, HeteroInferenceSpec
from hetero_api.spec_pools import MAX_RANKS, PoolSpec, PoolType
from hetero_api.spec_types import Bytes, SpecModel
from hetero_placement.hardware import ExchangeSpeeds, Hardware, RankHardware, Speeds

_KEPT_BITS: Final = frozenset({8, 4})
_MESSAGES: Final = {
    "literal_error": "must be 16, 8 or 4",
    "missing": "is required",
    "extra_forbidden": "unknown field",
    "float_type": "must be a number",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "greater_than": "must be more than 0",
    "greater_than_equal": "is too small",
    "less_than_equal": "is too large",
}


def _number(value: object) -> object:
    """YAML takes 900e9 for text, since it has no point."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


_Rate = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
_Seconds = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]


class BusSpeeds(SpecModel):
    """Between host and device memory."""

    to_device: _Rate
    from_device: _Rate
    latency_seconds: _Seconds = 0.0


class DeviceAssumption(SpecModel):
    """One rank's device."""

    memory_bandwidth: _Rate
    memory: Bytes | None = None
    flops: dict[str, _Rate] = Field(default_factory=dict)
    expert_share: Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)] = 1.0
    bus: BusSpeeds | None = None
    weight_bits: list[Literal[16, 8, 4]] | None = None
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)] | None = None
    cores: Annotated[int, Field(ge=1, le=1024)] | None = None

    def speeds(self) -> Speeds:
        """Return the device's speeds; a bus that is not given counts as 0."""
        bus = self.bus
        return Speeds(
            memory_bandwidth=self.memory_bandwidth,
            flops=self.flops,
            to_device_bandwidth=bus.to_device if bus is not None else 0.0,
            from_device_bandwidth=bus.from_device if bus is not None else 0.0,
            device_latency_s=bus.latency_seconds if bus is not None else 0.0,
            expert_share=self.expert_share,
        )


class RoundSpeeds(SpecModel):
    """One all-reduce: some time whatever the size, and the bytes'."""

    latency_seconds: _Seconds
    bandwidth: _Rate | None = None

    def speeds(self) -> ExchangeSpeeds:
        """Return the times of an all-reduce by size."""
        return ExchangeSpeeds.of_rates(self.latency_seconds, self.bandwidth)


class AssumedExchange(SpecModel):
    """Assumed speeds of exchanging activations."""

    host: RoundSpeeds
    device: RoundSpeeds | None = None


class AssumedKinds(SpecModel):
    """By kind of device; written in capitals, as a pool's type is."""

    model_config = SpecModel.model_config | {"alias_generator": str.upper, "validate_by_name": False}

    gpu: DeviceAssumption | None = None
    cpu: DeviceAssumption | None = None


class AssumedHardware(SpecModel):
    """The file."""

    exchange: AssumedExchange
    kinds: AssumedKinds = AssumedKinds()
    pools: dict[str, DeviceAssumption] = Field(default_factory=dict)


def load_assumed_hardware(path: Path) -> AssumedHardware:
    """Read the file. Raises ManifestError with every problem."""
    try:
        data = yaml.safe_load(read_document(path))
    except yaml.YAMLError as error:
        raise ManifestError([f"is no valid YAML: {error}".replace("\n", " ")], source=str(path)) from error
    try:
        return AssumedHardware.model_validate(data)
    except ValidationError as error:
        problems = [f"{_path(d['loc'])}: {_MESSAGES.get(d['type'], d['msg'])}" for d in error.errors()]
        raise ManifestError(problems, source=str(path)) from error


def assume(spec: HeteroInferenceSpec, assumed: AssumedHardware, *, source: str = "") -> Hardware:
    """Return the group's hardware, every rank as its pool or kind is assumed. Raises ManifestError."""
    problems: list[str] = []
    ranks: list[RankHardware] = []
    for pool in spec.pools_in_rank_order:
        device = assumed.pools.get(pool.name) or _of_kind(assumed, pool)
        if device is None:
            problems.append(f"kinds.{pool.type}: is required, or pools.{pool.name}: the manifest has this pool")
            continue
        memory = device.memory or (pool.memory_per_rank if pool.type == PoolType.CPU else None)
        if memory is None:
            problems.append(f"kinds.{pool.type}.memory: is required, since the manifest does not say it")
            continue
        memory = _usable(spec, pool, memory)
        bits = _KEPT_BITS if device.weight_bits is None else frozenset(device.weight_bits)
        speeds, cores = device.speeds(), pool.cores_per_rank
        made = RankHardware(pool.type, "assumed", memory, speeds, pool.name, cores, weight_bits=bits)
        ranks += [made] * pool.ranks
    problems += [f"pools.{name}: the manifest has no such pool" for name in assumed.pools if name not in _names(spec)]
    if assumed.exchange.device is None and sum(p.ranks for p in spec.pools if p.type == PoolType.GPU) > 1:
        problems.append("exchange.device: is required where there are several GPU ranks")
    if problems:
        raise ManifestError(problems, source=source)
    device_exchange = assumed.exchange.device.speeds() if assumed.exchange.device is not None else ExchangeSpeeds()
    return Hardware(tuple(ranks), assumed.exchange.host.speeds(), device_exchange)


def whole_machine(
    assumed: AssumedHardware, *, name: str, model: Mapping[str, object], source: str = ""
) -> HeteroInference:
    """Return a resource with all ranks that the file's kinds have, for use without a manifest.

    `model` are fields of spec.model beside the URI. Raises ManifestError.
    """
    kinds = {"gpu": assumed.kinds.gpu, "cpu": assumed.kinds.cpu}
    pools = [
        {"name": kind, "type": kind.upper(), "ranks": device.ranks, kind: {"coresPerRank": device.cores or 1}}
        for kind, device in kinds.items()
        if device is not None and device.ranks is not None
    ]
    if not pools:
        raise ManifestError(["kinds.CPU.ranks or kinds.GPU.ranks: is required without a manifest"], source=source)
    body = {
        "apiVersion": f"{GROUP}/{API_VERSION}",
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "hf://assumed/model", **model},
            "pools": pools,
            "placement": {"workload": {"promptTokens": 2048, "outputTokens": 512}},
            "engine": {"maxNumBatchedTokens": 2048},
        },
    }
    return parse_resource(body, source=source)


def _names(spec: HeteroInferenceSpec) -> set[str]:
    return {pool.name for pool in spec.pools}


def _of_kind(assumed: AssumedHardware, pool: PoolSpec) -> DeviceAssumption | None:
    return assumed.kinds.gpu if pool.type == PoolType.GPU else assumed.kinds.cpu


def _usable(spec: HeteroInferenceSpec, pool: PoolSpec, memory: int) -> int:
    """Return the bytes of `memory` that the rank may use."""
    if pool.type == PoolType.GPU:
        return int(memory * spec.engine.gpu_memory_utilization)
    return min(memory, pool.memory_per_rank or memory)


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location)) or "file"
