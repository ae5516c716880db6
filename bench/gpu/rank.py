"""The inside of a rank process: the worker's runner, told what to do over a pipe.

As in a rank of the product, cores are bound before torch is imported, so everything that imports torch is imported
late. Binding is plain affinity here: a rank's own pinning reads the resource's types, which need pydantic.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.gpu.orders import (
    Allocate,
    Device,
    End,
    Failed,
    Form,
    Hello,
    Load,
    Loaded,
    MeasureDevice,
    MeasureParts,
    Options,
    Order,
    Seat,
)

if TYPE_CHECKING:
    from hetero_api.v1 import ranks_pb2
    from hetero_worker.backends.base import DeviceBackend
    from hetero_worker.distributed.coordinator import GroupCoordinator
    from hetero_worker.process.async_steps import AsyncSteps
    from hetero_worker.runners.base import LoadRequest, StepOutput

_HOST: Final = "127.0.0.1"
_TIMEOUT_S: Final = 120.0


def main(seat: Seat, pipe: Connection) -> None:
    """Live until told to end, or until whoever started this process is gone."""
    try:
        _bind(seat)
        _Rank(seat, pipe).live()
    except EOFError:
        return
    except BaseException:  # noqa: BLE001 - whoever reads the pipe tells it
        pipe.send(Failed(traceback.format_exc()))


def _bind(seat: Seat) -> None:
    os.sched_setaffinity(0, seat.cores)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(len(seat.cores))
    if seat.device is not Device.CUDA:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _backend(seat: Seat) -> DeviceBackend:
    if seat.device is Device.CUDA:
        from bench.gpu.ablated import AblatedBackend

        return AblatedBackend()
    from hetero_worker.backends.cpu import cpu_backend

    if seat.device is Device.CPU:
        return cpu_backend(memory_bytes=seat.memory_bytes)
    from tests.support.pseudo_gpu import PseudoGpu

    return PseudoGpu(0, memory_bytes=seat.memory_bytes)


class _Rank:
    def __init__(self, seat: Seat, pipe: Connection) -> None:
        from hetero_worker.backends.cpu import start_compute_threads
        from hetero_worker.distributed.rendezvous import StoreListener
        from hetero_worker.host.process_memory import keep_freed_memory

        keep_freed_memory()
        start_compute_threads(len(seat.cores))
        self._seat = seat
        self._pipe = pipe
        self._backend = _backend(seat)
        self._backend.open()
        self._listener = StoreListener(_HOST)
        self._group: GroupCoordinator | None = None
        self._vocab_size = 0
        self._came_s: deque[float] = deque()
        """When the plans came that are not answered yet."""
        self._make_runner()

    def live(self) -> None:
        import torch

        self._pipe.send(Hello(self._listener.open(), self._backend.name, self._backend.memory_bytes, torch.__version__))
        while True:
            self._steps.rest(self._pipe.poll)
            order: Order | bytes = self._pipe.recv()
            if isinstance(order, bytes):
                self._step(order)
                continue
            self._steps.finish()
            self._pipe.send(self._do(order))
            if isinstance(order, End):
                return

    def _use(self, options: Options) -> None:
        """Compute with these kernels; another choice takes another runner, which loads again."""
        from bench.gpu.ablated import AblatedBackend

        backend = self._backend
        if isinstance(backend, AblatedBackend) and backend.options != options:
            backend.options = options
            self._runner.detach()
            self._make_runner()

    def _make_runner(self) -> None:
        from hetero_worker.process.async_steps import AsyncSteps
        from hetero_worker.runners.plan_runner import PlanRunner

        self._runner = PlanRunner(self._backend)
        self._steps: AsyncSteps = AsyncSteps(self._runner, self._answer)

    def _step(self, payload: bytes) -> None:
        from hetero_api.v1 import ranks_pb2
        from hetero_gateway.group.warm_up import masks_of

        self._came_s.append(time.perf_counter())
        plan = ranks_pb2.StepPlan.FromString(payload)
        self._steps.begin(plan, lambda: masks_of(plan, vocab_size=self._vocab_size))

    def _answer(self, plan: ranks_pb2.StepPlan, output: StepOutput) -> None:
        from hetero_worker.process.messages import step_result

        came_s = self._came_s.popleft()
        if self._seat.rank == 0:
            result = step_result(plan, output, step_s=time.perf_counter() - came_s)
            self._pipe.send(result.SerializeToString())

    def _do(self, order: Order) -> object:
        match order:
            case Form():
                self._form(order)
            case MeasureDevice():
                return self._measure_device()
            case MeasureParts():
                return self._measure_parts(order)
            case Load():
                return self._load(order)
            case Allocate():
                self._runner.allocate(order.num_blocks, order.block_size)
                return self._runner.share_experts()
            case End():
                self._end()
        return None

    def _form(self, order: Form) -> None:
        from hetero_api.v1 import ranks_pb2
        from hetero_worker.distributed.coordinator import form_group
        from hetero_worker.distributed.rendezvous import GroupRequest

        request = GroupRequest(
            epoch=1,
            rank=self._seat.rank,
            world_size=self._seat.world_size,
            store_address=order.store_address,
            kind_asked=ranks_pb2.EXCHANGE_KIND_SHM,
            segment_name=order.segment_name,
            timeout_s=_TIMEOUT_S,
            host=_HOST,
            num_gpu_ranks=self._seat.num_gpu_ranks,
            device=self._backend.device,
            device_backend=self._backend.collectives,
            staging=self._backend.staging(),
        )
        self._group = form_group(request, listener=self._listener, aborted=lambda: False)

    @property
    def _formed(self) -> GroupCoordinator:
        assert self._group is not None, "the program forms the group first"
        return self._group

    def _measure_device(self) -> bytes:
        from hetero_worker.probe.speeds import measure_device

        return measure_device(self._backend).SerializeToString()

    def _measure_parts(self, order: MeasureParts) -> bytes:
        from hetero_worker.probe.speeds import fixed_needs, measure_parts

        group = self._formed
        formed = group.formed(measure=True)
        together, alone = group.shared_bandwidth(self._backend.bandwidth)
        formed.costs.memory_bandwidth, formed.costs.lone_memory_bandwidth = together, alone
        formed.costs.MergeFrom(measure_parts(self._backend, order.config, dtype=order.dtype, peers=group))
        formed.MergeFrom(fixed_needs(self._backend, order.config, dtype=order.dtype))
        return formed.SerializeToString()

    def _load(self, order: Load) -> Loaded:
        from hetero_worker.errors import MemoryBudgetError

        self._use(order.options)
        self._vocab_size = order.config.vocab_size
        exchange = self._formed.connect(
            order.plan,
            inputs_everywhere=bool(order.config.layer_input_size),
            batch_invariant=order.options.batch_invariant,
        )
        self._runner.attach(exchange)
        try:
            report = self._runner.load(self._request(order))
        except MemoryBudgetError as error:
            return Loaded(0, 0, 0, (), refusal=str(error))
        return Loaded(
            report.weight_bytes,
            report.kv_budget_bytes,
            report.kv_bytes_per_token,
            tuple(report.kernels),
            tuple(report.graph_sizes),
        )

    def _request(self, order: Load) -> LoadRequest:
        from bench.gpu.weights import MadeWeights
        from hetero_worker.runners.base import LoadRequest

        return LoadRequest(
            directory=Path("made weights"),
            config=order.config,
            dtype=order.dtype,
            shard_plan=order.plan,
            rank=self._seat.rank,
            max_model_len=order.bounds.max_model_len,
            max_num_batched_tokens=order.bounds.max_num_batched_tokens,
            max_num_seqs=order.bounds.max_num_seqs,
            memory_bytes=order.memory_bytes[self._seat.rank] or self._backend.memory_bytes,
            open_weights=MadeWeights,
            enforce_eager=not order.options.graphs,
            async_steps=order.options.async_steps,
            batch_invariant=order.options.batch_invariant,
            expert_buffer_bytes=order.expert_buffer_bytes,
            num_gpu_ranks=self._seat.num_gpu_ranks,
        )

    def _end(self) -> None:
        self._runner.detach()
        if self._group is not None:
            self._group.close()
