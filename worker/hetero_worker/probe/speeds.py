"""What a rank says at Hello of how fast it is: its device's speeds, and what the model's parts cost there.

The costs are measured in the arithmetic type that the group will most likely use: the one asked for, or else float32
on host cores and bfloat16 on a GPU. `costs_dtype` says which it was; who predicts another one scales.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_worker.attention.selection import attention_of
from hetero_worker.layers.kernel_choice import choose_kernel
from hetero_worker.layers.linear_kernels import PlainKernel, available_kernels
from hetero_worker.platforms.base import Measurement, Platform
from hetero_worker.platforms.host_allocator import release_freed_memory
from hetero_worker.probe.clock import clock_of
from hetero_worker.probe.costs import measure_costs
from hetero_worker.probe.layers import Site, linear_shapes
from hetero_worker.probe.sizes import WEIGHT_BYTES
from hetero_worker.probe.synthetic import SyntheticWeights
from hetero_worker.runners.shard import DTYPES, ChooseKernel

logger = logging.getLogger(__name__)

_MEMORY_SHARE: Final = 8
"""A rank with little memory measures with so small a part of it."""


def default_dtype(platform: Platform) -> str:
    """Of a group whose resource leaves the type open, as far as one rank can tell."""
    return "bfloat16" if platform.kind == ranks_pb2.DEVICE_KIND_CUDA else "float32"


def measure_speeds(
    platform: Platform, config: ModelConfig, *, dtype: str = "", choose: ChooseKernel = choose_kernel
) -> ranks_pb2.DeviceSpeeds:
    """Takes a second or two. `dtype` as in LoadModel; empty: `default_dtype`."""
    began_s = time.perf_counter()
    measured, dtype = platform.measure(), dtype or default_dtype(platform)
    speeds = _device_speeds(measured)
    site = _site(platform, config, DTYPES[dtype], choose)
    weight_bytes = min(WEIGHT_BYTES, platform.memory_bytes // _MEMORY_SHARE)
    costs_began_s = time.perf_counter()
    speeds.costs.extend(measure_costs(config, site, clock=clock_of(platform.device), weight_bytes=weight_bytes))
    speeds.costs_dtype = dtype
    release_freed_memory()
    now_s = time.perf_counter()
    logger.info(
        "measured the device in %.2f s, the model's parts in %.2f s", costs_began_s - began_s, now_s - costs_began_s
    )
    return speeds


def _device_speeds(measured: Measurement) -> ranks_pb2.DeviceSpeeds:
    return ranks_pb2.DeviceSpeeds(
        memory_bandwidth=measured.memory_bandwidth,
        matmul=[
            ranks_pb2.MatmulRate(dtype=dtype, flops=flops) for dtype, flops in sorted(measured.matmul_flops.items())
        ],
        to_device_bandwidth=measured.to_device_bandwidth,
        from_device_bandwidth=measured.from_device_bandwidth,
        device_latency_s=measured.device_latency_s,
    )


def _site(platform: Platform, config: ModelConfig, dtype: torch.dtype, choose: ChooseKernel) -> Site:
    kernels = available_kernels(dtype) if platform.packs_weights else (PlainKernel(),)
    return Site(
        device=platform.device,
        dtype=dtype,
        kernel=choose(kernels, linear_shapes(config), dtype=dtype),
        backend=attention_of(platform, dtype),
        checkpoint=SyntheticWeights(),
    )
