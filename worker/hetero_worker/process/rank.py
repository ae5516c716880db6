"""Entry of a rank process.

The order matters: configuration, then binding to cores and memory, and only then torch, whose thread pools and
allocator keep what they find when they start. So everything that imports torch or gRPC is imported late, in
functions. One rank is one process; its main thread computes, all others wait for the network.

A forked rank (`forkserver`) finds torch imported but not started. It has one thread, and binds itself first too.

A rank on host cores hides all GPUs from itself before anything can look for them, so that no library call can create a
context on a device that is not the rank's.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from hetero_api.contract import ENV_CPU_ISA, EXIT_FAILURE, EXIT_PERMANENT, EXIT_STUCK
from hetero_api.cpu_list import format_cpu_list
from hetero_api.errors import HeteroError, ModelReadError
from hetero_api.host.heartbeat import Heartbeat
from hetero_api.host.topology import CpuTopology
from hetero_worker.host.binding import CoreBinding
from hetero_worker.host.numa import LinuxKernel
from hetero_worker.host.pinning import PinningReport, PinningRequest
from hetero_worker.host.process_memory import keep_freed_memory, prepare_threads
from hetero_worker.process.config import RankConfig
from hetero_worker.process.reconnect import ReconnectingRank

if TYPE_CHECKING:
    from hetero_worker.backends.base import DeviceBackend
    from hetero_worker.process.state_machine import WorkerStateMachine

_log = logging.getLogger(__name__)

MakeBackend = Callable[[RankConfig], "DeviceBackend"]
"""Type of `backend_of`; tests pass their own."""

_VISIBLE_GPUS: Final = "CUDA_VISIBLE_DEVICES"
_LEAVE_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_START_LIMIT_S: Final = 600.0
"""Importing torch and measuring the device take seconds; a start that takes longer than this hangs."""


def backend_of(config: RankConfig) -> DeviceBackend:
    """Return the backend that the rank computes with, and import nothing for other kinds of devices."""
    if config.cuda_device is not None:
        from hetero_worker.backends.cuda.backend import CudaBackend

        return CudaBackend(config.cuda_device, pool=config.pool)
    from hetero_worker.backends.cpu import cpu_backend

    return cpu_backend(memory_bytes=config.memory_bytes)


def main(arguments: Sequence[str], environment: Mapping[str, str], *, make_backend: MakeBackend = backend_of) -> int:
    """Run one rank; return its exit code (see hetero_api.contract). `make_backend` makes its device's backend."""
    config = RankConfig.from_command_line(arguments, environment)
    name = f"pod={config.pod_name} local_rank={config.local_rank}".replace("%", "%%")  # in a log that pods share
    log_format = f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s"
    logging.basicConfig(level=config.log_level, stream=sys.stderr, format=log_format)
    if config.cuda_device is None:
        os.environ[_VISIBLE_GPUS] = ""
    # A thread of its own takes these signals: the main thread may be blocked where no handler would run.
    signal.pthread_sigmask(signal.SIG_BLOCK, _LEAVE_SIGNALS)
    heartbeat = Heartbeat.open(config.heartbeat_file)
    heartbeat.keep_pulse()  # from here, where it is not bound to the cores that compute
    try:
        pinning = PinningRequest(
            config.cores, config.num_threads, config.numa_policy, communication=config.communication_cores,
            memory_bytes=config.memory_bytes, pool=config.pool,
        )  # fmt: skip
        binding = CoreBinding.make(pinning, topology=CpuTopology.read(), kernel=LinuxKernel())
        _log_pinning(binding.report)
        prepare_threads(binding.report.num_threads)
        if not keep_freed_memory():
            _log.warning("this C library has no mallopt: steps pay page faults for their buffers")
        return _run(config, binding, heartbeat=heartbeat, make_backend=make_backend)
    except HeteroError as error:
        _log.error("%s", error)
        return EXIT_FAILURE if isinstance(error, ModelReadError) else EXIT_PERMANENT


def preload() -> None:
    """Import what a rank needs, and start nothing."""
    import hetero_worker.backends.cpu
    import hetero_worker.distributed.coordinator
    import hetero_worker.probe.speeds
    import hetero_worker.process.gateway_link
    import hetero_worker.process.messages
    import hetero_worker.process.state_machine
    import hetero_worker.process.tuning_cache
    import hetero_worker.runners.plan_runner  # noqa: F401


