"""The probe as a program: what a rank would say at Hello and when its group has formed, without a gateway.

It is started as the rank would be, on the rank's cores. Several on one host make a group: they meet in a folder,
measure the exchange between them, and begin to measure their devices together, as ranks compute together. One line on
stdout:

    {"device": DeviceReport, "formed": Formed}        as protobuf's JSON

The order at start is that of process/rank.py: bind to cores first, then torch. One thread measures; nothing is served.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hetero_api.contract import EXIT_OK, EXIT_PERMANENT
from hetero_api.errors import HeteroError
from hetero_api.host.topology import CpuTopology, NumaPolicy
from hetero_api.program import ProgramParser, read_log_level
from hetero_worker.errors import ExchangeTimeout
from hetero_worker.host.numa import LinuxKernel
from hetero_worker.host.pinning import PinningReport, PinningRequest, pin
from hetero_worker.host.process_memory import keep_freed_memory, prepare_threads
from hetero_worker.process.config import core_list, count, cuda_device, numa_policy, positive, seconds

if TYPE_CHECKING:
    from hetero_worker.backends.base import DeviceBackend
    from hetero_worker.distributed.coordinator import GroupCoordinator
    from hetero_worker.distributed.rendezvous import StoreListener

_log = logging.getLogger(__name__)

TIMEOUT_S: Final = 120.0
"""Longest wait for the others of a group: they may all be importing torch on the same cores."""
_EPOCH: Final = 1
_POLL_S: Final = 0.01
_ADDRESS_FILE: Final = "store-address"


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """The command line."""

    model_dir: Path
    cores: tuple[int, ...]
    num_threads: int
    numa_policy: NumaPolicy
    memory_bytes: int
    cuda_device: int | None
    """None: host cores."""
    dtype: str
    quantization: str
    quantization_group_size: int | None
    group: int
    rank: int
    num_gpu_ranks: int
    meet: Path | None
    timeout_s: float

    @classmethod
    def from_command_line(cls, arguments: Sequence[str]) -> ProbeConfig:
        """Read the arguments. Exits with EXIT_USAGE and one line on stderr when something is wrong."""
        parser = _parser()
        config = cls(**vars(parser.parse_args(arguments)))
        if config.rank >= config.group:
            parser.error(f"--rank {config.rank}: must be less than --group {config.group}")
        if config.group > 1 and config.meet is None:
            parser.error("--meet: a group of more than one needs a folder to meet in")
        return config


def _parser() -> argparse.ArgumentParser:
    parser = ProgramParser(
        prog="hetero_worker.probe", description="Measures what a rank would tell its gateway.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", required=True, type=Path, dest="model_dir", metavar="DIR", help="model; only config.json is read")
    add("--cores", default=(), type=core_list, metavar="LIST", help='CPUs to bind to, e.g. "0-3,8"; empty: not bound')
    add("--num-threads", required=True, type=positive, metavar="N", help="compute threads")
    add("--numa-policy", default=NumaPolicy.BEST_EFFORT, type=numa_policy, metavar="POLICY", help="as a rank's")
    add("--memory-bytes", default=0, type=count, metavar="N", help="memory of this rank; 0: the machine's")
    add(
        "--device", default=None, type=cuda_device, dest="cuda_device", metavar="DEVICE", help="cpu (default) or cuda:N"
    )
    add(
        "--dtype",
        default="",
        choices=("", "float32", "bfloat16", "float16"),
        help="arithmetic type; empty: the device's usual",
    )
    add("--quantization", default="none", choices=("none", "int8", "int4"), help="what weights are quantised to")
    add("--quantization-group-size", type=positive, metavar="N", help="inputs that share a scale, for int4")
    add("--group", default=1, type=positive, metavar="N", help="how many probes measure together, on this host")
    add("--rank", default=0, type=count, metavar="I", help="which of them this is; those on GPUs come first")
    add("--num-gpu-ranks", default=0, type=count, metavar="N", help="how many of them are on GPUs")
    add("--meet", type=Path, metavar="DIR", help="an empty folder that all of the group are given")
    add("--timeout-s", default=TIMEOUT_S, type=seconds, help="longest wait for the others")
    return parser


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Measure and print; returns the exit code."""
    config = ProbeConfig.from_command_line(arguments)
    logging.basicConfig(
        level=read_log_level(environment), stream=sys.stderr, format=f"probe {config.rank}: %(message)s"
    )
    if config.cuda_device is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as a rank on host cores does
    try:
        request = PinningRequest(config.cores, config.num_threads, config.numa_policy)
        pinning = pin(request, topology=CpuTopology.read(), kernel=LinuxKernel())
        prepare_threads(pinning.num_threads)
        keep_freed_memory()
        print(json.dumps(_measure(config, pinning)), flush=True)
    except HeteroError as error:
        _log.error("%s", error)
        return EXIT_PERMANENT
    return EXIT_OK


