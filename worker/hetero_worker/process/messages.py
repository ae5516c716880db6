"""Identity of a rank, and conversion between its messages to the gateway and the types of its parts.

Messages that do not fit together raise a ProtocolError that names the field.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_api.contract import VERSION
from hetero_api.model_config import ModelConfig, model_fingerprint
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.sampled_digests import resolved_revision
from hetero_worker.distributed.rendezvous import GroupRequest
from hetero_worker.errors import ProtocolError
from hetero_worker.host.pinning import PinningReport
from hetero_worker.process.config import RankConfig
from hetero_worker.process.step_counts import num_rows
from hetero_worker.runners.base import LoadRequest, StepOutput

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SHM: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Facts about a rank that stay the same over its epochs."""

    hello: ranks_pb2.Hello
    """Hello without store_address, held and files, which may differ for every epoch."""
    model_dir: Path
    model_config: ModelConfig
    memory_bytes: int
    store_host: str
    backend: DeviceBackend
    """Device of this process; by its number in an epoch's group the rank must be of that kind."""
    open_weights: Callable[[Path], Checkpoint] = Checkpoint
    """Open the checkpoint in `model_dir`."""


def host_id(*, boot_id: Path = _BOOT_ID, shm: Path = _SHM) -> str:
    """Return an id that two processes share exactly if they run under one kernel and see the same /dev/shm.

    Containers of one machine that do not share /dev/shm have different ids: each tmpfs is a device of its own. A
    machine that lacks either file shares memory with nobody, and its id is random.
    """
    try:
        status = shm.stat()
        return f"{boot_id.read_text().strip()}:{status.st_dev:x}:{status.st_ino:x}"
    except OSError:
        return f"unshared:{uuid.uuid4().hex}"


def describe_device(
    backend: DeviceBackend, pinning: PinningReport, speeds: ranks_pb2.DeviceSpeeds
) -> ranks_pb2.DeviceReport:
    """Describe the rank's device and its measured speeds."""
    device = ranks_pb2.DeviceReport(
        kind=backend.kind,
        name=backend.name,
        memory_bytes=backend.memory_bytes,
        speeds=speeds,
        has_kernels=backend.has_kernels,
    )
    report_pinning(device, pinning)
    return device


def report_pinning(device: ranks_pb2.DeviceReport, pinning: PinningReport) -> None:
    """Write to `device` which cores and memory are bound."""
    device.cpus[:] = pinning.cpus
    device.numa_nodes[:] = pinning.numa_nodes
    device.pinned = pinning.pinned
    device.allowed_cpus = pinning.allowed
    device.pin_message = pinning.reason or f"memory: {pinning.memory}"


def make_hello(config: RankConfig, device: ranks_pb2.DeviceReport) -> ranks_pb2.Hello:
    """Return this process's Hello without what differs for every epoch. Raises ModelError without config.json."""
    return ranks_pb2.Hello(
        pool=config.pool,
        ordinal=config.ordinal,
        local_rank=config.local_rank,
        pod_name=config.pod_name,
        host_id=host_id(),
        instance_id=uuid.uuid4().hex,
        device=device,
        version=VERSION,
        model_fingerprint=model_fingerprint(config.model_dir),
        model_revision=resolved_revision(config.model_dir),
    )


def file_digests(files: Mapping[str, bytes]) -> list[ranks_pb2.FileDigest]:
    """Return Hello.files."""
    return [ranks_pb2.FileDigest(name=name, digest=digest) for name, digest in files.items()]


def group_request(identity: RankIdentity, message: ranks_pb2.FormGroup, *, epoch: int) -> GroupRequest:
    """Return the request for the epoch's groups. Raises ProtocolError if this process does not fit its place."""
    number, backend = num_gpu_ranks(message), identity.backend
    check_kind(backend, identity.hello.pool, message.rank, num_gpu_ranks=number)
    return GroupRequest(
        epoch=epoch,
        rank=message.rank,
        world_size=len(message.places),
        store_address=message.store_address,
        kind_asked=message.exchange,
        segment_name=message.segment_name,
        timeout_s=message.timeout_s,
        host=identity.store_host,
        num_gpu_ranks=number,
        device=backend.device,
        device_backend=backend.collectives,
        staging=backend.staging(),
    )


_NAMES: Final = {ranks_pb2.DEVICE_KIND_CUDA: "a GPU", ranks_pb2.DEVICE_KIND_CPU: "host cores"}


