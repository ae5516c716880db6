"""Entry of a rank process.

The order matters: configuration, then binding to cores and memory, and only then torch, whose thread pools and
allocator keep what they find when they start. So everything that imports torch or gRPC is imported late, in
functions. One rank is one process; its main thread computes, all others wait for the network.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from hetero_api.contract import EXIT_PERMANENT, EXIT_STUCK
from hetero_api.errors import HeteroError
from hetero_worker.config import RankConfig
from hetero_worker.platforms.host_allocator import keep_freed_memory
from hetero_worker.platforms.numa import LinuxKernel
from hetero_worker.platforms.pinning import PinningReport, PinningRequest, pin
from hetero_worker.platforms.topology import CpuTopology

if TYPE_CHECKING:
    from hetero_worker.life import RankLife

_log = logging.getLogger(__name__)

_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_LEAVE_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_FAREWELL_S: Final = 2.0
"""How long the gateway may take to close its side of the stream when the rank leaves."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one rank; returns its exit code (see hetero_api.contract)."""
    config = RankConfig.from_command_line(arguments, environment)
    _configure_logging(config)
    # A thread of its own takes these signals: the main thread may be blocked where no handler would run.
    signal.pthread_sigmask(signal.SIG_BLOCK, _LEAVE_SIGNALS)
    kernel = LinuxKernel()
    cpus_before = kernel.affinity()
    try:
        pinning = pin(
            PinningRequest(config.cores, config.num_threads, config.numa_policy),
            topology=CpuTopology.read(),
            kernel=kernel,
        )
        _log_pinning(pinning)
        for variable in _THREAD_VARIABLES:
            os.environ[variable] = str(pinning.num_threads)
        if not keep_freed_memory():
            _log.warning("this C library has no mallopt: steps pay page faults for their buffers")
        return _live(config, pinning, cpus_before)
    except HeteroError as error:
        _log.error("pod=%s: %s", config.pod_name, error)
        return EXIT_PERMANENT


def _live(config: RankConfig, pinning: PinningReport, link_cpus: frozenset[int]) -> int:
    import torch

    from hetero_api.model_config import ModelConfig
    from hetero_worker.distributed.groups import form_group
    from hetero_worker.gateway_link import GatewayLink
    from hetero_worker.identity import describe_device, introduce
    from hetero_worker.life import RankIdentity, RankLife
    from hetero_worker.platforms.cpu import CpuPlatform
    from hetero_worker.runners.cpu_runner import CpuRunner

    torch.set_num_threads(pinning.num_threads)
    platform = CpuPlatform(memory_bytes=config.memory_bytes)
    identity = RankIdentity(
        hello=introduce(config, describe_device(platform, pinning)),
        model_dir=config.model_dir,
        model_config=ModelConfig.from_directory(config.model_dir),
        memory_bytes=platform.memory_bytes,
        store_host=config.store_host,
    )
    link = GatewayLink(
        target=config.gateway,
        token=config.token,
        connect_timeout_s=config.connect_timeout_s,
        cpus=link_cpus,
    )
    life = RankLife(
        identity,
        link=link,
        runner=CpuRunner(),
        form=form_group,
        abort_timeout_s=config.abort_timeout_s,
        give_up=_give_up,
    )
    _leave_on_signals(life)
    try:
        return life.run()
    finally:
        link.finish(_FAREWELL_S)


def _leave_on_signals(life: RankLife) -> None:
    def wait() -> None:
        while True:
            life.request_leave(signal.Signals(signal.sigwait(_LEAVE_SIGNALS)).name)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def _give_up() -> None:
    """End the process now: its main thread is stuck in an epoch that is over."""
    _log.critical("could not leave an aborted epoch in time; exiting with status %d", EXIT_STUCK)
    logging.shutdown()
    os._exit(EXIT_STUCK)


def _configure_logging(config: RankConfig) -> None:
    logging.basicConfig(
        level=config.log_level,
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s pod={config.pod_name.replace('%', '%%')} %(name)s: %(message)s",
    )


def _log_pinning(report: PinningReport) -> None:
    level = logging.INFO if report.pinned else logging.WARNING
    _log.log(
        level,
        "pinned=%s cpus=%s numa_nodes=%s threads=%d memory=%s%s",
        report.pinned, list(report.cpus), list(report.numa_nodes), report.num_threads, report.memory,
        f": {report.reason}" if report.reason else "",
    )  # fmt: skip


def run() -> None:
    """The process's `main`, with this process's arguments and environment."""
    sys.exit(main(sys.argv[1:], os.environ))