def _measure(config: ProbeConfig, pinning: PinningReport) -> dict[str, object]:
    import torch
    from google.protobuf import json_format

    from hetero_api.model_config import ModelConfig
    from hetero_worker.probe.speeds import fixed_needs, measure_speeds
    from hetero_worker.process.messages import describe_device

    torch.set_num_threads(pinning.num_threads)
    stored, backend = ModelConfig.from_directory(config.model_dir), _backend(config)
    model = stored.quantized(config.quantization, config.quantization_group_size)
    dtype = config.dtype or backend.default_dtype
    backend.open()
    group = _form_group(config, backend)
    try:
        formed = group.formed(measure=True)
        if config.group > 1:
            together, alone = group.shared_bandwidth(backend.bandwidth)
            formed.costs.memory_bandwidth, formed.costs.lone_memory_bandwidth = together, alone
        speeds = measure_speeds(backend, model, dtype=dtype, peers=group)
        formed.MergeFrom(fixed_needs(backend, model, dtype=dtype))
    finally:
        group.close()
    speeds.MergeFrom(formed.costs)
    device = describe_device(backend, pinning, speeds)
    return {"device": json_format.MessageToDict(device), "formed": json_format.MessageToDict(formed)}


def _form_group(config: ProbeConfig, backend: DeviceBackend) -> GroupCoordinator:
    from hetero_api.v1 import ranks_pb2
    from hetero_worker.distributed.coordinator import form_group
    from hetero_worker.distributed.rendezvous import GroupRequest, StoreListener

    listener = StoreListener("127.0.0.1")
    address = _meet(config, config.meet, listener) if config.meet is not None else ""
    request = GroupRequest(
        epoch=_EPOCH,
        rank=config.rank,
        world_size=config.group,
        store_address=address,
        kind_asked=ranks_pb2.EXCHANGE_KIND_SHM,
        segment_name=f"hetero-probe-{os.getpid()}" if config.meet is None else _segment_name(config.meet, address),
        timeout_s=config.timeout_s,
        host="127.0.0.1",
        num_gpu_ranks=config.num_gpu_ranks,
        device=backend.device,
        device_backend=backend.collectives,
        staging=backend.staging(),
    )
    return form_group(request, listener=listener, aborted=lambda: False)


def _segment_name(meet: Path, address: str) -> str:
    return f"hetero-probe-{meet.name}-{address.rpartition(':')[2]}"


def _meet(config: ProbeConfig, folder: Path, listener: StoreListener) -> str:
    """Address of rank 0's store, which it leaves in the folder. Raises ExchangeTimeout."""
    file = folder / _ADDRESS_FILE
    if config.rank == 0:
        address = listener.open()
        partial = folder / f".{_ADDRESS_FILE}.{secrets.token_hex(4)}"
        partial.write_text(address, encoding="utf-8")
        os.replace(partial, file)
        return address
    deadline_s = time.monotonic() + config.timeout_s
    while not file.exists():
        if time.monotonic() > deadline_s:
            raise ExchangeTimeout(f"probe 0 did not come to {folder} within {config.timeout_s:g} s")
        time.sleep(_POLL_S)
    return file.read_text(encoding="utf-8")


def _backend(config: ProbeConfig) -> DeviceBackend:
    if config.cuda_device is not None:
        from hetero_worker.backends.cuda.backend import CudaBackend

        return CudaBackend(config.cuda_device, pool="probe")
    from hetero_worker.backends.cpu import cpu_backend

    return cpu_backend(memory_bytes=config.memory_bytes)


def run() -> None:
    """Run the process's `main` with this process's arguments and environment."""
    sys.exit(main(sys.argv[1:], os.environ))