def check_kind(backend: DeviceBackend, pool: str, rank: int, *, num_gpu_ranks: int) -> None:
    """Raise ProtocolError when this process has no device of the kind that the rank's number asks for.

    Ranks [0, num_gpu_ranks) of a group compute on GPUs, all others on host cores: the gateway numbers them so. A
    process is started for one device, and gets its number later, in each epoch again.
    """
    kind = ranks_pb2.DEVICE_KIND_CUDA if rank < num_gpu_ranks else ranks_pb2.DEVICE_KIND_CPU
    if backend.kind != kind:
        raise ProtocolError(
            f"pool {pool}: of a group with {num_gpu_ranks} GPU ranks, rank {rank} computes on {_NAMES[kind]}, but this "
            f"process was started for {_NAMES[backend.kind]}; the pool's type and its ranks' devices must agree"
        )


def num_gpu_ranks(message: ranks_pb2.FormGroup) -> int:
    """Count the GPU ranks among the places. Raises ProtocolError unless they come first."""
    are_gpus = [place.device.kind == ranks_pb2.DEVICE_KIND_CUDA for place in message.places]
    number = sum(are_gpus)
    if not all(are_gpus[:number]):
        raise ProtocolError("form_group.places: ranks with a GPU must come before all others")
    return number


def load_request(
    identity: RankIdentity,
    form: ranks_pb2.FormGroup,
    order: ranks_pb2.LoadModel,
    *,
    rank: int,
    files: Mapping[str, bytes],
) -> LoadRequest:
    """Return the request for this rank's weights, out of the `files` that it named in Hello.

    Raises ProtocolError for a plan with another number of ranks.
    """
    plan, num_gpus = _plan_of(order, "shard_plan", form), num_gpu_ranks(form)
    return LoadRequest(
        directory=identity.model_dir,
        files=files,
        config=quantized_config(identity.model_config, order),
        dtype=order.dtype,
        kv_cache_dtype=order.kv_cache_dtype,
        shard_plan=plan,
        plan_key=order.plan_key,
        rank=rank,
        max_model_len=order.max_model_len,
        max_num_batched_tokens=form.max_num_batched_tokens,
        max_num_seqs=form.max_num_seqs,
        memory_bytes=identity.memory_bytes,
        memory_utilization=identity.backend.memory_share(order.device_memory_utilization),
        cache_size_is_given=order.cache_size_is_given,
        enforce_eager=order.enforce_eager,
        batch_invariant=order.batch_invariant,
        max_adapters=order.max_adapters,
        max_adapter_rank=order.max_adapter_rank,
        adapts_experts=order.adapts_experts,
        draft_plan=_plan_of(order, "draft_plan", form) if order.HasField("draft_plan") else None,
        has_prediction_head=order.has_prediction_head,
        expert_deferral=order.expert_deferral,
        expert_buffer_bytes=order.expert_buffer_bytes,
        num_gpu_ranks=num_gpus,
        gpus_have_kernels=all(place.device.has_kernels for place in form.places[:num_gpus]),
        open_weights=identity.open_weights,
    )


def _plan_of(order: ranks_pb2.LoadModel, field: str, form: ranks_pb2.FormGroup) -> ShardPlan:
    plan = ShardPlan.from_proto(getattr(order, field))
    if plan.world_size != len(form.places):
        raise ProtocolError(f"load_model.{field} is for {plan.world_size} ranks, and the group has {len(form.places)}")
    return plan


def quantized_config(config: ModelConfig, order: ranks_pb2.FormGroup | ranks_pb2.LoadModel) -> ModelConfig:
    """Return the config with weights quantised as the gateway asks. Raises ModelError where that makes no sense."""
    if not order.HasField("quantization"):
        return config
    return config.quantized(order.quantization.method, order.quantization.group_size or None)


def step_result(plan: ranks_pb2.StepPlan, output: StepOutput, *, step_s: float) -> ranks_pb2.StepResult:
    """Return the result of a plan that took `step_s` seconds."""
    return ranks_pb2.StepResult(
        step_id=plan.step_id,
        slots=[token.slot for token in output.sampled],
        token_ids=[token.token for token in output.sampled],
        step_s=step_s,
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        command_report=output.report,
        pooled=output.pooled,
        drafts=output.drafts,
    )


def step_trace(plan: ranks_pb2.StepPlan, *, step_s: float, ended_s: float, exchange_s: float) -> ranks_pb2.StepTrace:
    """Return what a step took that ended at `ended_s` of the monotonic clock."""
    ended_ns = time.time_ns() - int((time.monotonic() - ended_s) * 1e9)
    return ranks_pb2.StepTrace(
        step_id=plan.step_id,
        began_ns=ended_ns - int(step_s * 1e9),
        ended_ns=ended_ns,
        exchange_s=min(exchange_s, step_s),
        rows=num_rows(plan),
        is_prefill=bool(plan.spans),
    )