def _run(config: RankConfig, binding: CoreBinding, *, heartbeat: Heartbeat, make_backend: MakeBackend) -> int:
    with heartbeat.working(_START_LIMIT_S):
        from hetero_worker.backends.cpu import start_compute_threads

        start_compute_threads(binding.report.num_threads)
        backend = make_backend(config)
        backend.open()
        new_session = _prepare(config, binding, backend, heartbeat=heartbeat)
    rank = ReconnectingRank(
        new_session, connect_timeout_s=config.connect_timeout_s, reconnect_timeout_s=config.reconnect_timeout_s
    )
    _leave_on_signals(rank)
    return rank.run()


def _prepare(
    config: RankConfig, binding: CoreBinding, backend: DeviceBackend, *, heartbeat: Heartbeat
) -> Callable[[float], WorkerStateMachine]:
    """Make, once, all that lasts over gateways; return a function that makes a session."""
    import torch

    from hetero_api.model_config import ModelConfig, model_fingerprint
    from hetero_worker.checkpoints.checkpoint import Checkpoint
    from hetero_worker.checkpoints.packed_cache import PackedCache
    from hetero_worker.distributed.coordinator import form_group
    from hetero_worker.probe.speeds import RankProbe, measure_device
    from hetero_worker.process.gateway_link import GatewayLink
    from hetero_worker.process.link_tls import LinkTls
    from hetero_worker.process.messages import RankIdentity, describe_device, make_hello
    from hetero_worker.process.state_machine import WorkerStateMachine
    from hetero_worker.process.tuning_cache import TuningCache, boot_identity, code_identity
    from hetero_worker.runners.base import WorkProgress
    from hetero_worker.runners.draft import DraftModel
    from hetero_worker.runners.plan_runner import PlanRunner

    pinning = binding.report
    kept = TuningCache(
        config.measurements_file,
        circumstances={
            "torch": torch.__version__,
            "code": code_identity(),
            "boot": boot_identity(),
            "device": backend.name,
            "cpus": format_cpu_list(pinning.cpus),
            "threads": str(pinning.num_threads),
            "isa": os.environ.get(ENV_CPU_ISA, ""),
        },
    )
    model_config = ModelConfig.from_directory(config.model_dir)
    speeds = kept.speeds("device", lambda: measure_device(backend))
    packed = None if config.packed_weights_dir is None else PackedCache(config.packed_weights_dir)
    identity = RankIdentity(
        hello=make_hello(config, describe_device(backend, pinning, speeds)),
        model_dir=config.model_dir,
        model_config=model_config,
        memory_bytes=backend.memory_bytes,
        store_host=config.store_host,
        backend=backend,
        open_weights=partial(Checkpoint, packed=packed),
    )
    draft = None if config.draft_dir is None else DraftModel(backend, config.draft_dir, identity.open_weights)
    progress = WorkProgress(heartbeat.get_on)
    runner = PlanRunner(backend, measure=kept.measure_workspace, draft=draft, progress=progress)

    def new_session(connect_timeout_s: float) -> WorkerStateMachine:
        link = GatewayLink(
            target=config.gateway, token=config.token, connect_timeout_s=connect_timeout_s, cpus=pinning.communication,
            tls=None if config.inside_tls_dir is None else LinkTls(config.inside_tls_dir),
        )  # fmt: skip
        return WorkerStateMachine(
            identity,
            link=link,
            runner=runner,
            form=form_group,
            abort_timeout_s=config.abort_timeout_s,
            give_up=_give_up,
            heartbeat=heartbeat,
            binding=binding,
            probe=RankProbe(backend, kept, model=model_fingerprint(config.model_dir), progress=progress),
            progress=progress,
            reconnects=config.reconnect_timeout_s > 0,
        )

    return new_session


def _leave_on_signals(rank: ReconnectingRank) -> None:
    def wait() -> None:
        while True:
            rank.request_leave(signal.Signals(signal.sigwait(_LEAVE_SIGNALS)).name)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def _give_up() -> None:
    """End the process at once: its main thread is stuck in an epoch that is over."""
    _log.critical("could not leave an aborted epoch in time; exiting with status %d", EXIT_STUCK)
    logging.shutdown()
    os._exit(EXIT_STUCK)


def _log_pinning(report: PinningReport) -> None:
    level = logging.INFO if report.pinned else logging.WARNING
    _log.log(
        level,
        "pinned=%s cpus=%s numa_nodes=%s threads=%d memory=%s%s",
        report.pinned, list(report.cpus), list(report.numa_nodes), report.num_threads, report.memory,
        f": {report.reason}" if report.reason else "",
    )  # fmt: skip


def run() -> None:
    """Run the rank of this process's command line and environment, and exit."""
    sys.exit(main(sys.argv[1:], os.environ))
