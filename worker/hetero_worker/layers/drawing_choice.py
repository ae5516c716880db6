"""Which ShardDrawing a rank has: its platform decides, and whether Triton is there for kernels."""

from __future__ import annotations

import importlib.util

import torch

from hetero_worker.distributed.staging import staging_for
from hetero_worker.platforms.base import Platform
from hetero_worker.sampling.device_draws import DeviceDrawing
from hetero_worker.sampling.device_scores import DrawKernels, TorchDrawKernels
from hetero_worker.sampling.drawing import HOST_DRAWING, ShardDrawing


def drawing_for(platform: Platform) -> ShardDrawing:
    """The host's for ranks on host cores, else the device's; the platform is open."""
    if platform.is_host:
        return HOST_DRAWING
    device = platform.device
    return DeviceDrawing(device, draw_kernels(device), staging_for(device).start_to_host)


def draw_kernels(device: torch.device) -> DrawKernels:
    """Triton's on CUDA where Triton is installed, else torch's operators."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from hetero_worker.kernels.sampling import TritonDrawKernels  # imports triton

        return TritonDrawKernels()
    return TorchDrawKernels()
