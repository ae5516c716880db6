"""Which ShardDrawing a rank has: its platform decides, and whether Triton is there for kernels."""

from __future__ import annotations

import logging

import torch

from hetero_worker.backends.base import Platform
from hetero_worker.distributed.staging import staging_for
from hetero_worker.kernels.availability import triton_problem
from hetero_worker.sampling.device_draws import DeviceDrawing
from hetero_worker.sampling.device_scores import DrawKernels, TorchDrawKernels
from hetero_worker.sampling.drawing import HOST_DRAWING, ShardDrawing

logger = logging.getLogger(__name__)


def drawing_for(platform: Platform) -> ShardDrawing:
    """The host's for ranks on host cores, else the device's; the platform is open."""
    if platform.is_host:
        return HOST_DRAWING
    device = platform.device
    return DeviceDrawing(device, draw_kernels(device), staging_for(device).start_to_host)


def draw_kernels(device: torch.device) -> DrawKernels:
    """Triton's on a CUDA device that runs them, else torch's operators."""
    if device.type == "cpu":
        return TorchDrawKernels()
    if (problem := triton_problem(device)) is not None:
        logger.warning("draws on %s are torch's operators, which are slower: %s", device, problem)
        return TorchDrawKernels()
    from hetero_worker.kernels.sampling import TritonDrawKernels  # imports triton

    return TritonDrawKernels()
